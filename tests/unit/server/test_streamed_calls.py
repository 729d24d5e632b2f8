"""Arguments of calls are sent as they arrive, and are the same however the text was cut, in every family's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.server.api.parsing.blocks import BlockParser, NamedParser
from stepwell.server.api.parsing.formats import NO_TEXTS, REQUIRED, parser_for
from stepwell.server.api.parsing.pieces import Parser, Piece, joined

Arguments = Mapping[str, Any]


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _qwen(name: str, arguments: Arguments) -> str:
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in arguments.items()}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _glm(name: str, arguments: Arguments) -> str:
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in arguments.items()}
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def _dsml(name: str, arguments: Arguments) -> str:
    inner = ""
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        text = value if is_text else dumped(value)
        inner += f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">{text}</｜DSML｜parameter>\n'
    return f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    return dumped(value)


# How a call is written, by form, and the parser for it.
FORMS: dict[str, tuple[str, Callable[[str, Arguments], str]]] = {
    "hermes": ("hermes", lambda name, given: f"<tool_call>\n{dumped({'name': name, 'arguments': given})}\n</tool_call>"),
    "qwen-coder": ("hermes", _qwen),
    "glm": ("glm", _glm),
    "llama3": ("llama3", lambda name, given: dumped({"name": name, "parameters": given})),
    "mistral list": ("mistral", lambda name, given: f"[TOOL_CALLS][{dumped({'name': name, 'arguments': given})}]"),
    "mistral": ("mistral", lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{dumped(given)}"),
    "deepseek v3": ("deepseek", lambda name, given: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                    f"{name}\n```json\n{dumped(given)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "deepseek v3.1": ("deepseek", lambda name, given: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
                      f"{dumped(given)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "deepseek v3.2": ("deepseek", _dsml),
    "kimi": ("kimi", lambda name, given: f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
             f"<|tool_call_argument_begin|>{dumped(given)}<|tool_call_end|><|tool_calls_section_end|>"),
    "harmony": ("harmony", lambda name, given: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                f"{dumped(given)}<|call|>"),
    "gemma json": ("gemma", lambda name, given: dumped({"name": name, "parameters": given})),
    "functiongemma": ("functiongemma", lambda name, given:
                      f"<start_function_call>call:{name}{_gemma_value(dict(given))}<end_function_call>"),
}  # fmt: skip
LETTERS = st.characters(codec="utf-8", exclude_categories=("Cs",))
TEXT = st.text(LETTERS, max_size=12) | st.sampled_from(
    ["</param", "<|", "a <tool> b", '"quoted"', "\\", "{[", "x\n\ny", "｜DSML｜"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "where", "n"]), VALUES, max_size=4)


def parsed(make: Callable[[], Parser], parts: list[str]) -> list[Piece]:
    parser = make()
    return [*(parser.push(part) for part in parts), parser.finish()]


def maker(form: str, arguments: Arguments) -> Callable[[], Parser]:
    texts = {"weather": frozenset(key for key, value in arguments.items() if isinstance(value, str))}
    return lambda: parser_for(FORMS[form][0], None, texts=texts)


def written(form: str, arguments: Arguments) -> str:
    return FORMS[form][1]("weather", arguments)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(arguments=ARGUMENTS, data=st.data())
def test_what_is_streamed_is_what_the_whole_answer_has(form: str, arguments: Arguments, data: st.DataObject) -> None:
    text, make = written(form, arguments), maker(form, arguments)
    whole = joined(parsed(make, [text]))
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [("weather", arguments)] and not whole.content
    assert joined(parsed(make, list(text))) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(parsed(make, parts)) == whole


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(arguments=ARGUMENTS, data=st.data())
def test_an_answer_that_is_cut_short_or_damaged_is_told_alike_in_every_cut(
    form: str, arguments: Arguments, data: st.DataObject
) -> None:
    text, make = written(form, arguments), maker(form, arguments)
    at, size = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 6))
    damaged = text[:at] + data.draw(st.sampled_from(["", "}", '"', "<", "x"])) + text[at + size :]
    for broken in (text[:at], damaged):
        whole = joined(parsed(make, [broken]))
        assert joined(parsed(make, list(broken))) == whole
        assert joined(parsed(make, [broken[: at // 2], broken[at // 2 :]])) == whole


LONG: Arguments = {"city": "Zürich, and a long text behind it that takes its time", "days": 3}


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_told_before_the_call_is_whole(form: str) -> None:
    text = written(form, LONG)
    begun = text[: text.index(" behind it")]
    parser = maker(form, LONG)()
    reported = joined([parser.push(each) for each in begun])
    (call,) = reported.calls
    assert call.name == "weather" and call.arguments.replace(" ", "") == '{"city":"Zürich,andalongtext'
    more = joined([parser.push(text[len(begun) :]), parser.finish()])
    assert [each.name for each in more.calls] == [None] and json.loads(call.arguments + more.calls[0].arguments) == LONG


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_is_cut_off_does_not_look_whole(form: str) -> None:
    text = written(form, LONG)
    (call,) = joined(parsed(maker(form, LONG), [text[: text.index(" behind it")]])).calls
    with pytest.raises(ValueError):
        json.loads(call.arguments)


# What closes a block, or a message, in forms whose arguments are JSON.
CLOSES = {
    "hermes": "</tool_call>",
    "deepseek v3": "<｜tool▁calls▁end｜>",
    "deepseek v3.1": "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_end|>",
    "harmony": "<|call|>",
}


@pytest.mark.parametrize("form", CLOSES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_marker_within_a_string_is_part_of_it(form: str, data: st.DataObject) -> None:
    close = CLOSES[form]
    texts = st.lists(st.sampled_from([close, close[:-1], close[1:], '"', "\\", "\n", " ", "x}"]), max_size=6).map("".join)
    arguments = {"city": data.draw(texts), close: [data.draw(texts)], "days": 3}
    text, make = written(form, arguments), maker(form, arguments)
    whole = joined(parsed(make, [text]))
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [("weather", arguments)] and not whole.content
    assert joined(parsed(make, list(text))) == whole
    at = data.draw(st.integers(0, len(text)))
    assert joined(parsed(make, [text[:at], text[at:]])) == whole


@pytest.mark.parametrize("form", CLOSES)
@pytest.mark.parametrize("behind", ["", "\n", "\nAnd a text."])
def test_a_string_that_is_broken_off_ends_with_its_block(form: str, behind: str) -> None:
    close, make = CLOSES[form], maker(form, LONG)
    text = written(form, LONG)
    broken = text[: text.index(" behind it")] + close + behind
    for parts in ([broken], list(broken)):
        found = joined(parsed(make, parts))
        (call,) = found.calls
        assert call.arguments.endswith("long text") and (form == "harmony" or found.content.strip() == behind.strip())


def test_calls_behind_one_whose_string_is_broken_off_are_told() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    for parts in ([text], list(text)):
        assert [call.name for call in joined(parsed(lambda: parser_for("hermes", None), parts)).calls] == ["f", "g"]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_ends_within_a_call_is_known(form: str) -> None:
    text = written(form, LONG)
    for end, within in ((text.index(" behind it"), True), (len(text), False)):
        for parts in ([text[:end]], list(text[:end])):
            parser = maker(form, LONG)()
            for part in parts:
                parser.push(part)
            parser.finish()
            assert parser.in_call is within


def test_forced_calls_are_told_as_they_come() -> None:
    made: list[Callable[[], Parser]] = [lambda: BlockParser(REQUIRED, NO_TEXTS), lambda: NamedParser("weather")]
    for make, text in zip(made, (dumped([{"name": "weather", "parameters": LONG}]), dumped(LONG)), strict=True):
        pieces = [piece for piece in parsed(make, list(text)) if piece]
        names = [call.name for piece in pieces for call in piece.calls]
        assert names == ["weather", *[None] * (len(names) - 1)] and len(names) > len(LONG["city"])
        assert json.loads(joined(pieces).calls[0].arguments) == LONG
        parser = make()
        assert parser.push(text[:-10]) and parser.in_call
        assert parser.push(text[-10:]) and not parser.in_call
