"""How the served families write calls of tools and reasoning: one table. A new family is an entry, perhaps with a reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stepwell.engine.requests.text import Text
from stepwell.server.api.parsing.blocks import BlockParser, Blocks, Plain, Reasoning, ReasoningParser
from stepwell.server.api.parsing.counting import Placed
from stepwell.server.api.parsing.harmony import HARMONY_MARKERS, HarmonyParser
from stepwell.server.api.parsing.pieces import Parser
from stepwell.server.api.parsing.readers import deepseek, gemma, hermes, json_answer, json_calls, kimi, mistral
from stepwell.server.api.parsing.source import Texts
from stepwell.server.api.parsing.tags import function_gemma, glm

_PROMPT_END = 16  # tokens
HARMONY, AUTO = "harmony", "auto"  # AUTO: by the model's chat template


NO_TEXTS: Texts = {}


TOOLS: Mapping[str, Blocks] = {
    "hermes": Blocks(closes={"<tool_call>": "</tool_call>"}, read=hermes),
    "glm": Blocks(
        closes={"<tool_call>": "</tool_call>"}, read=glm, inside=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama3": Blocks(closes={"<|python_tag|>": None}, read=json_answer, starts=("{",)),
    "mistral": Blocks(closes={"[TOOL_CALLS]": None}, read=mistral, parts=("[TOOL_CALLS]",), inside=("[ARGS]", "[CALL_ID]")),
    "deepseek": Blocks(
        closes={
            "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>", "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>": "</｜DSML｜tool_calls>",
        },
        read=deepseek, parts=("<｜tool▁call▁end｜>",), inside=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "｜DSML｜"),
    ),
    "kimi": Blocks(
        closes={"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"}, read=kimi,
        parts=("<|tool_call_end|>",), inside=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    ),
    "functiongemma": Blocks(
        closes={"<start_function_call>": "<end_function_call>"}, read=function_gemma, inside=("<escape>",),
    ),
    "gemma": Blocks(closes={"```tool_code\n": "```", "```tool_call\n": "```"}, read=gemma, starts=("[", "{", "```json")),
}  # fmt: skip
REQUIRED = Blocks(closes={}, read=json_calls, starts=("[",))  # an answer that a grammar has made a list of calls
REASONING: Mapping[str, Reasoning] = {
    "think": Reasoning(open="<think>", close="</think>"),
    "mistral": Reasoning(open="[THINK]", close="[/THINK]"),
}
TOOL_NAMES, REASONING_NAMES = (*TOOLS, HARMONY), (*REASONING, HARMONY)

# What stands in the template of a family that writes so; the first that is found counts.
_TOOL_SIGNS = {
    "<arg_key>": "glm",
    "<|tool_calls_section_begin|>": "kimi",
    "<start_function_call>": "functiongemma",
    "<｜DSML｜": "deepseek",
    "<｜tool▁calls▁begin｜>": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<|channel|>": HARMONY,
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    "<start_of_turn>": "gemma",
    "dictionary of argument name and its value": "llama3",  # 3.2 has no tag, and says so in its prompt, as some of Gemma's do
}
_REASONING_SIGNS = {"<|channel|>": HARMONY, "[THINK]": "mistral", "<think>": "think"}


def markers_of(tools: str | None, reasoning: str | None) -> tuple[str, ...]:
    """The markers that the text of answers must keep, so that they can be parsed."""
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
    return ReasoningParser(around, rest, begun=opens(around, prompt_end))


def thoughts_for(tools: str | None, reasoning: str | None, *, prompt_end: str) -> Callable[[], Placed] | None:
    """Makes parsers that find an answer's thoughts, and nothing else; None if they are not separated."""
    if HARMONY in (tools, reasoning):
        return lambda: HarmonyParser(tools=False)
    if reasoning is None:
        return None
    around = REASONING[reasoning]
    return lambda: ReasoningParser(around, Plain(), begun=opens(around, prompt_end))


def opens(around: Reasoning, prompt_end: str) -> bool:
    return prompt_end.rstrip().endswith(around.open)
