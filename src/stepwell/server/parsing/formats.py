"""How the served families write calls of tools and reasoning: one table. A new family is an entry, and a reader if it needs one.

Readers take the text of a block, without the markers around it, and raise ValueError for what is no call.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Mapping
from typing import Any

from stepwell.server.parsing.blocks import BlockParser, Blocks, Plain, Reasoning, ReasoningParser
from stepwell.server.parsing.harmony import HarmonyParser
from stepwell.server.parsing.pieces import Call, Parser, call_of

HARMONY, AUTO = "harmony", "auto"  # AUTO: as the model's chat template says


def _json_calls(body: str) -> list[Call]:
    """Objects one after the other, in a list or behind semicolons, perhaps as a block of Markdown."""
    text = re.sub(r"^\s*```\w*\n?|```\s*$", "", body).strip()
    calls: list[Call] = []
    while text:
        found, end = json.JSONDecoder().raw_decode(text)
        calls += [call_of(each) for each in (found if isinstance(found, list) else [found])]
        text = text[end:].lstrip(" \n\t;,")
    return calls


def _hermes(body: str) -> list[Call]:
    """JSON, or as Qwen3-Coder writes it: `<function=name><parameter=key>value</parameter></function>`."""
    if "<function=" not in body:
        return _json_calls(body)
    calls = []
    for name, inner in re.findall(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", body, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|$)", inner, re.DOTALL)
        calls.append(_named(name.strip(), {key.strip(): _value(value.strip("\n")) for key, value in pairs}))
    return calls


def _mistral(body: str) -> list[Call]:
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


def _deepseek(body: str) -> list[Call]:
    """V3: `type<sep>name` and a block of JSON. V3.1: `name<sep>{...}`. V3.2 and V4: tags for a call and its parameters."""
    if "DSML" in body:
        return [_dsml(name, inner) for name, inner in re.findall(
            r"<｜DSML｜invoke name=\"([^\"]+)\">(.*?)</｜DSML｜invoke>", body, re.DOTALL)]  # fmt: skip
    calls = []
    for inner in re.findall(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", body, re.DOTALL):
        first, _, rest = inner.partition("<｜tool▁sep｜>")
        fenced = re.fullmatch(r"([^\n]+)\n```json\n(.*?)\n?```\s*", rest, re.DOTALL)
        name, arguments = (fenced.group(1), fenced.group(2)) if fenced is not None else (first, rest)
        calls.append(_named(name.strip(), json.loads(arguments)))
    return calls


def _dsml(name: str, inner: str) -> Call:
    found = re.findall(
        r"<｜DSML｜parameter name=\"([^\"]+)\"(?: string=\"(true|false)\")?>(.*?)</｜DSML｜parameter>", inner, re.DOTALL
    )
    return _named(name, {key: json.loads(value) if kind == "false" else value for key, kind, value in found})


def _kimi(body: str) -> list[Call]:
    """`functions.name:0` names a call, and is its id in the messages that answer it."""
    calls = []
    for head, arguments in re.findall(
        r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", body, re.DOTALL
    ):
        name = re.fullmatch(r"(?:functions\.)?(.+?)(?::\d+)?", head.strip())
        if name is None:
            raise ValueError("a call without a name")
        calls.append(_named(name.group(1), json.loads(arguments), head.strip()))
    return calls


def _gemma(body: str) -> list[Call]:
    """JSON, or a list of calls as Python writes them, perhaps as a block of Markdown."""
    text = re.sub(r"^\s*```\w*\n?|```\s*$", "", body).strip()
    if not text.startswith("[") or text.startswith(("[{", "[]")):
        return _json_calls(text)
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
        return html.unescape(text)


TOOLS: Mapping[str, Blocks] = {
    "hermes": Blocks(closes={"<tool_call>": "</tool_call>"}, read=_hermes),
    "llama3": Blocks(closes={"<|python_tag|>": None}, read=_json_calls, starts=("{",)),
    "mistral": Blocks(closes={"[TOOL_CALLS]": None}, read=_mistral),
    "deepseek": Blocks(
        closes={
            "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>", "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>": "</｜DSML｜tool_calls>",
        },
        read=_deepseek,
    ),
    "kimi": Blocks(closes={"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"}, read=_kimi),
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


def tools_of(template: str) -> str | None:
    """The format of a template's family; None where none is known."""
    return next((name for sign, name in _TOOL_SIGNS.items() if sign in template), None)


def reasoning_of(template: str) -> str | None:
    return next((name for sign, name in _REASONING_SIGNS.items() if sign in template), None)


def parser_for(tools: str | None, reasoning: str | None, *, prompt_end: str = "") -> Parser:
    """For one answer, of formats by name. `prompt_end` may have opened the reasoning."""
    if HARMONY in (tools, reasoning):
        return HarmonyParser(tools=tools == HARMONY)
    rest: Parser = Plain() if tools is None else BlockParser(TOOLS[tools])
    if reasoning is None:
        return rest
    around = REASONING[reasoning]
    return ReasoningParser(around, rest, begun=prompt_end.rstrip().endswith(around.open))
