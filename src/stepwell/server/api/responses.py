"""`/v1/responses` for plain use: text and calls of functions, whole or streamed. A chat in other words, and asked as one.

Nothing is kept on the server, so that a response cannot be fetched or gone on from later. What would need that is refused, and so
are tools that a server runs. Reasoning that a model sets apart is an item of its own. Fields that ask for more of what never
comes, as a summary of reasoning or results of such tools, are taken, and the response says what holds.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, ValidationError

from stepwell.engine.requests.request import Delta, Finish, Sampling
from stepwell.server.access.door import arrived_s, asking, client_of, principal_of
from stepwell.server.api.answers import Answers, EventStream, collect
from stepwell.server.api.bodies import Body, ChatBody
from stepwell.server.api.chat import chat_asks
from stepwell.server.api.chat_form import ChatForm, chat_form
from stepwell.server.api.replies import made_aside
from stepwell.server.api.requests import Unknown, read_body, refuse_unsupported
from stepwell.server.api.response_items import Event, Output, choice_of, messages_of, tools_of
from stepwell.server.errors import CLIENT_CLOSED, ApiError, of_problems
from stepwell.server.served import Served

_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "kv_transfer_params": (),
    "logprobs": (False,),
    "messages": (),
    "moderation": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": (),  # here it is `text`
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "top_logprobs": (0,),
}
_KEPT_NOWHERE = "responses are not kept here: leave it out, and send the whole conversation as input"
_INSTEAD = {"previous_response_id": _KEPT_NOWHERE, "conversation": _KEPT_NOWHERE}
_PLAIN = {"format": {"type": "text"}}
_FROM = {  # fields of a chat, and what they are made of
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text", "reasoning_effort": "reasoning",
}  # fmt: skip
_OF_CHATS = re.compile(rf"({'|'.join(_FROM)})\b(\[\d+\])?")
# Fields of objects, with the values that they may have: what happens anyway, or never.
_SUMMARY = ("auto", "concise", "detailed")  # of reasoning, which is told as it is
_OF_REASONING: Mapping[str, tuple[object, ...]] = {
    "summary": _SUMMARY, "generate_summary": _SUMMARY, "context": ("auto",), "mode": ("standard",),
}  # fmt: skip
_OF_TEXT: Mapping[str, tuple[object, ...]] = {"verbosity": ("medium",)}
_OF_STREAMS: Mapping[str, tuple[object, ...]] = {"include_obfuscation": (False,), "include_usage": (True, False)}
Includable = Literal[  # parts of items that no answer here has
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip


class ResponsesBody(Body):
    """Other fields are those of chats: sampling, and ours for the cache."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    text: dict[str, Any] | None = None  # its format; `verbosity` may only be what it is anyway
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)  # told again, and used for nothing
    include: list[Includable] | None = Field(None, fail_fast=True)
    store: bool | None = None  # nothing is kept, and the response says so
    truncation: Literal["auto", "disabled"] | None = None  # what is too long is refused, and never cut
    max_tool_calls: int | None = Field(None, ge=1)  # of tools that a server runs: there are none
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None


def responses_router(served: Served) -> APIRouter:
    router, unknown = APIRouter(dependencies=[asking(served.principals)]), Unknown(served.clock)

    @router.post("/v1/responses")
    async def responses(request: Request) -> Response:
        """Answers a conversation, as OpenAI's Responses API does. Nothing is kept."""
        body, size_bytes = await read_body(served, request, ResponsesBody)
        model, chat, principal = served.called(body.model), _chat(body), principal_of(request)
        with _naming_fields():
            refuse_unsupported(chat, principal, unknown, client_of(request))
            asks = await made_aside(
                served, chat, size_bytes, principal, lambda: chat_asks(served, chat, principal, arrived_s(request))
            )
            form = await served.aside(size_bytes, lambda: chat_form(served, chat, asks))
        made = _Made(body, model, asks[0].sampling)
        answers = Answers(served, asks, id=made.id, request=request)
        await answers.begin()
        if body.stream:
            return EventStream(answers, _events(answers, form, made))
        found = await collect(request, answers)
        if found is None:
            return Response(status_code=CLIENT_CLOSED)
        return await asyncio.to_thread(_whole, made, form, found[0], answers)

    return router


@contextmanager
def _naming_fields() -> Iterator[None]:
    """Errors of a chat name the field that its part of a response stands in. Items of the input are counted otherwise there."""
    try:
        yield
    except ApiError as error:
        named = _OF_CHATS.match(str(error))
        told = str(error) if named is None else _FROM[named[1]] + str(error)[named.end() :]
        raise ApiError(
            error.status, told, type=error.type, param=_FROM.get(error.param or "", error.param), code=error.code
        ) from None


def _chat(body: ResponsesBody) -> ChatBody:
    """The same as a chat. Raises ApiError for what only kept responses have."""
    more = dict(body.model_extra or {})
    for name, values in _ONLY_VALUES.items():
        value = more.pop(name, None)
        if value is not None and value not in values:
            why = _INSTEAD.get(name, "it is not supported with these values here")
            raise ApiError(400, f"{name}: {why}", param=name, code="unsupported_parameter")
    _must_be_usual("reasoning", body.reasoning, _OF_REASONING, beside="effort")
    _must_be_usual("text", body.text, _OF_TEXT, beside="format")
    _must_be_usual("stream_options", body.stream_options, _OF_STREAMS)
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not items:
        raise ApiError(400, "input must be a text, or a list of one item or more", param="input")
    messages += messages_of(items)
    fields = {
        **more,
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "response_format": _format(body.text or _PLAIN),
        "tools": tools_of(body.tools),
        "tool_choice": choice_of(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
    }
    with _naming_fields():
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise of_problems(error.errors(include_url=False, include_input=False)) from None


def _must_be_usual(
    name: str, given: Mapping[str, Any] | None, usual: Mapping[str, tuple[object, ...]], beside: str | None = None
) -> None:
    """Raises ApiError for fields of an object that ask for something else than what happens; not for the one that `beside` is."""
    for field, value in (given or {}).items():
        if field == beside or value is None or value in usual.get(field, ()):
            continue
        may = " or ".join(repr(each) for each in usual.get(field, ()))
        what = f"it may only be {may}" if may else "it is not known here: leave it out"
        raise ApiError(400, f"{name}.{field:.80} is not supported; {what}", param=name, code="unsupported_parameter")


def _format(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """As chats name it: there a schema stands in an object of its own. Raises ApiError."""
    wanted = text.get("format")
    if not (wanted is None or isinstance(wanted, Mapping)):
        raise ApiError(400, 'text.format must be {"type": ...}', param="text", code="unsupported_parameter")
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    if not isinstance(wanted.get("schema"), Mapping):
        raise ApiError(400, 'text.format needs {"type": "json_schema", "name": ..., "schema": {...}}', param="text")
    return {"type": "json_schema", "json_schema": {name: each for name, each in wanted.items() if name != "type"}}


def _told(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """What holds of `text`: fields that are null are as if they were not there."""
    return {**_PLAIN, **{name: each for name, each in text.items() if each is not None}}


class _Made:
    """One response as it grows, in OpenAI's form."""

    def __init__(self, body: ResponsesBody, model: str, sampling: Sampling) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._output = Output()
        self._common = {
            "id": self.id, "object": "response", "created_at": int(time.time()), "model": model,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "error": None, "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False, "tool_choice": body.tool_choice or "auto",
            "previous_response_id": None, "store": False, "text": _told(body.text or {}), "tools": body.tools or [],
            "truncation": "disabled", "max_tool_calls": body.max_tool_calls, "background": False,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        }  # fmt: skip

    def begun(self) -> dict[str, Any]:
        return {
            **self._common,
            "status": "in_progress",
            "completed_at": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def push(self, form: ChatForm, index: int, delta: Delta) -> list[Event]:
        """What a delta adds to the output; at the end of the answer, how its last item ended."""
        events = self._output.push(form.said(index, delta))
        if delta.finish is None:
            return events
        return events + self._output.finish(_status(delta.finish))

    def ended(self, finish: Finish | None, usage: Mapping[str, Any]) -> dict[str, Any]:
        status = _status(finish)
        return {
            **self._common,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": self._output.items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
                "total_tokens": usage["total_tokens"],
            },
        }


def _status(finish: Finish | None) -> str:
    return "incomplete" if finish is Finish.LENGTH else "completed"


def _whole(made: _Made, form: ChatForm, answer: Delta, answers: Answers) -> Response:
    """On a thread: a long answer takes its time to parse."""
    made.push(form, 0, answer)
    return Response(_json(made.ended(answer.finish, answers.usage(1, form.usage()))), media_type="application/json")


async def _events(answers: Answers, form: ChatForm, made: _Made) -> AsyncIterator[str]:
    """Events in the order in which OpenAI sends them: the response, its items with their parts one by one, and its end."""
    numbers = count()

    def written(events: Iterable[Event]) -> str:
        return "".join(_event(kind, next(numbers), content) for kind, content in events)

    finish = None
    yield written((f"response.{kind}", {"response": made.begun()}) for kind in ("created", "in_progress"))
    try:
        async for index, delta in answers.deltas():
            finish = delta.finish
            if events := made.push(form, index, delta):
                yield written(events)
    except ApiError as error:  # the status is long out
        yield written([("error", {name: error.body()["error"][name] for name in ("message", "code", "param")})])
        return
    last = made.ended(finish, answers.usage(1, form.usage()))
    yield written([(f"response.{last['status']}", {"response": last})])


def _event(kind: str, number: int, content: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {_json({'type': kind, 'sequence_number': number, **content})}\n\n"


def _json(content: Mapping[str, Any]) -> str:
    """In ASCII: what clients sent and are told again may hold half characters, which have no other form."""
    return json.dumps(content, separators=(",", ":"))
