"""`/v1/responses` for plain use: text in, text or JSON out, whole or streamed. A chat in other words, and asked as one.

Nothing is kept on the server, so that a response cannot be fetched or gone on from later. What would need that, and tools, is
refused. Reasoning that a model sets apart is not told here; `/v1/chat/completions` does.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError

from stepwell.engine.request import Finish
from stepwell.server.answers import Answers, EventStream, collect
from stepwell.server.bodies import Body, ChatBody
from stepwell.server.chat import chat_asks
from stepwell.server.chat_form import ChatForm, chat_form
from stepwell.server.door import arrived_s, asking, principal_of
from stepwell.server.errors import CLIENT_CLOSED, ApiError, of_problems
from stepwell.server.requests import Unknown, read_body, refuse_unsupported
from stepwell.server.served import Served

_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "kv_transfer_params": (),
    "max_tool_calls": (),
    "messages": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "response_format": (),  # here it is `text`
    "stream_options": ({},),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_OF_MESSAGES = ("role", "content")
_PLAIN = {"format": {"type": "text"}}


class ResponsesBody(Body):
    """Other fields are those of chats: sampling, and ours for the cache."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)  # told again, and used for nothing
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None


def responses_router(served: Served) -> APIRouter:
    router, unknown = APIRouter(dependencies=[asking(served.principals)]), Unknown()

    @router.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body, size_bytes = await read_body(served, request, ResponsesBody)
        served.must_be_called(body.model)
        chat, principal = _chat(body), principal_of(request)
        refuse_unsupported(chat, principal, unknown)
        asks = await served.aside(size_bytes, lambda: chat_asks(served, chat, principal, arrived_s(request)), slow=chat.is_slow)
        form = chat_form(served, chat, asks)
        made = _Made(body)
        answers = Answers(served, asks, id=made.id, left_s=served.left_s(arrived_s(request)), headers=request.headers)
        await answers.begin()
        if body.stream:
            return EventStream(answers, _events(answers, form, made))
        found = await collect(request, answers)
        if found is None:
            return Response(status_code=CLIENT_CLOSED)
        text = form.whole(0, found[0])["message"]["content"] or ""
        return JSONResponse(made.ended(text, found[0].finish, answers.usage(1)))

    return router


def _chat(body: ResponsesBody) -> ChatBody:
    """The same as a chat. Raises ApiError for what only kept responses and tools have."""
    more = dict(body.model_extra or {})
    for name, values in _ONLY_VALUES.items():
        value = more.pop(name, None)
        if value is not None and value not in values:
            raise ApiError(400, f"{name} is not supported with these values here", param=name, code="unsupported_parameter")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += [_message(number, item) for number, item in enumerate(items)]
    fields = {
        **more,
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "response_format": _format(body.text or _PLAIN),
    }
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise of_problems(error.errors(include_url=False, include_input=False)) from None


def _format(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """As chats name it: there a schema stands in an object of its own. Raises ApiError."""
    wanted = text.get("format")
    if text.keys() - {"format"} or not (wanted is None or isinstance(wanted, Mapping)):
        raise ApiError(400, 'text may only be {"format": {"type": ...}}', param="text", code="unsupported_parameter")
    if wanted is None or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: each for name, each in wanted.items() if name != "type"}}


def _message(number: int, item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        raise ApiError(400, f"input[{number}]: only items of type message are supported", param="input")
    return {name: item[name] for name in _OF_MESSAGES if name in item}


class _Made:
    """One response as it grows, in OpenAI's form."""

    def __init__(self, body: ResponsesBody) -> None:
        self.id, self.item_id = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._common = {
            "id": self.id, "object": "response", "created_at": int(time.time()), "model": body.model,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "temperature": body.temperature,
            "top_p": body.top_p, "error": None, "metadata": body.metadata or {}, "parallel_tool_calls": True,
            "previous_response_id": None, "store": False, "text": body.text or _PLAIN, "tool_choice": "auto",
            "tools": [], "truncation": "disabled",
        }  # fmt: skip

    def begun(self) -> dict[str, Any]:
        return {**self._common, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}

    def ended(self, text: str, finish: Finish | None, usage: Mapping[str, Any]) -> dict[str, Any]:
        cut = finish is Finish.LENGTH
        return {
            **self._common,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self.item(text, "incomplete" if cut else "completed")],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted apart
                "total_tokens": usage["total_tokens"],
            },
        }

    def item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _events(answers: Answers, form: ChatForm, made: _Made) -> AsyncIterator[str]:
    """Events in the order in which OpenAI sends them: the response, its one item, the item's one part, and their ends."""
    number = -1

    def event(kind: str, **content: Any) -> str:
        nonlocal number
        number += 1
        data = json.dumps({"type": kind, "sequence_number": number, **content}, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n"

    item = {"output_index": 0}
    inside = {"item_id": made.item_id, "output_index": 0, "content_index": 0}
    yield event("response.created", response=made.begun())
    yield event("response.in_progress", response=made.begun())
    yield event("response.output_item.added", **item, item=made.item(None, "in_progress"))
    yield event("response.content_part.added", **inside, part=_part(""))
    text, finish = "", None
    try:
        async for index, delta in answers.deltas():
            piece, finish = form.piece(index, delta), delta.finish
            if piece is not None and (added := piece["delta"].get("content")):
                text += added
                yield event("response.output_text.delta", **inside, delta=added, logprobs=[])
    except ApiError as error:  # the status is long out
        yield event("error", **{name: error.body()["error"][name] for name in ("message", "code", "param")})
        return
    last = made.ended(text, finish, answers.usage(1))
    yield event("response.output_text.done", **inside, text=text, logprobs=[])
    yield event("response.content_part.done", **inside, part=_part(text))
    yield event("response.output_item.done", **item, item=last["output"][0])
    yield event(f"response.{last['status']}", response=last)
