"""Text that a model may write, or a client may make it write: none of it is lost, repeated, or slow to read."""

from __future__ import annotations

import json
import time

import pytest

from stepwell.server.api.frames import CallForm, written_call
from stepwell.server.api.parsing.formats import parser_for
from stepwell.server.api.parsing.pieces import Call, Piece, joined
from stepwell.server.api.response_items import Output

MOST_CPU_S = 6  # about a second where time grows with the text, and many where it grows with its square


_KIMI_OPEN = "<|tool_calls_section_begin|><|tool_call_begin|>"


def parsed(tools: str, text: str, *, size: int | None = None, reasoning: str | None = None) -> Piece:
    parser, size = parser_for(tools, reasoning), size or len(text)
    pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    return joined([*pieces, parser.finish()])


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("mistral", f"[TOOL_CALLS]f{' ' * 4_000}x{{"),
        ("hermes", f"<tool_call><function=f>{'<parameter=a>1</parameter>' * 8_000}</function></tool_call>"),
        ("glm", f"<tool_call>f{'<arg_key>a</arg_key><arg_value>1</arg_value>' * 8_000}</tool_call>"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{"</tool_call>" * 80_000}'),
        ("hermes", f'<tool_call>{{"arguments": {{"a": "{"</tool_call>" * 80_000}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>' * 10_000),
        ("kimi", _KIMI_OPEN + f'f<|tool_call_argument_begin|>{{\\"{"<|tool_calls_section_end|>" * 40_000}'),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": "' + "<|end|>" * 100_000),
        ("hermes", "<tool_call></tool_call>" * 20_000),
    ],
    ids=[
        "spaces in a head",
        "many parameters",
        "many keys and values",
        "markers in a string",
        "markers in a string before the name",
        "strings that do not end",
        "markers behind a quote",
        "ends in a string",
        "empty blocks",
    ],
)
def test_time_grows_with_the_text_and_no_faster(tools: str, text: str) -> None:
    begun = time.process_time()
    parsed(tools, text)
    assert time.process_time() - begun < MOST_CPU_S


@pytest.mark.parametrize("reasoning", ["think", None])
@pytest.mark.parametrize("before", ["a", ""])
def test_endless_space_is_read_once(before: str, reasoning: str | None) -> None:
    text, begun = f"{before}{chr(10) * 300_000}b", time.process_time()
    assert parsed("hermes", text, size=4, reasoning=reasoning).content == text
    assert time.process_time() - begun < MOST_CPU_S


@pytest.mark.parametrize("size", [1, 5, None])
@pytest.mark.parametrize(
    ("tools", "block"),
    [
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("hermes", "<tool_call><function=f></function>"),
        ("functiongemma", "<start_function_call>call:f{}"),
    ],
)
def test_text_behind_the_calls_of_a_block_that_is_not_closed_is_content(tools: str, block: str, size: int | None) -> None:
    found = parsed(tools, f"{block}\nIt is sunny.", size=size)
    assert [(call.name, call.arguments) for call in found.calls] == [("f", "{}")] and found.content.strip() == "It is sunny."
    assert not parsed(tools, f"{block}\n", size=size).content.strip()


@pytest.mark.parametrize("size", [1, None])
def test_half_characters_are_never_told(size: int | None) -> None:
    named = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert parsed("hermes", named, size=size) == Piece(content=named)
    within = json.dumps({"name": "f", "arguments": '{"a": "\ud800 \U0001f600 \u00fc"}'})
    for tools, text in (("hermes", f"<tool_call>{within}</tool_call>"), ("gemma", '[f(a="\\ud800 \U0001f600 \u00fc")]')):
        (call,) = parsed(tools, text, size=size).calls
        assert call.arguments.encode() and json.loads(call.arguments) == {"a": "\ud800 \U0001f600 \u00fc"}


def test_text_that_comes_with_the_end_of_a_call_stands_behind_it() -> None:
    output = Output()
    output.push(Piece(calls=(Call(name="f", arguments="{"),)))
    more = (Call(arguments="}"), Call(name="g", behind=len("Done.")))
    events = output.push(Piece(content="Done.", calls=more)) + output.finish("completed")
    assert [item["type"] for item in output.items] == ["function_call", "message", "function_call"]
    assert output.items[0]["arguments"] == "{}" and output.items[1]["content"][0]["text"] == "Done."
    assert [content["output_index"] for _, content in events] == sorted(content["output_index"] for _, content in events)


@pytest.mark.parametrize("size", [1, 3, None])
def test_a_whole_answer_has_the_items_that_a_stream_has(size: int | None) -> None:
    calls = [f'<tool_call>{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>' for name in "fgh"]
    text = f"One. {calls[0]}\n{calls[1]}\nTwo.\n\nThree {calls[2]}\n"
    parser, output, size = parser_for("hermes", None), Output(), size or len(text)
    for at in range(0, len(text), size):
        output.push(parser.push(text[at : at + size]))
    output.push(parser.finish())
    output.finish("completed")
    reported = [item["name"] if "name" in item else item["content"][0]["text"].strip() for item in output.items]
    assert reported == ["One.", "f", "g", "Two.\n\nThree", "h"], "and no message of nothing but space"
    assert [item["arguments"] for item in output.items if "name" in item] == ['{"a": 1}'] * 3


@pytest.mark.parametrize("size", [1, 3, 40, None])
def test_reasoning_between_messages_and_calls_is_an_item_where_it_came(size: int | None) -> None:
    said = [f"<|channel|>{channel}<|message|>{text}" for channel, text in (("analysis", "One."), ("commentary", "Two."))]
    call = '<|channel|>commentary to=functions.f<|message|>{"a": 1}'
    text = "<|end|><|start|>assistant".join([said[0], said[1], said[0], call, call, said[0], said[0], said[1]])
    parser, output, size = parser_for("harmony", "harmony"), Output(), size or len(text)
    for at in range(0, len(text), size):
        output.push(parser.push(text[at : at + size]))
    output.push(parser.finish())
    output.finish("completed")
    reported = [item.get("arguments") or item["content"][0]["text"] for item in output.items]
    assert reported == ["One.", "Two.", "One.", '{"a": 1}', '{"a": 1}', "One.One.", "Two."]
    kinds = ["reasoning", "message", "reasoning", "function_call", "function_call", "reasoning", "message"]
    assert [item["type"] for item in output.items] == kinds


@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize(
    ("tools", "text", "statuses"),
    [
        ("hermes", "<tool_call><function=f><parameter=a>12", ["incomplete"]),
        ("hermes", "<tool_call><function=f> and so on", ["incomplete", "completed"]),
        ("functiongemma", "<start_function_call>call:f{a:1,b", ["incomplete"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>Done.', ["incomplete", "completed"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>Done.', ["completed", "completed"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_ca', ["completed"]),
        ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", ["completed"]),
    ],
)
def test_a_call_that_has_not_ended_is_incomplete_whatever_follows(
    tools: str, text: str, statuses: list[str], size: int | None
) -> None:
    parser, output, size = parser_for(tools, None), Output(), size or len(text)
    for at in range(0, len(text), size):
        output.push(parser.push(text[at : at + size]))
    output.push(parser.finish())
    done = [content["item"] for kind, content in output.finish("completed") if kind == "response.output_item.done"]
    assert [item["status"] for item in output.items] == statuses and done == output.items[-1:]
    assert output.items[0]["type"] == "function_call"


@pytest.mark.parametrize("name", ["NUMBER", "GET_ARGUMENTS", "NAME"])
def test_a_tool_may_be_named_as_the_parts_of_a_form_are(name: str) -> None:
    form = CallForm(call="functions.NAME:NUMBER ARGUMENTS")
    assert written_call(form, name, "p0") == f"functions.{name}:\0/[0-9]{{1,4}}/\0 \0@p0\0"
