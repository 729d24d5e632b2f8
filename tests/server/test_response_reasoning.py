"""Reasoning on `/v1/responses`, as the official client reads it: an item of its own, whole and streamed, and sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseReasoningItem

pytest.importorskip("llguidance")

from server.serving import NAME, Running, running, tiny_checkpoint
from server.test_response_tools import ASKED, calls_of
from server.test_tool_calls import BOTH, END, TEMPLATE, THOUGHT, Script
from stepwell.engine.loading.chat import ChatTemplate

SHOWN = TEMPLATE.replace("{{ message.content }}", "{{ message.reasoning_content }}|{{ message.content }}")
MORE: dict[str, Any] = {**ASKED, "extra_body": {"stop": END}}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(checkpoint=replace(tiny_checkpoint(), chat=ChatTemplate(SHOWN, bos_token="<bos>", eos_token="<eos>"))) as made:
        yield made


@pytest.fixture
def script(served: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setattr(served.engine.text, "stream", lambda after, *, special: Script(text))


def thoughts_of(made: Any) -> list[str]:
    items = [item for item in made.output if item.type == "reasoning"]
    assert all(isinstance(item, ResponseReasoningItem) and item.summary == [] for item in items)
    return ["".join(part.text for part in item.content) for item in items]


def test_reasoning_is_an_item_before_the_message_whole_and_streamed(client: openai.OpenAI, script: Any) -> None:
    script(THOUGHT)
    made = client.responses.create(**MORE)
    events = list(client.responses.create(**MORE, stream=True))
    last: Any = events[-1]
    for each in (made, last.response):
        assert [item.type for item in each.output] == ["reasoning", "message", "function_call", "function_call"]
        assert thoughts_of(each) == ["Rome, of course."] and each.output[0].status == "completed"
        assert each.output_text == "Let me see." and calls_of(each) == BOTH
    kinds = [event.type.removeprefix("response.") for event in events]
    several = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    begin, end = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    thinks = [*begin, "reasoning_text.delta", "reasoning_text.done", *end]
    assert several[2:14] == [*thinks, *begin, "output_text.delta", "output_text.done", *end]
    reported = [event for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in reported) == "Rome, of course." and len(reported) > 2, "as it comes"
    assert {(event.output_index, event.content_index, event.item_id) for event in reported} == {
        (0, 0, last.response.output[0].id)
    }
    done: Any = next(event for event in events if event.type == "response.reasoning_text.done")
    part: Any = next(event for event in events if event.type == "response.content_part.added")
    assert done.text == "Rome, of course." and part.part.type == "reasoning_text"


def test_the_clients_stream_helper_takes_reasoning(client: openai.OpenAI, script: Any) -> None:
    script("<think>\nWell.\n</think>\n\nThree.")
    with client.responses.stream(**{name: each for name, each in MORE.items() if name != "tools"}) as stream:
        grown = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        made = stream.get_final_response()
    assert thoughts_of(made) == ["Well."] == ["".join(grown)] and made.output_text == "Three."


def test_reasoning_that_is_cut_off_is_incomplete_and_alone(client: openai.OpenAI, script: Any) -> None:
    script(THOUGHT)
    more = {**MORE, "max_output_tokens": 5}
    last: Any = list(client.responses.create(**more, stream=True))[-1]
    for made in (client.responses.create(**more), last.response):
        assert [(item.type, item.status) for item in made.output] == [("reasoning", "incomplete")] and made.status == "incomplete"
        assert thoughts_of(made) == ["Rome, o"] and made.output_text == ""


def test_reasoning_that_is_sent_back_reaches_the_template(client: openai.OpenAI, http: httpx.Client, script: Any) -> None:
    script("<think>\nWell.\n</think>\n\nThree.")
    first = client.responses.create(**MORE)
    turns: list[Any] = [{"role": "user", "content": "How many?"}, *(json.loads(item.to_json()) for item in first.output)]
    items = [*turns, {"role": "user", "content": "Why?"}]
    said = {"role": "assistant", "content": "Three.", "reasoning_content": "Well."}
    messages = [{"role": "user", "content": "How many?"}, said, {"role": "user", "content": "Why?"}]
    without = [messages[0], {**said, "reasoning_content": ""}, messages[2]]
    counts = [http.post("/tokenize", json={"messages": each}).json()["count"] for each in (messages, without)]
    body = {"model": NAME, "input": items, "max_output_tokens": 1}
    assert http.post("/v1/responses", json=body).json()["usage"]["input_tokens"] == counts[0] == counts[1] + len("Well.")


def test_reasoning_without_a_text_is_taken_and_a_broken_one_refused(http: httpx.Client) -> None:
    user = {"role": "user", "content": "x"}
    empty = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"}
    body: dict[str, Any] = {"model": NAME, "max_output_tokens": 1}
    assert http.post("/v1/responses", json={**body, "input": [empty, user]}).status_code == 200
    for content in ("text", [{"text": 5}], ["x"]):
        refused = http.post("/v1/responses", json={**body, "input": [{**empty, "content": content}, user]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
