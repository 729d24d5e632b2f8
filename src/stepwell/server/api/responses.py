"""`/v1/responses`: text and function calls, whole or streamed, translated to a chat.

Nothing is stored on the server, so a response cannot be fetched or continued later; fields that need that are refused, and so are
tools that the server would run. Reasoning is an item of its own. Fields that ask for parts no response here has, such as a
summary of reasoning, are accepted, and the response reports what applies.
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
from stepwell.server.access.admission import arrived_s, client_of, principal_of, require_key
from stepwell.server.api.answers import Answers, EventStream, collect
from stepwell.server.api.bodies import Body, ChatBody
from stepwell.server.api.chat import chat_requests
from stepwell.server.api.chat_form import ChatForm, chat_form
from stepwell.server.api.replies import make_in_thread
from stepwell.server.api.requests import UnknownFields, read_body, refuse_unsupported
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
    "response_format": (),  # the field is `text` here
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "top_logprobs": (0,),
}
_KEPT_NOWHERE = "responses are not stored here: leave it out, and send the whole conversation as input"
_INSTEAD = {"previous_response_id": _KEPT_NOWHERE, "conversation": _KEPT_NOWHERE}
_PLAIN = {"format": {"type": "text"}}
_FROM = {  # fields of a chat, and the fields they come from
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text", "reasoning_effort": "reasoning",
}  # fmt: skip
_OF_CHATS = re.compile(rf"({'|'.join(_FROM)})\b(\[\d+\])?")
# Fields of objects with the values they may have: defaults, or values without effect.
_SUMMARY = ("auto", "concise", "detailed")  # of reasoning, which is returned in full
_OF_REASONING: Mapping[str, tuple[object, ...]] = {
    "summary": _SUMMARY, "generate_summary": _SUMMARY, "context": ("auto",), "mode": ("standard",),
}  # fmt: skip
_OF_TEXT: Mapping[str, tuple[object, ...]] = {"verbosity": ("medium",)}
_OF_STREAMS: Mapping[str, tuple[object, ...]] = {"include_obfuscation": (False,), "include_usage": (True, False)}
Includable = Literal[  # parts of items that no response here has
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip


class ResponsesBody(Body):
    """Other fields are those of chats: sampling and cache."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    text: dict[str, Any] | None = None  # format and verbosity
    tools: list[dict[str, Any]] | None = Field(None, fail_fast=True)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)  # returned unchanged
    include: list[Includable] | None = Field(None, fail_fast=True)
    store: bool | None = None  # ignored: the response has false
    truncation: Literal["auto", "disabled"] | None = None  # a prompt that is too long is refused, never cut
    max_tool_calls: int | None = Field(None, ge=1)  # of server-side tools: there are none
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None


def responses_router(served: Served) -> APIRouter:
    router, unknown = APIRouter(dependencies=[require_key(served.principals)]), UnknownFields(served.clock)

    @router.post("/v1/responses")
    async def responses(request: Request) -> Response:
        """Answers a conversation, as OpenAI's Responses API does. Nothing is kept."""
        body, size_bytes = await read_body(served, request, ResponsesBody)
        model, chat, principal = served.response_name(body.model), _chat(body), principal_of(request)
        with _response_field_names():
            refuse_unsupported(chat, principal, unknown, client_of(request))
            requests = await make_in_thread(
                served, chat, size_bytes, principal, lambda: chat_requests(served, chat, principal, arrived_s(request))
            )
            form = await served.run_in_thread(size_bytes, lambda: chat_form(served, chat, requests))
        made = _Made(body, model, requests[0].sampling)
        answers = Answers(served, requests, id=made.id, request=request)
        await answers.begin()
        if body.stream:
            return EventStream(answers, _events(answers, form, made))
        found = await collect(request, answers)
        if found is None:
            return Response(status_code=CLIENT_CLOSED)
        return await asyncio.to_thread(_whole, made, form, found[0], answers)

    return router


@contextmanager
def _response_field_names() -> Iterator[None]:
    """Renames fields in errors of the chat to the fields of the response body."""
    try:
        yield
    except ApiError as error:
        named = _OF_CHATS.match(str(error))
        message = str(error) if named is None else _FROM[named[1]] + str(error)[named.end() :]
        raise ApiError(
            error.status, message, type=error.type, param=_FROM.get(error.param or "", error.param), code=error.code
        ) from None


def _chat(body: ResponsesBody) -> ChatBody:
    """The body as a chat. Raises ApiError for fields that need stored responses."""
    more = dict(body.model_extra or {})
    for name, values in _ONLY_VALUES.items():
        value = more.pop(name, None)
        if value is not None and value not in values:
            why = _INSTEAD.get(name, "this value is not supported")
            raise ApiError(400, f"{name}: {why}", param=name, code="unsupported_parameter")
    _require_usual_values("reasoning", body.reasoning, _OF_REASONING, except_field="effort")
    _require_usual_values("text", body.text, _OF_TEXT, except_field="format")
    _require_usual_values("stream_options", body.stream_options, _OF_STREAMS)
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
    with _response_field_names():
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise of_problems(error.errors(include_url=False, include_input=False)) from None


def _require_usual_values(
    name: str, given: Mapping[str, Any] | None, usual: Mapping[str, tuple[object, ...]], except_field: str | None = None
) -> None:
    """Raises ApiError for fields of an object with other than their usual values, except for `except_field`."""
    for field, value in (given or {}).items():
        if field == except_field or value is None or value in usual.get(field, ()):
            continue
        may = " or ".join(repr(each) for each in usual.get(field, ()))
        what = f"it may only be {may}" if may else "it is unknown: leave it out"
        raise ApiError(400, f"{name}.{field:.80} is not supported; {what}", param=name, code="unsupported_parameter")


def _format(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The format as chats name it, where a schema is nested one level deeper. Raises ApiError."""
    wanted = text.get("format")
    if not (wanted is None or isinstance(wanted, Mapping)):
        raise ApiError(400, 'text.format must be {"type": ...}', param="text", code="unsupported_parameter")
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    if not isinstance(wanted.get("schema"), Mapping):
        raise ApiError(400, 'text.format needs {"type": "json_schema", "name": ..., "schema": {...}}', param="text")
    return {"type": "json_schema", "json_schema": {name: each for name, each in wanted.items() if name != "type"}}


def _told(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """`text` with defaults. Null fields count as missing."""
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
        """The events of a delta; with the last one, those that end the output."""
        events = self._output.push(form.parse(index, delta))
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
    """Runs on a thread: parsing a long answer is slow."""
    made.push(form, 0, answer)
    return Response(_json(made.ended(answer.finish, answers.usage(1, form.usage()))), media_type="application/json")


async def _events(answers: Answers, form: ChatForm, made: _Made) -> AsyncIterator[str]:
    """Events in OpenAI's order: the response, its items with their parts, and its end."""
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
    except ApiError as error:  # the status was already sent
        yield written([("error", {name: error.body()["error"][name] for name in ("message", "code", "param")})])
        return
    last = made.ended(finish, answers.usage(1, form.usage()))
    yield written([(f"response.{last['status']}", {"response": last})])


def _event(kind: str, number: int, content: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {_json({'type': kind, 'sequence_number': number, **content})}\n\n"


def _json(content: Mapping[str, Any]) -> str:
    """ASCII, because fields returned to the client may contain lone surrogates."""
    return json.dumps(content, separators=(",", ":"))
