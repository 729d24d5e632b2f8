"""How the served families write calls of tools and reasoning: one table. A new family is an entry, and a reader if it needs one.

Readers take the text of a block, without the markers around it, and raise ValueError for what is no call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepwell.engine.text import Text
from stepwell.server.parsing.blocks import BlockParser, Blocks, Plain, Reasoning, ReasoningParser
from stepwell.server.parsing.harmony import HARMONY_MARKERS, HarmonyParser
from stepwell.server.parsing.pieces import Call, Parser, call_of

_PROMPT_END = 16  # tokens
HARMONY, AUTO = "harmony", "auto"  # AUTO: as the model's chat template says


Texts = Mapping[str, frozenset[str]]  # by tool: parameters that are text, whatever they look like
NO_TEXTS: Texts = {}


def _json_calls(body: str, texts: Texts = NO_TEXTS) -> list[Call]:
    """Objects one after the other, in a list or behind semicolons, perhaps as a block of Markdown."""
    return [call_of(each) for each in _json_values(body)]


def _json_answer(body: str, texts: Texts) -> list[Call]:
    """As `_json_calls`, without markers to tell it from other JSON: an object that has a name alone is no call."""
    found = _json_values(body)
    if not all(isinstance(each, dict) and ("arguments" in each or "parameters" in each) for each in found):
        raise ValueError("an answer that happens to be JSON")
    return [call_of(each) for each in found]


def _json_values(body: str) -> list[Any]:
    text = re.sub(r"^\s*```\w*\n?|```\s*$", "", body).strip()
    at, values, decoder = 0, [], json.JSONDecoder()
    while at < len(text):
        found, at = decoder.raw_decode(text, at)
        values += found if isinstance(found, list) else [found]
        while at < len(text) and text[at] in " \n\t;,":
            at += 1
    return values


def _between(body: str, begin: str, end: str, *, cut: bool = False) -> Iterator[str]:
    """What stands between markers, in time that grows with the text alone. `cut`: the end may be missing."""
    for part in body.split(begin)[1:]:
        inner, found, _ = part.partition(end)
        if found or cut:
            yield inner


def _hermes(body: str, texts: Texts) -> list[Call]:
    """JSON, or as Qwen3-Coder writes it: `<function=name><parameter=key>value</parameter></function>`."""
    if not body.lstrip().startswith("<function="):
        return _json_calls(body)
    calls = []
    for function in _between(body, "<function=", "</function>", cut=True):
        name, _, inner = function.partition(">")
        pairs = [each.partition(">")[::2] for each in _between(inner, "<parameter=", "</parameter>", cut=True)]
        are_text = texts.get(name.strip(), frozenset())
        values = {key.strip(): _trimmed(value) for key, value in pairs}
        calls.append(_named(name.strip(), {key: value if key in are_text else _value(value) for key, value in values.items()}))
    return calls


def _trimmed(value: str) -> str:
    """Without the line breaks that the format puts around a value; others are the value's own."""
    return value.removeprefix("\n").removesuffix("\n")


def _mistral(body: str, texts: Texts) -> list[Call]:
    """A list of objects, or `name[ARGS]{...}`, or `name{...}`, each behind a marker of its own."""
    calls: list[Call] = []
    for part in body.split("[TOOL_CALLS]"):
        named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]([\w-]+))?\s*(?:\[ARGS\])?\s*(?=\{)", part)
        if named is None:
            calls += _json_calls(part)
        else:
            arguments = json.loads(part[named.end() :])
            calls.append(_named(named.group(1), arguments, named.group(2)))
    return calls


def _deepseek(body: str, texts: Texts) -> list[Call]:
    """V3: `type<sep>name` and a block of JSON. V3.1: `name<sep>{...}`. V3.2 and V4: tags for a call and its parameters."""
    if body.lstrip().startswith("<｜DSML｜"):
        return [_dsml(invoke) for invoke in _between(body, '<｜DSML｜invoke name="', "</｜DSML｜invoke>")]
    calls = []
    for inner in _between(body, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        first, _, rest = inner.partition("<｜tool▁sep｜>")
        name, is_fenced, fenced = rest.partition("\n```json\n")
        if is_fenced:
            calls.append(_named(name.strip(), json.loads(fenced.rstrip().removesuffix("```"))))
        else:
            calls.append(_named(first.strip(), json.loads(rest)))
    return calls


def _dsml(invoke: str) -> Call:
    name, _, inner = invoke.partition('">')
    arguments = {}
    for parameter in _between(inner, '<｜DSML｜parameter name="', "</｜DSML｜parameter>"):
        head, _, value = parameter.partition(">")
        key, _, kind = head.partition('"')
        arguments[key] = json.loads(value) if kind.strip() == 'string="false"' else value
    return _named(name, arguments)


def _kimi(body: str, texts: Texts) -> list[Call]:
    """`functions.name:0` names a call, and is its id in the messages that answer it."""
    calls = []
    for inner in _between(body, "<|tool_call_begin|>", "<|tool_call_end|>"):
        head, _, arguments = inner.partition("<|tool_call_argument_begin|>")
        name = re.fullmatch(r"(?:functions\.)?(.+?)(?::\d+)?", head.strip())
        if name is None:
            raise ValueError("a call without a name")
        calls.append(_named(name.group(1), json.loads(arguments), head.strip()))
    return calls


def _gemma(body: str, texts: Texts) -> list[Call]:
    """JSON, or a list of calls as Python writes them, perhaps as a block of Markdown."""
    text = re.sub(r"^\s*```\w*\n?|```\s*$", "", body).strip()
    if not text.startswith("[") or text.startswith(("[{", "[]")):
        return _json_answer(text, texts)
    try:
        return _python_calls(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _python_calls(tree: ast.expr) -> list[Call]:
    if not isinstance(tree, ast.List):
        raise ValueError("no list of calls")
    calls = []
    for each in tree.elts:
        if not isinstance(each, ast.Call) or each.args or any(keyword.arg is None for keyword in each.keywords):
            raise ValueError("no call with named arguments")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in each.keywords}
        calls.append(_named(ast.unparse(each.func), arguments))
    return calls


def _named(name: str, arguments: Any, id: str | None = None) -> Call:
    if not name or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    try:
        return Call(name=name, arguments=json.dumps(arguments, ensure_ascii=False), id=id)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _value(text: str) -> Any:
    """A parameter as JSON where it is some, and as text otherwise."""
    try:
        return json.loads(text)
    except ValueError:
        return text


TOOLS: Mapping[str, Blocks] = {
    "hermes": Blocks(closes={"<tool_call>": "</tool_call>"}, read=_hermes),
    "llama3": Blocks(closes={"<|python_tag|>": None}, read=_json_answer, starts=("{",)),
    "mistral": Blocks(closes={"[TOOL_CALLS]": None}, read=_mistral, inside=("[ARGS]", "[CALL_ID]")),
    "deepseek": Blocks(
        closes={
            "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>", "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>": "</｜DSML｜tool_calls>",
        },
        read=_deepseek, inside=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "｜DSML｜"),
    ),
    "kimi": Blocks(
        closes={"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"}, read=_kimi,
        inside=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "gemma": Blocks(closes={"```tool_code\n": "```", "```tool_call\n": "```"}, read=_gemma, starts=("[", "{", "```json")),
}  # fmt: skip
REASONING: Mapping[str, Reasoning] = {
    "think": Reasoning(open="<think>", close="</think>"),
    "mistral": Reasoning(open="[THINK]", close="[/THINK]"),
}
TOOL_NAMES, REASONING_NAMES = (*TOOLS, HARMONY), (*REASONING, HARMONY)

# What stands in the template of a family that writes so; the first that is found counts.
_TOOL_SIGNS = {
    "<|tool_calls_section_begin|>": "kimi",
    "<｜DSML｜": "deepseek",
    "<｜tool▁calls▁begin｜>": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<|channel|>": HARMONY,
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    "<start_of_turn>": "gemma",
}
_REASONING_SIGNS = {"<|channel|>": HARMONY, "[THINK]": "mistral", "<think>": "think"}


def markers_of(tools: str | None, reasoning: str | None) -> tuple[str, ...]:
    """What has to stand in the text of answers, so that they can be parsed."""
    if HARMONY in (tools, reasoning):
        return HARMONY_MARKERS
    thought = () if reasoning is None else (REASONING[reasoning].open, REASONING[reasoning].close)
    return (*thought, *(() if tools is None else TOOLS[tools].markers))


def tools_of(template: str) -> str | None:
    """The format of a template's family; None where none is known."""
    return next((name for sign, name in _TOOL_SIGNS.items() if sign in template), None)


def reasoning_of(template: str) -> str | None:
    return next((name for sign, name in _REASONING_SIGNS.items() if sign in template), None)


def prompt_end(text: Text, tokens: Sequence[int]) -> str:
    """As much of a prompt as shows whether it opens the reasoning."""
    return text.decode(tokens[-_PROMPT_END:], special=True)


def parser_for(tools: str | None, reasoning: str | None, *, prompt_end: str = "", texts: Texts = NO_TEXTS) -> Parser:
    """For one answer, of formats by name. `prompt_end` may have opened the reasoning."""
    if HARMONY in (tools, reasoning):
        return HarmonyParser(tools=tools == HARMONY)
    rest: Parser = Plain() if tools is None else BlockParser(TOOLS[tools], texts)
    if reasoning is None:
        return rest
    around = REASONING[reasoning]
    return ReasoningParser(around, rest, begun=prompt_end.rstrip().endswith(around.open))
