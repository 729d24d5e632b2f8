"""Functions on `/v1/responses`, as the official client asks for them: whole and streamed, and answered in the next turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pydantic
import pytest

pytest.importorskip("llguidance")

from server.serving import NAME, Running, running, tiny_checkpoint
from server.test_tool_calls import BEGUN, BOTH, END, SCHEMA, SCRIPT, TEMPLATE, Script
from stepwell.engine.loading.chat import ChatTemplate

TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "How it is", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
]
ASKED: dict[str, Any] = {
    "model": NAME,
    "input": "How is the weather?",
    "temperature": 0,
    "max_output_tokens": 600,
    "tools": TOOLS,
}
SHOWN = TEMPLATE.replace("{{ message.content }}", "{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}")
NAMED: Any = {"type": "function", "name": "weather"}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(checkpoint=replace(tiny_checkpoint(), chat=ChatTemplate(SHOWN, bos_token="<bos>", eos_token="<eos>"))) as made:
        yield made


@pytest.fixture
def script(served: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setattr(served.engine.text, "stream", lambda after, *, special: Script(text))


def calls_of(made: Any) -> list[tuple[str, Any]]:
    return [(item.name, json.loads(item.arguments)) for item in made.output if item.type == "function_call"]


def test_text_and_calls_are_items_whole_and_streamed(client: openai.OpenAI, script: Any) -> None:
    script(SCRIPT)
    more: Any = {**ASKED, "extra_body": {"stop": END}}
    made = client.responses.create(**more)
    assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
    assert made.output_text == "Let me see." and calls_of(made) == BOTH and made.status == "completed"
    assert len({item.call_id for item in made.output if item.type == "function_call"}) == 2
    assert [tool.name for tool in made.tools if tool.type == "function"] == ["weather", "now"]
    events = list(client.responses.create(**more, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.type == "response.completed" and calls_of(last.response) == BOTH and last.response.output_text == "Let me see."
    kinds = [event.type.removeprefix("response.") for event in events]
    begin, text = ["output_item.added", "content_part.added"], ["output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    several = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]  # several deltas are one here
    assert several == ["created", "in_progress", *begin, "output_text.delta", *text, *call, *call, "completed"]
    reported: dict[int, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            reported[event.output_index] = reported.get(event.output_index, "") + event.delta
    assert [json.loads(each) for each in reported.values()] == [arguments for _, arguments in BOTH]
    assert sum(kind == "function_call_arguments.delta" for kind in kinds) > 3, "arguments come as they are made"


def test_the_clients_stream_helper_parses_calls(client: openai.OpenAI) -> None:
    class Weather(pydantic.BaseModel):
        """How it is."""

        days: bool

    tool = openai.pydantic_function_tool(Weather)["function"]
    given: Any = [{"type": "function", **tool}]
    with client.responses.stream(**ASKED | {"tools": given, "tool_choice": "required", "parallel_tool_calls": False}) as stream:
        grown = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        made = stream.get_final_response()
    ((name, arguments),) = calls_of(made)
    assert name == "Weather" and isinstance(arguments["days"], bool) and len(grown) > 3 and json.loads(grown[-1]) == arguments


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_forced_call_follows_its_schema(client: openai.OpenAI, choice: Any) -> None:
    more = ASKED | {"tool_choice": choice, "parallel_tool_calls": False, "tools": TOOLS[:1]}
    made = client.responses.create(**more)
    ((name, arguments),) = calls_of(made)
    assert name == "weather" and arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    assert [item.type for item in made.output] == ["function_call"] and made.parallel_tool_calls is False
    last: Any = list(client.responses.create(**more, stream=True))[-1]
    assert calls_of(last.response) == calls_of(made)


def test_a_call_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED | {"tool_choice": NAMED, "max_output_tokens": 60})  # a token is a byte
    assert made.status == "incomplete" and made.output[-1].type == "function_call" and made.output[-1].status == "incomplete"


def test_a_call_that_a_stop_string_cuts_off_is_incomplete(client: openai.OpenAI, script: Any) -> None:
    script(BEGUN + END)
    more: Any = {**ASKED, "extra_body": {"stop": END}}
    last: Any = list(client.responses.create(**more, stream=True))[-1]
    for made in (client.responses.create(**more), last.response):
        assert [(item.type, item.status) for item in made.output] == [("message", "completed"), ("function_call", "incomplete")]


def test_text_behind_a_call_is_a_message_of_its_own_whole_and_streamed(client: openai.OpenAI, script: Any) -> None:
    script(f"{SCRIPT}\nThat is all.{SCRIPT}\n")
    more: Any = {**ASKED, "extra_body": {"stop": END}}
    last: Any = list(client.responses.create(**more, stream=True))[-1]
    for made in (client.responses.create(**more), last.response):
        kinds = [item.type for item in made.output]
        assert kinds == ["message", "function_call", "function_call"] * 2
        assert [item.content[0].text.strip() for item in made.output if item.type == "message"] == [
            "Let me see.",
            "That is all.Let me see.",
        ]


def test_results_are_sent_back_as_items(client: openai.OpenAI, served: Running, script: Any, http: httpx.Client) -> None:
    script(SCRIPT)
    first = client.responses.create(**ASKED, extra_body={"stop": END})
    items: list[Any] = [{"role": "user", "content": ASKED["input"]}, *(item.model_dump() for item in first.output)]
    ids = [item.call_id for item in first.output if item.type == "function_call"]
    items += [{"type": "function_call_output", "call_id": id, "output": "20"} for id in ids]
    script("So it is 20.")
    assert client.responses.create(**ASKED | {"input": items}, extra_body={"stop": END}).output_text == "So it is 20."
    calls = [{"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
             for id, (name, arguments) in zip(ids, BOTH, strict=True)]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": id, "content": "20"} for id in ids]
    messages = [items[0], {"role": "assistant", "content": "Let me see.", "tool_calls": calls}, *results]
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    chat = http.post("/tokenize", json={"messages": messages, "tools": tools}).json()["count"]
    response = http.post("/v1/responses", json={**ASKED, "input": items, "max_output_tokens": 1}).json()
    assert response["usage"]["input_tokens"] == chat, "the same prompt as the same conversation has in a chat"


def test_a_kept_conversation_is_refused_with_what_to_do(http: httpx.Client) -> None:
    for name in ("previous_response_id", "conversation"):
        error = http.post("/v1/responses", json={"model": NAME, "input": "x", name: "resp_1"}).json()["error"]
        assert error["param"] == name and "send the whole conversation as input" in error["message"]
