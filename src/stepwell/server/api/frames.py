"""Grammars in the format that the model was trained on: the text around the arguments of calls, or around an answer.

    hermes     <tool_call>\\n{"name": "f", "arguments": ARGUMENTS}\\n</tool_call>
    harmony    (<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant)* <|channel|>final<|message|>ANSWER

Such answers are parsed like unconstrained ones, and the next prompt contains them as the model wrote them, so that the cache
hits. Markers that are one token of the vocabulary must be written as that token. Formats whose arguments are not JSON have no
frame.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepwell.engine.requests.guided import Grammar, Kind
from stepwell.engine.requests.text import Text
from stepwell.server.api.bodies import ChatBody
from stepwell.server.api.grammars import MOST_CALLS, ToolChoice, parameters_grammar
from stepwell.server.api.parsing.formats import HARMONY, markers_of
from stepwell.server.served import Served

_PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_STANDS_FOR = re.compile("NAME|ARGUMENTS|NUMBER")
_THOUGHT = "<|channel|>analysis<|message|>\0TEXT\0<|end|><|start|>assistant"
_FINAL = "<|channel|>final<|message|>\0@answer\0"
_TEXT = "TEXT: /(.|\\n)*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The text around calls. In `call`, NAME and ARGUMENTS are placeholders, and NUMBER stands for any number."""

    call: str
    before: str = ""
    between: str = ""
    behind: str = ""
    most: int = MOST_CALLS


# By parser and a text of the chat template; the first match counts. None: the arguments are not JSON.
_FORMS: Sequence[tuple[str, str, CallForm | None]] = (
    ("hermes", "<function=", None),
    ("hermes", "", CallForm(call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n")),
    ("llama3", "", CallForm(call='{"name": "NAME", "parameters": ARGUMENTS}', most=1)),
    ("mistral", "[ARGS]", CallForm(call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS")),
    ("mistral", "", CallForm(
        before="[TOOL_CALLS][", call='{"name": "NAME", "arguments": ARGUMENTS}', between=", ", behind="]",
    )),
    ("deepseek", "｜DSML｜", None),
    ("deepseek", "```json", CallForm(
        before="<｜tool▁calls▁begin｜>", between="\n", behind="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
    )),
    ("deepseek", "", CallForm(
        before="<｜tool▁calls▁begin｜>", behind="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
    )),
    ("kimi", "", CallForm(
        before="<|tool_calls_section_begin|>", behind="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
    )),
    (HARMONY, "", CallForm(
        call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS", most=1,
    )),
)  # fmt: skip


def is_framed(served: Served, body: ChatBody, choice: ToolChoice) -> bool:
    """Whether an answer that follows a grammar has the model's own format, and is parsed like an unconstrained one."""
    if served.text is None or body.continue_final_message or body.add_generation_prompt is False:
        return False
    if choice.is_forced:
        return _call_form(served, choice) is not None
    return body.is_guided and served.reasoning_parser == HARMONY and _knows_harmony(served.text)


def forced_calls(served: Served, choice: ToolChoice, *, several: bool) -> Grammar:
    """Calls in the model's own format, after reasoning if the format has it. Raises ApiError."""
    form = _call_form(served, choice)
    assert form is not None and served.text is not None, "is_framed was false"
    write = _Lark(served.text, markers_of(served.tool_parser, served.reasoning_parser))
    functions = [tool["function"] for tool in choice.callable]
    calls = [f"c{at}: " + write(written_call(form, each["name"], f"p{at}")) for at, each in enumerate(functions)]
    most = form.most if several and choice.name is None else 1
    more = f" ({write(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
    start = f"start: {_lead(served)} {write(form.before)} call{more} {write(form.behind)}"
    any_call = "call: " + " | ".join(f"c{at}" for at in range(len(calls)))
    parts = {f"p{at}": parameters_grammar(each) for at, each in enumerate(functions)}
    return _framed([start, any_call, *calls], parts, write)


def behind_thoughts(served: Served, grammar: Grammar) -> Grammar:
    """An answer of gpt-oss that follows a grammar, in the final channel, after the channels for reasoning."""
    assert served.text is not None, "is_framed was false"
    write = _Lark(served.text, markers_of(None, HARMONY))
    return _framed([f"start: thought* {write(_FINAL)}"], {"answer": grammar}, write)


def _framed(rules: Sequence[str], parts: Mapping[str, Grammar], write: _Lark) -> Grammar:
    thoughts = [f"thought: {write(_THOUGHT)}", _TEXT] if any("thought*" in rule for rule in rules) else []
    frame = "\n".join([*rules, *thoughts])
    written = {name: [part.kind.value, part.source] for name, part in parts.items()}
    return Grammar(kind=Kind.FRAMED, source=json.dumps({"frame": frame, "parts": written}))


def _call_form(served: Served, choice: ToolChoice) -> CallForm | None:
    source = served.chat.source
    form = next((each for parser, sign, each in _FORMS if parser == served.tool_parser and sign in source), None)
    if form is None or served.text is None or not all(_PLAIN_NAME.fullmatch(name) for name in choice.names):
        return None
    thinks_elsewhere = (served.tool_parser == HARMONY) != (served.reasoning_parser == HARMONY)
    return None if thinks_elsewhere or (served.tool_parser == HARMONY and not _knows_harmony(served.text)) else form


def _knows_harmony(text: Text) -> bool:
    return all(len(text.encode(each, special=False)) == 1 for each in markers_of(None, HARMONY))


def _lead(served: Served) -> str:
    """What may precede calls: reasoning, or empty lines after it."""
    if served.reasoning_parser == HARMONY:
        return "thought*"
    return "" if served.reasoning_parser is None else r"(/\n{1,2}/)?"


def written_call(form: CallForm, name: str, part: str) -> str:
    """Fills in the placeholders, with non-text between NULs. One pass, because a tool may be named NUMBER."""
    written = {"NAME": name, "ARGUMENTS": f"\0@{part}\0", "NUMBER": "\0/[0-9]{1,4}/\0"}
    return _STANDS_FOR.sub(lambda found: written[found.group()], form.call)


class _Lark:
    """Writes text as Lark: single-token markers as tokens, other text quoted, parts between NULs unchanged."""

    def __init__(self, text: Text, markers: Sequence[str]) -> None:
        found = {marker: text.encode(marker, special=False) for marker in markers}
        self._tokens: Mapping[str, int] = {marker: ids[0] for marker, ids in found.items() if len(ids) == 1}
        longest = sorted(self._tokens, key=len, reverse=True)
        self._split = re.compile("|".join(["\0[^\0]*\0", *map(re.escape, longest)]))

    def __call__(self, text: str) -> str:
        parts: list[str] = []
        at = 0
        for found in self._split.finditer(text):
            parts += [_quoted(text[at : found.start()]), self._found(found.group())]
            at = found.end()
        return " ".join(part for part in [*parts, _quoted(text[at:])] if part)

    def _found(self, part: str) -> str:
        return part.strip("\0") if part.startswith("\0") else f"<[{self._tokens[part]}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
