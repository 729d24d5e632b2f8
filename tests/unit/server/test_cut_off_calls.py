"""What is cut off, within a tag or a string, leaks no markup, and takes nothing that follows into its arguments."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.server.api.parsing.formats import REASONING_NAMES, TOOL_NAMES, markers_of, parser_for
from stepwell.server.api.parsing.pieces import Parser, Piece, joined, overlap
from unit.server.test_streamed_calls import ARGUMENTS, FORMS, Arguments, maker, written

# Calls behind a text, or behind thoughts, for the forms that have markers; the others are whole answers.
BARE = ("llama3", "gemma json")
BEFORE = {"think": "<think>Well <b>so</b>.</think>\n\n", None: ""}


def parsed(make: Callable[[], Parser], parts: list[str], *, cut: bool) -> Piece:
    parser = make()
    return joined([*(parser.push(part) for part in parts), parser.finish(cut=cut)])


def answers(form: str, calls: int, thinks: bool, arguments: Arguments) -> tuple[str, Callable[[], Parser]]:
    """A text with calls in it, as a family writes it, and what it is parsed with."""
    tools = FORMS[form][0]
    texts = {"weather": frozenset(key for key, value in arguments.items() if isinstance(value, str))}
    one = written(form, arguments)
    if form in BARE:
        return one, maker(form, arguments)
    if form == "harmony":
        thought = "<|channel|>analysis<|message|>Well <b>so</b>.<|end|><|start|>assistant" if thinks else ""
        said = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
        return thought + said + "<|start|>assistant".join([one] * calls), lambda: parser_for(tools, tools)
    reasoning = "think" if thinks else None
    text = BEFORE[reasoning] + "Let me look.\n\n" + "\n".join([one] * calls)
    return text, lambda: parser_for(tools, reasoning, texts=texts)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(arguments=ARGUMENTS, calls=st.integers(1, 2), thinks=st.booleans(), data=st.data())
def test_an_answer_that_is_cut_off_is_a_beginning_of_the_whole_one(
    form: str, arguments: Arguments, calls: int, thinks: bool, data: st.DataObject
) -> None:
    text, make = answers(form, calls, thinks, arguments)
    whole = parsed(make, [text], cut=False)
    assert len(whole.calls) == (1 if form in BARE else calls)
    for end in data.draw(st.lists(st.integers(0, len(text)), min_size=1, max_size=12)):
        short = text[:end]
        found = parsed(make, [short], cut=True)
        cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=6)))
        parts = [short[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, end], strict=True)]
        assert parsed(make, parts, cut=True) == found == parsed(make, list(short), cut=True)
        if form in BARE and not found.calls:
            assert text.startswith(found.content), "JSON that may still be an answer has no markers to leave out"
        else:
            assert whole.content.startswith(found.content.rstrip()), (short, found.content)
        assert whole.reasoning.startswith(found.reasoning.rstrip())
        assert len(found.calls) <= len(whole.calls)
        for reported, full in zip(found.calls, whole.calls, strict=False):
            assert reported.name == full.name and full.arguments.startswith(reported.arguments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("thinks", [True, False])
def test_no_marker_is_in_the_content_wherever_an_answer_is_cut_off(form: str, thinks: bool) -> None:
    text, make = answers(form, 2, thinks, {"city": "Zürich, so far", "days": 3, "n": [1, {"a": "b"}]})
    reasoning = "harmony" if form == "harmony" else "think" if thinks else None
    markers = markers_of(FORMS[form][0], reasoning)
    for end in range(len(text) + 1):
        found = parsed(make, [text[:end]], cut=True)
        for reported in (found.content, found.reasoning):
            assert not any(marker in reported for marker in markers), (text[:end], reported)
            assert form in BARE or not any(overlap(reported, marker) for marker in markers), (text[:end], reported)


@pytest.mark.parametrize(
    ("tools", "text", "content"),
    [
        ("kimi", f"{written('kimi', {})[: -len('<|tool_calls_section_end|>')]}\nIt is sunny. <|tool_call", "\nIt is sunny."),
        ("hermes", "<tool_call><function=f></function>\nIt is sunny.\n<fun", "\nIt is sunny."),
        ("mistral", "[TOOL_CALLS]f{} And it is sunny", " And it is sunny"),
        ("hermes", "<tool_call><b>I think that", "<b>I think that"),
        ("hermes", "<tool_call>no JSON at all", "<tool_call>no JSON at all"),
        ("llama3", '{"title": "A long story', '{"title": "A long story'),
        ("harmony", "<|channel|>final<|message|>Hi.<|start|>assist", "Hi."),
        ("hermes", 'Look:\n\n<tool_call>{"name": "f', "Look:"),
        ("hermes", "Look:\n\n<tool_ca", "Look:"),
        ("hermes", "Look:\n\n", "Look:\n\n"),
    ],
)
def test_text_that_is_no_call_is_kept_where_an_answer_is_cut_off(tools: str, text: str, content: str) -> None:
    for parts in ([text], list(text)):
        assert parsed(lambda: parser_for(tools, None), parts, cut=True).content == content


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]f{}", "[TOOL_CALLS]f [CALL_ID]a1 [ARGS]{}", '[TOOL_CALLS][{"name": "f", "arguments": {}']
)
def test_a_call_that_is_whole_is_told_where_an_answer_is_cut_off_right_behind_it(text: str) -> None:
    found = parsed(lambda: parser_for("mistral", None), [text], cut=True)
    assert [(call.name, call.arguments) for call in found.calls] == [("f", "{}")] and not found.content


def test_a_value_that_is_cut_off_behind_a_marker_in_it_has_what_came_of_it() -> None:
    text = "<tool_call><function=f><parameter=a>x</tool_call> y</param"
    for parts in ([text], list(text)):
        found = parsed(lambda: parser_for("hermes", None, texts={"f": frozenset("a")}), parts, cut=True)
        assert [call.arguments for call in found.calls] == ['{"a": "x</tool_call> y'] and not found.content


def test_an_empty_message_to_a_tool_is_no_call_where_it_is_cut_off() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>"
    assert not parsed(lambda: parser_for("harmony", None), [text], cut=True)
    assert parsed(lambda: parser_for("harmony", None), [text], cut=False).calls[0].arguments == "{}"


@pytest.mark.parametrize(
    ("tools", "text", "arguments"),
    [
        ("hermes", "<tool_call><function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b", '{"a": 1'),
        ("hermes", "<tool_call><function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b</tool_call>", '{"a": 1'),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg", '{"a": 1'),
        ("functiongemma", "<start_function_call>call:f{a:1,b", '{"a": 1'),
        ("deepseek", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" str', "{"),
        ("deepseek", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"></｜DSML｜inv', "{"),
    ],
)
def test_what_is_left_within_a_call_is_no_content_whoever_ended_it(tools: str, text: str, arguments: str) -> None:
    for parts in ([text], list(text)):
        found = parsed(lambda: parser_for(tools, None), parts, cut=False)
        assert ([(call.name, call.arguments) for call in found.calls], found.content.strip()) == ([("f", arguments)], "")


SCRAPS = [
    '{"name": "f", "arguments": ', '{"a": "b', '"}', "}", '"', "\\", "\n", " ", "x", "{", "[", "f", "<",
    "<arg_key>a</arg_key>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "call:f{a:", "functions.f:0",
    '<｜DSML｜invoke name="f">', "commentary to=functions.f", '<｜DSML｜parameter name="a" string="true">',
    '<|open|>call tool="f"<|sep|>', '<|open|>argument key="a"<|sep|>',
]  # fmt: skip


@pytest.mark.parametrize("tools", TOOL_NAMES)
@settings(max_examples=60, deadline=None)
@given(cut=st.booleans(), data=st.data())
def test_markers_in_any_order_are_told_alike_in_every_cut(tools: str, cut: bool, data: st.DataObject) -> None:
    reasoning = tools if tools in REASONING_NAMES else "think"
    scraps = st.sampled_from(markers_of(tools, reasoning)) | st.sampled_from(SCRAPS)
    text = "".join(data.draw(st.lists(scraps, max_size=25)))
    at = data.draw(st.integers(0, len(text)))
    whole = parsed(lambda: parser_for(tools, reasoning), [text], cut=cut)
    for parts in (list(text), [text[:at], text[at:]]):
        assert parsed(lambda: parser_for(tools, reasoning), parts, cut=cut) == whole


# ---- strings that are broken off --------------------------------------------------------------------

_KIMI = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}"
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}"
_OBJECT = '{{"name": "{}", "arguments": {}}}'
_V3_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
# By form: the parser, what opens a block, how a call is written, what stands between two calls, and what closes the block.
BROKEN: dict[str, tuple[str, str, str, str, str]] = {
    "hermes": ("hermes", "<tool_call>", _OBJECT, "</tool_call> <tool_call>", "</tool_call>"),
    "text between": ("hermes", "<tool_call>", _OBJECT, "</tool_call> And <tool_call>", "</tool_call>"),
    "mistral": ("mistral", "[TOOL_CALLS]", "{}[ARGS]{}", "[TOOL_CALLS]", ""),
    "kimi": ("kimi", "<|tool_calls_section_begin|>", _KIMI, "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    "kimi blocks": ("kimi", "<|tool_calls_section_begin|>", _KIMI, "<|tool_call_end|><|tool_calls_section_end|>"
                    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "deepseek v3.1": ("deepseek", "<｜tool▁calls▁begin｜>", _V31, "<｜tool▁call▁end｜>", _V3_END),
    "deepseek v3": ("deepseek", "<｜tool▁calls▁begin｜>", _V3, "<｜tool▁call▁end｜>", _V3_END),
    "harmony": ("harmony", "", "<|channel|>commentary to=functions.{}<|message|>{}", "<|call|><|start|>assistant", "<|call|>"),
}  # fmt: skip


@pytest.mark.parametrize("form", BROKEN)
@settings(max_examples=25, deadline=None)
@given(text=st.text(st.sampled_from('ab\\"}{ü ,:'), max_size=8), data=st.data())
def test_a_call_behind_a_string_that_is_broken_off_is_a_call_of_its_own(form: str, text: str, data: st.DataObject) -> None:
    tools, opens, call, between, closes = BROKEN[form]
    begun = '{"a": ' + json.dumps(text, ensure_ascii=False)[:-1]
    after = {"city": "Zürich", "n": [1]}
    broken = call.format("f", begun + "\0").split("\0")[0]
    answer = opens + broken + between + call.format("g", json.dumps(after)) + closes
    at = data.draw(st.integers(0, len(answer)))
    for parts in ([answer], list(answer), [answer[:at], answer[at:]]):
        found = parsed(lambda: parser_for(tools, None), parts, cut=False)
        (first, second) = found.calls
        assert (first.name, first.arguments, second.name) == ("f", begun, "g") and json.loads(second.arguments) == after
        assert found.content.strip() == ("And" if form == "text between" else "")


def test_a_string_is_broken_off_where_a_line_ends_within_it_behind_a_marker() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call> So far.\nNow "this" is'
    for parts in ([text], list(text)):
        found = parsed(lambda: parser_for("hermes", None), parts, cut=False)
        assert [call.arguments for call in found.calls] == ['{"a": "b}}'] and found.content == ' So far.\nNow "this" is'


@pytest.mark.parametrize("size", [1, 7, None])
@pytest.mark.parametrize(("cut", "arguments", "content"), [(True, '{"a": "b</tool_call> So', ""), (False, '{"a": "b', " So")])
def test_a_string_that_the_model_left_is_broken_off_and_one_that_was_cut_off_is_not(
    size: int | None, cut: bool, arguments: str, content: str
) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b</tool_call> So'
    parts = [text[at : at + (size or len(text))] for at in range(0, len(text), size or len(text))]
    found = parsed(lambda: parser_for("hermes", None), parts, cut=cut)
    assert ([call.arguments for call in found.calls], found.content) == ([arguments], content)


@pytest.mark.parametrize("form", ["qwen-coder", "glm", "deepseek v3.2", "functiongemma"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_marker_within_a_value_that_is_no_json_is_part_of_it(form: str, data: st.DataObject) -> None:
    closes = {"deepseek v3.2": "</｜DSML｜tool_calls>", "functiongemma": "<end_function_call>"}
    close = closes.get(form, "</tool_call>")
    texts = st.lists(st.sampled_from([close, close[:-1], close[1:], '"', "\\", "x\ny", " ", "z}"]), max_size=6).map("".join)
    arguments: Any = {"city": close + data.draw(texts) + "!", "days": [data.draw(texts)], "where": data.draw(texts) + "."}
    text, make = written(form, arguments), maker(form, arguments)
    whole = parsed(make, [text + "\nSo."], cut=False)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [("weather", arguments)]
    assert whole.content == "\nSo."
    at = data.draw(st.integers(0, len(text)))
    assert parsed(make, list(text + "\nSo."), cut=False) == whole == parsed(make, [text[:at], text[at:] + "\nSo."], cut=False)


@pytest.mark.parametrize("behind", ["", "\nSo.", "\n<tool_call><function=g></function></tool_call>"])
def test_a_block_that_is_closed_within_a_value_ends_there_where_the_value_does_not_go_on(behind: str) -> None:
    text = "<tool_call><function=f><parameter=a>1</tool_call>" + behind
    for parts in ([text], list(text)):
        found = parsed(lambda: parser_for("hermes", None), parts, cut=False)
        assert [call.arguments for call in found.calls] == ['{"a": 1}', "{}"][: 1 + ("<" in behind)]
        assert found.content.strip() == ("So." if "So" in behind else "")


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("kimi", ("<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>"
                  '{\\"<|tool_calls_section_end|>') * 8_000 + '"x'),
        ("kimi", ("<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>"
                  '{\\"<|tool_call_end|>') * 8_000),
        ("hermes", "<tool_call><function=f><parameter=a></tool_call>" * 15_000),
        ("hermes", "<tool_call><function=f><parameter=a>" + "</tool_call>" * 60_000),
        ("hermes", "<tool_call><function=f><parameter=a>" + "</tool_call>" * 60_000 + "</parameter>"),
    ],
)  # fmt: skip
def test_markers_that_may_be_part_of_a_value_do_not_make_texts_be_read_again_and_again(tools: str, text: str) -> None:
    begun = time.process_time()
    parsed(lambda: parser_for(tools, None), [text], cut=False)
    parsed(lambda: parser_for(tools, None), [text[at : at + 3] for at in range(0, len(text) // 8, 3)], cut=False)
    assert time.process_time() - begun < 15, "minutes where it grows with the square"
