"""Tools by the official client: found in answers, forced by grammars, whole and streamed alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance")

from server.serving import NAME, Running, running, tiny_checkpoint
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.random_hybrid import CHAT_TEMPLATE
from stepwell.server.api.bodies import ChatBody
from stepwell.server.api.chat_form import shows_special
from stepwell.server.api.grammars import tool_choice_of
from stepwell.server.errors import ApiError

TEMPLATE = "{# tool_calls: <tool_call>, <think> #}{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
END = "§"  # where scripts end
SCRIPT = (
    'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
)
THOUGHT = f"<think>\nRome, of course.\n</think>\n\n{SCRIPT}"
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": DAYS}, "required": ["city", "days"],
          "additionalProperties": False}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "How it is", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
USER: Any = {"role": "user", "content": "How is the weather?"}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Script:
    """An answer's text, in place of what the model's tokens say: three letters a token."""

    def __init__(self, text: str) -> None:
        self._left = text + END

    def push(self, token: int) -> str:
        said, self._left = self._left[:3], self._left[3:]
        return said

    def finish(self) -> str:
        return ""


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    chat = ChatTemplate(TEMPLATE, bos_token="<bos>", eos_token="<eos>")
    with running(checkpoint=replace(tiny_checkpoint(), chat=chat)) as made:
        yield made


@pytest.fixture
def script(served: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    def says(text: str) -> None:
        def stream(after: object, *, special: bool) -> Script:
            assert not special, "no marker is a special token here, so none has to be in the text"
            return Script(text)

        monkeypatch.setattr(served.engine.text, "stream", stream)

    return says


def ask(client: openai.OpenAI, *messages: Any, **more: Any) -> Any:
    settings = {"tools": TOOLS, "max_tokens": 200, "temperature": 0, "stop": END} | more
    return client.chat.completions.create(model=NAME, messages=[USER, *messages], **settings)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def streamed(client: openai.OpenAI, **more: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """Content, reasoning, calls and finish reason of a streamed answer, put together as clients do."""
    content, reasoning, finish, calls = "", "", "", {}
    for chunk in ask(client, stream=True, **more):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    assert list(calls) == list(range(len(calls)))
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls.values()], finish


BOTH = [("weather", {"city": "Rome"}), ("now", {})]


@pytest.mark.parametrize("choice", [openai.omit, "auto"])
def test_calls_and_reasoning_are_found_in_answers(client: openai.OpenAI, script: Any, choice: Any) -> None:
    script(THOUGHT)
    answer = ask(client, tool_choice=choice).choices[0]
    assert (answer.message.content, calls_of(answer.message), answer.finish_reason) == ("Let me see.", BOTH, "tool_calls")
    assert answer.message.model_extra["reasoning_content"] == "Rome, of course."
    assert len({call.id for call in answer.message.tool_calls}) == 2
    assert streamed(client, tool_choice=choice) == ("Let me see.", "Rome, of course.", BOTH, "tool_calls")


def test_tools_that_may_not_be_called_are_not_looked_for(client: openai.OpenAI, script: Any) -> None:
    script(SCRIPT)
    answer = ask(client, tool_choice="none").choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (SCRIPT, None, "stop")
    assert ask(client, tools=openai.omit).choices[0].message.content == SCRIPT


def test_one_call_is_told_where_no_more_are_wanted(client: openai.OpenAI, script: Any) -> None:
    script(SCRIPT)
    assert calls_of(ask(client, parallel_tool_calls=False).choices[0].message) == BOTH[:1]
    assert streamed(client, parallel_tool_calls=False)[2] == BOTH[:1]


def test_an_answer_without_calls_is_content_and_ends_as_ever(client: openai.OpenAI, script: Any) -> None:
    script("It is 20 degrees, <b>fine</b>.")
    answer = ask(client).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (
        "It is 20 degrees, <b>fine</b>.",
        None,
        "stop",
    )
    assert streamed(client) == ("It is 20 degrees, <b>fine</b>.", "", [], "stop")


BEGUN = 'Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Ro'


def test_a_stop_string_within_arguments_does_not_end_as_a_call(client: openai.OpenAI, script: Any) -> None:
    script(BEGUN + "§ and more")
    answer = ask(client).choices[0]
    assert answer.finish_reason == "stop" and answer.model_extra is not None and answer.model_extra["stop_reason"] == END
    assert answer.message.tool_calls[0].function.arguments == '{"city": "Ro'
    last = list(ask(client, stream=True))[-1].choices[0]
    assert last.finish_reason == "stop"


@pytest.mark.parametrize("stop", [END, "</tool_call>"])
def test_a_stop_string_behind_arguments_ends_as_a_call(client: openai.OpenAI, script: Any, stop: str) -> None:
    script(BEGUN + 'me </tool_call> §"}}</tool_call>'.replace(stop, "-", 1))
    answer = ask(client, stop=stop).choices[0]
    assert answer.finish_reason == "tool_calls" and len(answer.message.tool_calls) == 1
    assert list(ask(client, stream=True, stop=stop))[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("tokens", [1, 5, 6, 8, 11, 14, 23, 26, 29, 32, 35])
def test_an_answer_that_is_cut_off_shows_no_markup(client: openai.OpenAI, script: Any, tokens: int) -> None:
    script(SCRIPT)
    answer = ask(client, max_tokens=tokens).choices[0]
    assert answer.finish_reason == "length" and "Let me see.".startswith((answer.message.content or "").rstrip())
    content = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True, max_tokens=tokens))
    assert content == (answer.message.content or "")


def test_results_of_tools_are_sent_back(client: openai.OpenAI, script: Any) -> None:
    script(SCRIPT)
    message = ask(client).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "20"} for call in message.tool_calls]
    script("So it is 20.")
    assert ask(client, message.model_dump(exclude_none=True), *results).choices[0].message.content == "So it is 20."


@pytest.mark.parametrize("seed", [1, 2])
def test_a_named_tool_is_called_as_its_schema_says(client: openai.OpenAI, seed: int) -> None:
    more = {"tool_choice": NAMED, "temperature": 1, "seed": seed, "max_tokens": 600}
    answer = ask(client, **more).choices[0]
    ((name, arguments),) = calls_of(answer.message)
    assert name == "weather" and arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9 and len(arguments) == 2
    assert (answer.message.content, answer.finish_reason) == (None, "stop")
    assert streamed(client, **more) == ("", "", [(name, arguments)], "stop")


@pytest.mark.parametrize("seed", [1, 2])
def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI, seed: int) -> None:
    more = {"tool_choice": "required", "temperature": 0.5, "seed": seed, "parallel_tool_calls": False, "max_tokens": 600,
            "tools": TOOLS[:1]}  # fmt: skip
    answer = ask(client, **more).choices[0]
    ((name, arguments),) = calls_of(answer.message)
    assert name == "weather" and arguments["city"] in ("Rome", "Oslo") and answer.finish_reason == "tool_calls"
    assert streamed(client, **more) == ("", "", [(name, arguments)], "tool_calls")


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_the_clients_stream_helper_sees_arguments_grow_before_the_call_is_whole(
    client: openai.OpenAI, script: Any, choice: Any
) -> None:
    if choice == "auto":
        script(SCRIPT)
    more: Any = {"tool_choice": choice, "parallel_tool_calls": choice == "auto", "max_tokens": 600, "seed": 3}
    more["tools"] = TOOLS if choice == "auto" else TOOLS[:1]
    grown: dict[int, list[str]] = {}
    with client.chat.completions.stream(model=NAME, messages=[USER], stop=END, **more) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                grown.setdefault(event.index, []).append(event.arguments)
        message = stream.get_final_completion().choices[0].message
    for index, call in enumerate(message.tool_calls or []):
        assert json.loads(call.function.arguments) is not None and grown[index][-1] == call.function.arguments
        assert all(later.startswith(sooner) for sooner, later in zip(grown[index], grown[index][1:], strict=False))
    assert len(grown[0]) > 3, "piece by piece"


def test_a_call_is_one_index_with_its_id_and_name_told_once(client: openai.OpenAI, script: Any) -> None:
    script(SCRIPT)
    parts = [call for chunk in ask(client, stream=True) for call in chunk.choices[0].delta.tool_calls or []]
    for index in (0, 1):
        first, *others = [part for part in parts if part.index == index]
        assert first.id and first.type == "function" and first.function.name
        assert all(part.id is None and part.function.name is None and part.function.arguments for part in others)
    assert [part.index for part in parts] == sorted(part.index for part in parts)


def test_a_forced_call_and_another_format_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ask(client, tool_choice="required", response_format={"type": "json_object"})
    broken: Any = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nothing"}}}}}]
    with pytest.raises(openai.BadRequestError, match="cannot be followed") as caught:
        ask(client, tools=broken, tool_choice="required")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_arguments_are_an_object_whatever_the_schema_leaves_open(client: openai.OpenAI, choice: Any) -> None:
    def tools(parameters: Any) -> Any:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    for parameters in (
        {"type": "array"},
        {"type": "string"},
        {"const": "ab"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"const": 5}}},
    ):
        with pytest.raises(openai.BadRequestError, match=r"of type object|incompatible types|no answer"):
            ask(client, tools=tools(parameters), tool_choice=choice)
    for parameters in (False, True, [1]):
        with pytest.raises(openai.BadRequestError, match="of type object"):
            ask(client, tools=tools(parameters), tool_choice="auto")
    one = {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    answer = ask(client, tools=tools(one), tool_choice=choice, parallel_tool_calls=False, max_tokens=300).choices[0]
    assert calls_of(answer.message) == [("f", {"a": 1})]
    assert ask(client, tools=tools([]), max_tokens=1).choices, "an empty object, as some write it"


def test_a_tool_that_is_not_called_may_have_any_schema(client: openai.OpenAI) -> None:
    other = {"type": None, "function": {"name": "g", "parameters": {"type": "OBJECT"}}}
    answer = ask(client, tools=[*TOOLS, other], tool_choice=NAMED, max_tokens=300).choices[0]
    assert [name for name, _ in calls_of(answer.message)] == ["weather"]
    assert ask(client, tools=[*TOOLS, other], max_tokens=1).choices


def test_tools_of_another_kind_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="is of type 'retrieval'"):
        ask(client, tools=[{"type": "retrieval", "function": {"name": "f"}}])


def test_a_text_format_leaves_calls_and_reasoning_as_they_are(client: openai.OpenAI, script: Any) -> None:
    script(THOUGHT)
    message = ask(client, response_format={"type": "text"}).choices[0].message
    assert calls_of(message) == BOTH and message.model_extra["reasoning_content"] == "Rome, of course."


def test_required_tools_find_what_their_schemas_refer_to(client: openai.OpenAI) -> None:
    place = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"], "additionalProperties": False}
    parameters = {"$defs": {"Place": place}, "type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}},
                  "required": ["at"], "additionalProperties": False}  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "go"}}):
        answer = ask(client, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=600).choices[0]
        assert calls_of(answer.message) == [("go", {"at": {"city": "Rome"}})]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_schemas_that_are_nested_too_deeply_are_refused(choice: Any) -> None:
    deep: Any = {"type": "string"}
    for _ in range(100_000):
        deep = {"type": "array", "items": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": deep}}}}]
    body = ChatBody.model_construct(model=NAME, messages=[USER], tools=tools, tool_choice=choice)
    with pytest.raises(ApiError, match="nested too deeply"):
        tool_choice_of(body).grammar(several=True)


@pytest.mark.parametrize(("special", "shown"), [((), False), (("<think>",), True), (("<tool_call>",), True), (("<x>",), False)])
def test_special_tokens_are_shown_where_a_marker_is_one(special: tuple[str, ...], shown: bool) -> None:
    class Words:
        def encode(self, text: str, *, special: bool) -> list[str]:
            return [text]

        def decode(self, ids: list[str]) -> str:
            return "".join(each for each in ids if each not in special)

    served: Any = SimpleNamespace(text=Words(), tool_parser="hermes", reasoning_parser="think")
    assert shows_special(served, ChatBody.model_validate({"model": NAME, "messages": [USER], "tools": TOOLS})) is shown
