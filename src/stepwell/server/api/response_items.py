"""Items of `/v1/responses`: parts of a conversation in the input, parts of an answer in the output.

in     message, reasoning, function_call, function_call_output      become messages of a chat
out    message, reasoning, function_call                            grow with the answer, with an event for each change
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.server.api.parsing.pieces import Call, Piece, id_of, parts_of
from stepwell.server.errors import ApiError

Item = dict[str, Any]
Event = tuple[str, dict[str, Any]]  # type and content
_OF_MESSAGES = ("role", "content")
_KINDS = "message, reasoning, function_call or function_call_output"
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # items with text, and the type of that text


# ---- in -----------------------------------------------------------------------------------------


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Converts the items of a conversation to messages of a chat. Raises ApiError.

    Calls belong to the assistant's message before them. Reasoning belongs to the assistant's text or calls after it, and is
    dropped if there are none.
    """
    messages: list[Item] = []
    names: dict[object, object] = {}  # of tools, by call
    thought = ""
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            thought += _reasoning(number, item)
            continue
        if kind == "message":
            messages.append({name: item[name] for name in _OF_MESSAGES if name in item})
        elif kind == "function_call":
            names[_text(number, item, "call_id")] = item.get("name")
            _calling(messages).append(_call(number, item))
        elif kind == "function_call_output":
            id, output = _text(number, item, "call_id"), item.get("output")
            messages.append({"role": "tool", "tool_call_id": id, "content": output})
            if names.get(id) is not None:
                messages[-1]["name"] = names[id]
        else:
            raise ApiError(400, f"input[{number}]: items of type {kind!r:.80} are not supported; give {_KINDS}", param="input")
        if thought and messages[-1].get("role") == "assistant":
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thought
        thought = ""
    return messages


def _reasoning(number: int, item: Mapping[str, Any]) -> str:
    """The text of a reasoning item. Summaries and encrypted content are ignored."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in parts):
        raise ApiError(400, f"input[{number}]: the content of reasoning must be parts with a text", param="input")
    return "".join(each["text"] for each in parts)


def _calling(messages: list[Item]) -> list[Item]:
    """The calls of the last message, which is created if it is not the assistant's."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls: list[Item] = messages[-1].setdefault("tool_calls", [])
    return calls


def _call(number: int, item: Mapping[str, Any]) -> Item:
    function = {"name": _text(number, item, "name"), "arguments": _text(number, item, "arguments")}
    return {"id": item["call_id"], "type": "function", "function": function}


def _text(number: int, item: Mapping[str, Any], name: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        raise ApiError(400, f"input[{number}]: {item['type']} needs {name}, a text", param="input")
    return found


def tools_of(tools: Sequence[Mapping[str, Any]] | None) -> list[Item] | None:
    """Functions in the format of chats, nested one level deeper. Raises ApiError."""
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            message = f"tools[{number}]: only tools of type function are supported, got {tool.get('type')!r:.80}"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
    return None if tools is None else [{"type": "function", "function": _without_type(tool)} for tool in tools]


def choice_of(choice: Any) -> Any:
    """`tool_choice` in the format of chats."""
    is_named = isinstance(choice, Mapping) and choice.get("type") == "function"
    return {"type": "function", "function": _without_type(choice)} if is_named else choice


def _without_type(given: Mapping[str, Any]) -> Item:
    return {name: each for name, each in given.items() if name != "type"}


# ---- out ----------------------------------------------------------------------------------------


class Output:
    """The items of an answer. Only the last one is open. Text goes into messages, reasoning into items of its own; each call is
    an item.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: Item | None = None
        self._is_whole = True  # false for a call with incomplete arguments
        self._space = ""  # whitespace after another item: starts a message only if text follows

    def push(self, piece: Piece) -> list[Event]:
        """Adds a piece in the order of arrival, so that whole responses have the same items as streams."""
        events: list[Event] = []
        for part in parts_of(piece):
            if isinstance(part, Call):
                events += self._call(part)
            else:
                kind, text = part
                events += self._write(text) if kind == "content" else self._add("reasoning", text)
        return events

    def finish(self, status: str) -> list[Event]:
        """Ends the output. An empty answer is a message without text."""
        events = [] if self.items else self._begin("message")
        return events + self._close(status)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _inside(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}

    def _call(self, call: Call) -> list[Event]:
        """A call, or more arguments of the open one."""
        events = [] if call.name is None else self._enter(_call_item(id_of(call), call.name))
        self._space, self._is_whole = "", call.ends
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            events.append(("response.function_call_arguments.delta", {**self._place, "delta": call.arguments}))
        return events

    def _write(self, text: str) -> list[Event]:
        text, self._space = self._space + text, ""
        if self.items and not self._is_open("message") and not text.strip():
            self._space = text
            return []
        return self._add("message", text)

    def _add(self, kind: str, text: str) -> list[Event]:
        """Adds text to an item of this type, opening one if needed."""
        if not text:
            return []
        events = [] if self._is_open(kind) else self._begin(kind)
        self.items[-1]["content"][0]["text"] += text
        return [*events, (f"response.{_TEXTS[kind]}.delta", {**self._inside, "delta": text, **_logprobs_field(kind)})]

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin(self, kind: str) -> list[Event]:
        events = self._enter(_message_item() if kind == "message" else _reasoning_item())
        events.append(("response.content_part.added", {**self._inside, "part": _part(kind)}))
        self.items[-1]["content"] = [_part(kind)]
        return events

    def _enter(self, item: Item) -> list[Event]:
        events = self._close("completed")
        self.items.append(item)
        self._open, self._is_whole = item, True
        return [*events, ("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})]

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status if self._is_whole else "incomplete"
        if (kind := item["type"]) in _TEXTS:
            part = item["content"][0]
            events: list[Event] = [
                (f"response.{_TEXTS[kind]}.done", {**self._inside, "text": part["text"], **_logprobs_field(kind)}),
                ("response.content_part.done", {**self._inside, "part": part}),
            ]
        else:
            extra = {"name": item["name"], "arguments": item["arguments"]}
            events = [("response.function_call_arguments.done", {**self._place, **extra})]
        return [*events, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]


def _message_item() -> Item:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _reasoning_item() -> Item:
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _call_item(call_id: str, name: str) -> Item:
    id = f"fc_{uuid.uuid4().hex}"
    return {"id": id, "type": "function_call", "status": "in_progress", "call_id": call_id, "name": name, "arguments": ""}


def _part(kind: str) -> dict[str, Any]:
    return {"type": _TEXTS[kind], "text": "", **({"annotations": []} if kind == "message" else {}), **_logprobs_field(kind)}


def _logprobs_field(kind: str) -> dict[str, Any]:
    """Additional fields of a message's events and parts."""
    return {"logprobs": []} if kind == "message" else {}
