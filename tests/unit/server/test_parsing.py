"""Calls and reasoning are found in answers of every family, the same however the text was cut into pieces."""

# ruff: noqa: E501 -- answers as models write them

from __future__ import annotations

import json
import time
from collections.abc import Callable
from random import Random

import pytest

from stepwell.server.api.parsing.blocks import BlockParser, NamedParser
from stepwell.server.api.parsing.formats import NO_TEXTS, REQUIRED, parser_for, reasoning_of, tools_of
from stepwell.server.api.parsing.pieces import Parser, Piece, joined

CITY = {"city": "Zürich", "days": 3}
BOTH = [("get_weather", CITY), ("now", {})]
Expected = tuple[str, str, list[tuple[str, dict[str, object]]]]  # content, reasoning, calls


def dumped(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


ANSWERS: list[tuple[str | None, str | None, str, Expected]] = [
    ("hermes", None, f"Let me look.\n<tool_call>\n{dumped('get_weather', CITY)}\n</tool_call>\n<tool_call>\n{dumped('now', {})}\n"
     "</tool_call>", ("Let me look.", "", BOTH)),
    ("hermes", "think", f"<think>\nHm, a <tool_call>?\n</think>\n\n<tool_call>{dumped('now', {})}</tool_call>",
     ("", "Hm, a <tool_call>?", BOTH[1:])),
    ("hermes", "think", "<think>short</think>\n\nJust an answer with a < in it, and <tool_cal.\n",
     ("Just an answer with a < in it, and <tool_cal.\n", "short", [])),
    ("hermes", None, "<tool_call>not JSON</tool_call> and on", ("<tool_call>not JSON</tool_call> and on", "", [])),
    ("hermes", None, f"<tool_call>{dumped('now', {})}", ("", "", BOTH[1:])),
    ("hermes", None, '<tool_call>{"name": "now", "argu', ('<tool_call>{"name": "now", "argu', "", [])),
    ("hermes", None, "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n"
     "</parameter>\n</function>\n</tool_call>", ("", "", BOTH[:1])),
    ("glm", "think", "<think>Hm.</think>\nLet me look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", ("Let me look.", "Hm.", BOTH)),
    ("glm", None, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>3"
     "</arg_value></tool_call><tool_call>now</tool_call>", ("", "", BOTH)),
    ("glm", None, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3"
     "</arg_value>\n<tool_call>now\n</tool_call>", ("", "", BOTH)),
    ("glm", None, "<tool_call>no call at all</tool_call> and on", ("<tool_call>no call at all</tool_call> and on", "", [])),
    ("llama3", None, dumped("get_weather", CITY, "parameters"), ("", "", BOTH[:1])),
    ("llama3", None, f"<|python_tag|>{dumped('get_weather', CITY, 'parameters')}; {dumped('now', {}, 'parameters')}", ("", "", BOTH)),
    ("llama3", None, '{"just": "an object"}', ('{"just": "an object"}', "", [])),
    ("llama3", None, "  Plain { text }", ("  Plain { text }", "", [])),
    ("mistral", None, f"[TOOL_CALLS][{dumped('get_weather', CITY)}, {dumped('now', {})}]", ("", "", BOTH)),
    ("mistral", "mistral", f"[THINK]Well.[/THINK]Hi[TOOL_CALLS]get_weather[ARGS]{json.dumps(CITY)}[TOOL_CALLS]now{{}}",
     ("Hi", "Well.", BOTH)),
    ("deepseek", None, "One.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
     f"{json.dumps(CITY)}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", ("One.", "", BOTH)),
    ("deepseek", "think", f"thoughts</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{json.dumps(CITY)}"
     "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ("", "thoughts", BOTH)),
    *[("deepseek", None, f'Look:\n\n<｜DSML｜{tag}>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
       'Zürich</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
       f'<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{tag}>', ("Look:", "", BOTH)) for tag in ("function_calls", "tool_calls")],
    ("kimi", None, "Sure. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     f"{json.dumps(CITY)}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
     "<|tool_calls_section_end|>", ("Sure.", "", BOTH)),
    ("harmony", "harmony", "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary<|message|>"
     "Looking.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
     f"{json.dumps(CITY)}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}",
     ("Looking.", "I must look.", BOTH)),
    (None, "harmony", "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is < 4.",
     ("It is < 4.", "Easy.", [])),
    ("harmony", "harmony", "Without any of it.", ("Without any of it.", "", [])),
    ("gemma", None, "```tool_code\n[get_weather(city='Zürich', days=3), now()]\n```", ("", "", BOTH)),
    ("gemma", None, "[get_weather(city='Zürich', days=3), now()]", ("", "", BOTH)),
    ("gemma", None, f"```json\n{dumped('get_weather', CITY, 'parameters')}\n```", ("", "", BOTH[:1])),
    ("gemma", None, "[1] is a reference, and (so) on", ("[1] is a reference, and (so) on", "", [])),
    ("gemma", None, "[__import__('os').system('true')]", ("[__import__('os').system('true')]", "", [])),
    ("functiongemma", None, "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3}<end_function_call>"
     "<start_function_call>call:now{}<end_function_call>", ("", "", BOTH)),
    ("functiongemma", None, '<start_function_call>call:f{a:[1,{b:<escape>x "y"\n<escape>}],c:true,"d":null,<escape>e<escape>:<escape><escape>}'
     "<end_function_call>", ("", "", [("f", {"a": [1, {"b": 'x "y"\n'}], "c": True, "d": None, "e": ""})])),
    ("hermes", None, f'{dumped("now", {})} is no call, " <tool_call></tool_call> neither', (f'{dumped("now", {})} is no call, " <tool_call></tool_call> neither', "", [])),
    ("hermes", None, '<tool_call>{"arguments": {"city": "Zürich", "days": 3}, "name": "get_weather"}</tool_call><tool_call>'
     '{"name": "now", "arguments": "{}"}</tool_call> so', (" so", "", BOTH)),
    ("hermes", None, f"<tool_call>{dumped('get_weather', CITY)[:-1]}</tool_call>", ("", "", BOTH[:1])),
    ("hermes", None, f"<tool_call>{dumped('now', {})} and more</tool_call>", (" and more", "", BOTH[1:])),
    ("mistral", None, "[TOOL_CALLS]now{} and more", (" and more", "", BOTH[1:])),
    ("kimi", None, "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>so<|tool_call_end|>"
     "<|tool_calls_section_end|>", ("<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>so"
     "<|tool_call_end|><|tool_calls_section_end|>", "", [])),
    (None, "think", "no thoughts at all", ("no thoughts at all", "", [])),
    (None, "think", "<think>cut short", ("", "cut short", [])),
    (None, "think", " <thin", (" <thin", "", [])),
    (None, None, " as it is\n", (" as it is\n", "", [])),
]  # fmt: skip
IDS = [f"{at}-{tools}-{reasoning}" for at, (tools, reasoning, _, _) in enumerate(ANSWERS)]


def parsed(parser: Parser, parts: list[str]) -> Piece:
    return joined([*(parser.push(part) for part in parts), parser.finish()])


def check_every_cut(make: Callable[[], Parser], text: str) -> Piece:
    """What is found, and that it is found however the text comes."""
    whole = parsed(make(), [text])
    for at in range(len(text) + 1):
        assert parsed(make(), [text[:at], text[at:]]) == whole, (at, text[:at])
    assert parsed(make(), list(text)) == whole
    random = Random(1)
    for _ in range(50):
        cuts = sorted(random.choices(range(len(text) + 1), k=random.randrange(2, 9)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(make(), parts) == whole, parts
    return whole


@pytest.mark.parametrize(("tools", "reasoning", "text", "expected"), ANSWERS, ids=IDS)
def test_answers_are_parsed_alike_in_every_cut(tools: str | None, reasoning: str | None, text: str, expected: Expected) -> None:
    end = "<think>\n" if text.startswith("thoughts") else "assistant\n"
    found = check_every_cut(lambda: parser_for(tools, reasoning, prompt_end=end), text)
    calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
    assert (found.content, found.reasoning, calls) == expected


@pytest.mark.parametrize(("tools", "reasoning", "text", "expected"), ANSWERS, ids=IDS)
def test_answers_that_end_anywhere_are_parsed_alike_in_every_cut(
    tools: str | None, reasoning: str | None, text: str, expected: Expected
) -> None:
    for end in range(0, len(text), 7):
        short = text[:end]
        whole = parsed(parser_for(tools, reasoning), [short])
        assert parsed(parser_for(tools, reasoning), list(short)) == whole
        for at in range(0, end, 5):
            assert parsed(parser_for(tools, reasoning), [short[:at], short[at:]]) == whole


def test_kimi_names_its_calls() -> None:
    text = next(text for tools, _, text, _ in ANSWERS if tools == "kimi")
    assert [call.id for call in parsed(parser_for("kimi", None), [text]).calls] == ["functions.get_weather:0", "functions.now:1"]


def test_content_is_not_held_back_until_the_end() -> None:
    parser = parser_for("hermes", "think")
    assert parser.push("<think>a b").reasoning == "a b"
    assert parser.push(" c</think>\n\nIt is").reasoning == " c"
    assert parser.push(" so <").content == " so"  # the space may stand before a call, the rest may be one
    assert parser.push("b>").content == " <b>"


def test_forced_answers_are_calls() -> None:
    text = f"[{dumped('get_weather', CITY, 'parameters')}, {dumped('now', {}, 'parameters')}]"
    found = check_every_cut(lambda: BlockParser(REQUIRED, NO_TEXTS), text)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == BOTH and not found.content
    cut = check_every_cut(lambda: BlockParser(REQUIRED, NO_TEXTS), text[: text.index("days")])
    assert [(call.name, call.arguments) for call in cut.calls] == [("get_weather", '{"city": "Zürich", "')], "as far as it came"
    named = check_every_cut(lambda: NamedParser("now"), '{"zone": 1}')
    assert [(call.name, call.arguments) for call in named.calls] == [("now", '{"zone": 1}')]


def test_formats_are_known_by_what_stands_in_templates() -> None:
    signs = {
        "{% if tools %}<tool_call>{% endif %}<think>": ("hermes", "think"), "[TOOL_CALLS] [THINK]": ("mistral", "mistral"),
        "<|channel|>analysis": ("harmony", "harmony"), "<|python_tag|>": ("llama3", None), "<start_of_turn>": ("gemma", None),
        "<start_of_turn><start_function_call>": ("functiongemma", None),
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> <think>": ("glm", "think"),
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.': ("llama3", None),
        '<start_of_turn> in the format of {"name": function name, "parameters": dictionary of argument name and its value}': ("gemma", None),
        "<｜tool▁calls▁begin｜><think>": ("deepseek", "think"), "<|tool_calls_section_begin|>": ("kimi", None), "": (None, None),
    }  # fmt: skip
    assert {template: (tools_of(template), reasoning_of(template)) for template in signs} == signs


def test_a_parameter_that_is_text_stays_text_where_the_format_does_not_say() -> None:
    text = "<tool_call>\n<function=find>\n<parameter=zip>\n90210\n</parameter>\n<parameter=code>\n\n  a &lt; b\n\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
    found = check_every_cut(lambda: parser_for("hermes", None, texts={"find": frozenset(("zip", "code"))}), text)
    assert json.loads(found.calls[0].arguments) == {"zip": "90210", "code": "\n  a &lt; b\n", "n": 7}


@pytest.mark.parametrize("tools", ["llama3", "gemma"])
def test_json_that_has_a_name_and_no_arguments_is_an_answer(tools: str) -> None:
    text = '{"name": "Ada", "born": 1815}'
    assert check_every_cut(lambda: parser_for(tools, None), text) == Piece(content=text)


def test_arguments_may_hold_what_other_forms_are_known_by() -> None:
    arguments = {"about": "the DSML tags and <function=x>"}
    deepseek = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    for tools, text in (("deepseek", deepseek), ("hermes", f"<tool_call>{dumped('f', arguments)}</tool_call>")):
        (call,) = check_every_cut(lambda tools=tools: parser_for(tools, None), text).calls  # type: ignore[misc]
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("tools", "begins", "again"),
    [
        ("hermes", "<tool_call><function=f>", "<parameter="),
        ("hermes", "<tool_call>", "<function="),
        ("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        ("deepseek", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="'),
        ("kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        ("llama3", "", '{"name":"f","parameters":{}}'),
    ],
)
def test_time_grows_with_the_text_alone(tools: str, begins: str, again: str) -> None:
    began = time.process_time()
    parsed(parser_for(tools, None), [begins + again * 100_000])
    assert time.process_time() - began < 20, "it took minutes when every marker was looked for from each one on"
