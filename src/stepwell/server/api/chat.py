"""`/v1/chat/completions`: messages, rendered to one prompt by the model's template.

All chats of an application begin with the same system prompt and tools. The end of that part is worth a checkpoint, so its
position goes to the engine as a hint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import xxhash
from fastapi import APIRouter, Request, Response

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.chat import ROLE_MARKERS
from stepwell.engine.requests.guided import Guide
from stepwell.engine.requests.request import MAX_STOPS, GenerateRequest
from stepwell.server.access.admission import require_key
from stepwell.server.access.tenants import Principal
from stepwell.server.api.bodies import ChatBody
from stepwell.server.api.chat_form import chat_form, shows_special
from stepwell.server.api.frames import behind_thoughts, forced_calls, is_framed
from stepwell.server.api.grammars import ToolChoice, compiled, grammar_of, thoughts_of, tool_choice_of
from stepwell.server.api.replies import answer
from stepwell.server.api.requests import UnknownFields, requests_of, sampling_of
from stepwell.server.errors import ApiError
from stepwell.server.served import Served

_LEADING = ("system", "developer")
_TEXT_PARTS = ("text", "input_text", "output_text")
_OTHER_MODEL = "or serve a model whose template does"
_END = "<|the end of the message that is continued|>"
_MISTRAL = "TOOL_CALLS"  # occurs in its templates
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_PROBE = {"role": "user", "content": "?"}  # for templates that refuse a system prompt alone

Message = Mapping[str, Any]


def chat_router(served: Served) -> APIRouter:
    router, unknown = APIRouter(dependencies=[require_key(served.principals)]), UnknownFields(served.clock)

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answers a conversation, as OpenAI's API does."""
        return await answer(request, served, ChatBody, unknown, chat_requests, chat_form)

    return router


def chat_requests(served: Served, body: ChatBody, principal: Principal, arrived_s: float) -> list[GenerateRequest]:
    """The requests of a chat, one per choice. Slow. Raises ApiError."""
    max_tokens = body.max_completion_tokens or body.max_tokens
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(
        served, body, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs,
        show_special=shows_special(served, body),
    )  # fmt: skip
    if served.chat.is_plain and not body.ignore_eos and len(sampling.stop) + len(ROLE_MARKERS) <= MAX_STOPS:
        sampling = replace(sampling, stop=(*sampling.stop, *ROLE_MARKERS))
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    choice = tool_choice_of(body)
    ending = ending_of(
        body.messages, add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message
    )
    tokens, hints = chat_prompt(served, body.messages, choice.tools, options, ending=ending)
    served.must_fit(tokens, max_tokens=max_tokens, param="messages")
    guide = _guide(served, body, choice, principal.name)
    thoughts = None if guide is None else thoughts_of(served, tokens, within=_begun(served, body.messages, ending))
    if guide is not None and thoughts is not None:
        guide = guide.behind(thoughts)
    return requests_of(body, principal, tokens, sampling, arrived_s=arrived_s, hints=hints, guide=guide)


def _guide(served: Served, body: ChatBody, choice: ToolChoice, tenant: str | None) -> Guide | None:
    """The grammar of an answer. Raises ApiError."""
    several, framed = body.parallel_tool_calls is not False, is_framed(served, body, choice)
    if choice.is_forced:
        grammar = forced_calls(served, choice, several=several) if framed else choice.grammar(several=several)
        return compiled(served, grammar, tenant, param="tool_choice")
    asked = grammar_of(body)
    if asked is None:
        return None
    return compiled(served, behind_thoughts(served, asked[1]) if framed else asked[1], tenant, param=asked[0])


class Ending(Enum):
    """How a chat's prompt ends: where an answer begins, within the last message, or behind it."""

    ANSWER = "answer"
    WITHIN = "within"
    BEHIND = "behind"


def ending_of(
    messages: Sequence[Message], *, add_generation_prompt: bool | None, continue_final_message: bool | None
) -> Ending:  # fmt: skip
    """How the prompt ends, from vLLM's fields. Raises ApiError if they contradict each other."""
    if not continue_final_message:
        return Ending.BEHIND if add_generation_prompt is False else Ending.ANSWER
    if add_generation_prompt is not False:
        what = "continue_final_message needs add_generation_prompt=false: the answer continues the last message"
        raise ApiError(400, what, param="continue_final_message")
    if messages[-1].get("role") != "assistant":
        what = "continue_final_message needs a last message of role assistant, the beginning of the answer"
        raise ApiError(400, what, param="continue_final_message")
    return Ending.WITHIN


def _begun(served: Served, messages: Sequence[Message], ending: Ending) -> str | None:
    """The text of the message that an answer continues; None for a new message."""
    if ending is Ending.ANSWER:
        return None
    return str(_plain(served, len(messages) - 1, messages[-1])["content"]) if ending is Ending.WITHIN else ""


def chat_prompt(
    served: Served, messages: Sequence[Message], tools: Sequence[Message] | None, options: Mapping[str, Any] | None = None, *,
    ending: Ending = Ending.ANSWER,
) -> tuple[list[int], tuple[int, ...]]:  # fmt: skip
    """The tokens of a chat, and the length of its system prompt and tools. Raises ApiError."""
    if tools and not served.chat.mentions("tools"):
        what = f"leave them out, or describe them in a message ({_OTHER_MODEL})"
        error = f"this model's chat template does not know tools: {what}"
        raise ApiError(400, error, param="tools", code="unsupported_parameter")
    plain = [_plain(served, number, message) for number, message in enumerate(messages)]
    if served.chat.mentions(_MISTRAL):
        plain = [_with_short_ids(message) for message in plain]
    prompt = _prompt(served, plain, tools, options, ending)
    tokens = served.encode(prompt, param="messages")
    leading = plain[:1] if plain[0]["role"] in _LEADING else []
    if not leading and not tools:
        return tokens, ()
    head = _head(served, leading, tools, options)
    begun = served.encode(prompt[: _common(prompt, head)], param="messages") if head else []
    return tokens, (_common(tokens, begun),)


def _prompt(
    served: Served,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    options: Mapping[str, Any] | None,
    ending: Ending,
) -> str:
    """Passes the arguments of calls to the template as data, or as JSON to templates that fail on data (DeepSeek V3, V3.1).

    Raises ApiError.
    """
    try:
        return _rendered(served, messages, tools, options, ending)
    except ConfigError as error:
        refused = error
    if any(message.get("tool_calls") for message in messages):
        try:
            return _rendered(served, [_with_texts(message) for message in messages], tools, options, ending)
        except (ConfigError, RecursionError):  # arguments nested too deeply
            pass  # it failed for another reason
    raise ApiError(400, str(refused), param="messages")


def _rendered(
    served: Served,
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    options: Mapping[str, Any] | None,
    ending: Ending,
) -> str:
    """Raises ConfigError."""
    if ending is Ending.WITHIN:  # cut what the template adds after the last message
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{_END}"}]
    prompt = served.chat.render(messages, tools=tools or None, options=options, add_generation_prompt=ending is Ending.ANSWER)
    if ending is not Ending.WITHIN:
        return prompt
    if _END not in prompt:
        raise ConfigError("the chat template does not show the last message, so it cannot be continued")
    return prompt[: prompt.rindex(_END)]


def _head(served: Served, leading: list[Message], tools: Sequence[Message] | None, options: Mapping[str, Any] | None) -> str:
    """The template's text for system prompt and tools alone; empty if the template refuses them."""
    for messages in (leading, [*leading, _PROBE]):
        try:
            return served.chat.render(messages, tools=tools or None, options=options, add_generation_prompt=False)
        except ConfigError:
            continue
    return ""


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """The length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _plain(served: Served, number: int, message: Message) -> Message:
    """A message as templates expect it: text content, and role `system` for `developer` if the template lacks that."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    place = f"messages[{number}]"
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{place} needs a role, as in 'user'", param="messages")
    if calls is not None and not isinstance(calls, list):
        raise ApiError(400, f"{place}: tool_calls must be a list", param="messages")
    if isinstance(content, list):
        content = "\n".join(_part(place, part) for part in content)
    elif content is None:
        content = ""  # templates would print None
    elif content is not None and not isinstance(content, str):
        raise ApiError(400, f"{place}: content must be text, or a list of parts of type text", param="messages")
    if role == "developer" and "developer" not in served.chat.source:
        role = "system"
    plain = {key: value for key, value in message.items() if value is not None}  # clients send back null fields of responses
    plain |= {"role": role, "content": content}
    thought = plain.get("reasoning_content")
    if isinstance(thought, str) and served.chat.mentions("thinking") and not (calls and content):
        plain.setdefault("thinking", thought)  # for gpt-oss, whose calls have either that or content
    if not calls:
        plain.pop("tool_calls", None)  # templates test only whether the list exists
        return plain
    if not served.chat.mentions("tool_calls"):
        what = f"write them into its content ({_OTHER_MODEL})"
        error = f"{place}: this model's chat template does not know tool_calls: {what}"
        raise ApiError(400, error, param="messages", code="unsupported_parameter")
    return {**plain, "tool_calls": [_call(place, call) for call in calls]}


def _part(place: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ApiError(400, f"{place}: only parts of type text are supported", param="messages")


def _call(place: str, call: Any) -> Any:
    """A tool call with its arguments as data: OpenAI's clients send them as a JSON string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ApiError(400, f"{place}: tool_calls must be objects with a function", param="messages")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # possibly incomplete text of a model
    return {**call, "function": {**function, "arguments": arguments}}


def _with_short_ids(message: Message) -> Message:
    """Replaces ids of tool calls by ids of nine letters and digits, which Mistral's templates require."""
    made = dict(message)
    if isinstance(made.get("tool_call_id"), str):
        made["tool_call_id"] = _short(made["tool_call_id"])
    if calls := made.get("tool_calls"):
        ids = [call.get("id") for call in calls]
        named = [str(number if id is None else id) for number, id in enumerate(ids)]
        made["tool_calls"] = [{**call, "id": _short(id)} for call, id in zip(calls, named, strict=True)]
    return made


def _short(id: str) -> str:
    return id if _SHORT_ID.fullmatch(id) else xxhash.xxh3_128_hexdigest(id.encode(errors="surrogatepass"))[:9]


def _with_texts(message: Message) -> Message:
    """A message with the arguments of its calls as JSON."""
    calls = [(call, call["function"]) for call in message.get("tool_calls") or ()]
    written = [{**call, "function": {**function, "arguments": _text(function)}} for call, function in calls]
    return {**message, "tool_calls": written} if written else message


def _text(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
