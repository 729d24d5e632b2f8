"""Forced calls all the way, in the form of every served family: template, tokens, grammar, parser, official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance")

from server.families import FAMILIES, checkpoint_of
from server.serving import NAME, Running, running

CITY: Any = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
ZONE: Any = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"], "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get-time", "parameters": ZONE}},
]
ASKED: Any = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Well?"}],
    "tools": TOOLS,
    "max_tokens": 400,
    "temperature": 1,
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
IN_OWN_FORM = [name for name in FAMILIES if name not in ("qwen-coder", "glm", "deepseek v4", "gemma")]
SHOWN_OTHERWISE = ("mistral list",)  # whose templates add ids


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(family: str) -> Iterator[Running]:
    with running(checkpoint=checkpoint_of(FAMILIES[family])) as made:
        yield made


def biased(served: Running) -> dict[str, float]:
    """So that what is thought, and what JSON may have between its pieces, comes to an end soon."""
    text: Any = served.engine.text
    ends = {text.token_id("</think>"): 6.0, text.token_id("<|end|>"): 7.0}
    begins = {str(ord("a")): 2.0} if text.token_id("<|channel|>") is not None else {}  # analysis, and not at once the answer
    return (
        begins
        | {str(each): bias for each, bias in ends.items() if each is not None}
        | {str(ord(each)): -20.0 for each in " \n\r\t"}
    )


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "weather":
        assert found["city"] in ("Rome", "Oslo") and 1 <= found["days"] <= 9 and len(found) == 2
    else:
        assert (name, found) == ("get-time", {"zone": "UTC"})


def test_a_family_is_known_by_its_template(served: Running, family: str) -> None:
    known = served.server.served
    assert (known.tool_parser, known.reasoning_parser) == FAMILIES[family].names


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_are_found_whole_and_streamed_and_fit_their_schema(
    served: Running, client: openai.OpenAI, family: str, choice: Any
) -> None:
    several = choice == "required" and family in ("qwen", "kimi")
    for seed in range(3):
        more: Any = {**ASKED, "tool_choice": choice, "seed": seed, "logit_bias": biased(served), "parallel_tool_calls": several}
        more["max_tokens"] = 1500 if several else 800
        answer = client.chat.completions.create(**more).choices[0]
        assert answer.message.content is None and answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or []]
        assert calls and (several or len(calls) == 1) and all(name == "weather" or choice != NAMED for name, _ in calls)
        for name, arguments in calls:
            check(name, arguments)
        with client.chat.completions.stream(**more) as stream:
            deltas = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
            final: Any = stream.get_final_completion().choices[0].message
        assert [(call.function.name, call.function.arguments) for call in final.tool_calls] == calls and deltas > 3
        thought = (answer.message.model_extra or {}).get("reasoning_content", "")
        assert "<" not in str(thought) or FAMILIES[family].names[1] is not None


def test_the_next_prompt_shows_a_call_as_the_model_wrote_it(served: Running, client: openai.OpenAI, family: str) -> None:
    """So the cache has it, which is why calls are forced in the model's own form. JSON may have other spaces."""
    if family not in IN_OWN_FORM or family in SHOWN_OTHERWISE or FAMILIES[family].names[1] is not None:
        pytest.skip("forced calls are JSON here, or stand behind thoughts, which templates drop")
    more: Any = {**ASKED, "tool_choice": NAMED, "seed": 1, "logit_bias": biased(served), "logprobs": True}
    answer = client.chat.completions.create(**more).choices[0]
    (call,) = answer.message.model_dump()["tool_calls"]
    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    chat, asked = served.server.served.chat, ASKED["messages"]
    begun = chat.render(asked, tools=TOOLS, options=None, add_generation_prompt=True)
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    shown = chat.render([*asked, said], tools=TOOLS, options=None, add_generation_prompt=False)
    assert answer.logprobs is not None and shown.startswith(begun)
    written = "".join(each.token for each in answer.logprobs.content or [])
    shown = shown[len(begun) :]
    for special in set(FAMILIES[family].tokens) - set(FAMILIES[family].plain):
        shown = shown.replace(special, "")  # which logprobs do not show, and without which no call would have been found
    assert shown.split() and "".join(shown.split()) == "".join(written.split())


def test_what_an_answer_was_is_taken_back_as_the_official_client_has_it(
    served: Running, client: openai.OpenAI, family: str
) -> None:
    """A loop of an agent: a call, what the tool said, an answer in words, and another question."""
    more: Any = {**ASKED, "seed": 1, "logit_bias": biased(served)}
    messages: list[Any] = list(ASKED["messages"])
    called = client.chat.completions.create(**{**more, "tool_choice": NAMED}).choices[0].message
    messages += [called.model_dump(), {"role": "tool", "tool_call_id": (called.tool_calls or [])[0].id, "content": "Rain."}]
    more |= {"tool_choice": "none", "tools": TOOLS, "max_tokens": 8}
    said = client.chat.completions.create(**{**more, "messages": messages}).choices[0].message
    assert said.tool_calls is None and "tool_calls" in said.model_dump()
    messages += [said.model_dump(), {"role": "user", "content": "And then?"}]
    again = client.chat.completions.create(**{**more, "messages": messages})
    assert again.usage is not None and again.usage.completion_tokens


def test_formats_are_followed_behind_thoughts(served: Running, client: openai.OpenAI, family: str) -> None:
    if FAMILIES[family].names[1] is None:
        pytest.skip("a family that does not think")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    more: Any = {**ASKED, "response_format": wanted, "logit_bias": biased(served), "tools": openai.omit, "n": 8, "seed": 5}
    more |= {"temperature": 2}  # or none of them thinks where it may leave that out
    choices = client.chat.completions.create(**more).choices
    for choice in choices:
        check("weather", choice.message.content or "")
        assert choice.finish_reason == "stop"
    thoughts = [str((choice.message.model_extra or {}).get("reasoning_content", "")) for choice in choices]
    assert any(thoughts) is (FAMILIES[family].opening[-8:] != "</think>")
    reported: dict[int, str] = {}
    for chunk in client.chat.completions.create(**more, stream=True):
        reported[chunk.choices[0].index] = reported.get(chunk.choices[0].index, "") + (chunk.choices[0].delta.content or "")
    assert [reported[at] for at in range(8)] == [choice.message.content for choice in choices]
