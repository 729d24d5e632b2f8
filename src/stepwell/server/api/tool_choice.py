"""Which tools an answer may call, and must: `tools` and `tool_choice` of a chat.

none        the template is told of no tools
auto        the model decides, and calls are found in its answer
required    a grammar makes the answer calls, in the model's own form where that is known (`frames.py`), or a list in JSON
by name     a grammar makes the answer a call of that tool, in the model's own form, or its arguments in JSON
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stepwell.engine.requests.guided import Grammar
from stepwell.server.api.bodies import ChatBody
from stepwell.server.api.grammars import TOO_DEEP, schema_grammar
from stepwell.server.errors import ApiError

_PARAM = "tool_choice"
_OBJECT = "must be a schema of type object, as arguments are, or left out"
MOST_CALLS = 16  # of an answer that has to have some
_KINDS = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"


class Choosing(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    how: Choosing
    tools: Sequence[Mapping[str, Any]] = ()
    name: str | None = None  # of the one that is to be called

    @property
    def is_forced(self) -> bool:
        return self.how in (Choosing.REQUIRED, Choosing.NAMED)

    @property
    def callable(self) -> Sequence[Mapping[str, Any]]:
        """The tools that an answer may call."""
        return [tool for tool in self.tools if self.name in (None, tool["function"]["name"])]

    @property
    def names(self) -> list[str]:
        return [str(tool["function"]["name"]) for tool in self.callable]

    @property
    def texts(self) -> dict[str, frozenset[str]]:
        """Parameters that are text and nothing else, by tool."""
        return {tool["function"]["name"]: _texts(parameters_of(tool["function"])) for tool in self.tools}

    def grammar(self, *, several: bool) -> Grammar:
        """Of an answer in JSON that has to call. `several`: it may call more than one. Raises ApiError."""
        functions = [tool["function"] for tool in self.tools]
        if self.how is Choosing.NAMED:
            return parameters_grammar(next(each for each in functions if each["name"] == self.name))
        places = [f"#/$defs/{number}" for number in range(len(functions))]
        try:
            defined = [_moved(parameters_of(each), place) for each, place in zip(functions, places, strict=True)]
        except RecursionError:
            raise ApiError(400, f"{_PARAM}: {TOO_DEEP}", param=_PARAM, code="invalid_grammar") from None
        calls = [_call_schema(each["name"], place) for each, place in zip(functions, places, strict=True)]
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": MOST_CALLS if several else 1}
        schema = {"$defs": {str(at): each for at, each in enumerate(defined)}, **schema}
        return schema_grammar(schema, param=_PARAM, strict=any(_is_strict(each) for each in functions))


def tool_choice_of(body: ChatBody) -> ToolChoice:
    """Raises ApiError."""
    tools, choice = body.tools or [], body.tool_choice
    names = [_name(number, tool) for number, tool in enumerate(tools)]
    if choice == "none" or (choice in (None, "auto") and not tools):
        return ToolChoice(how=Choosing.NONE)
    if choice in (None, "auto"):
        return ToolChoice(how=Choosing.AUTO, tools=tools)
    if not tools:
        raise ApiError(400, "tool_choice needs tools to choose from: give some, or leave it out", param="tool_choice")
    if body.is_guided:
        what = "an answer that has to call a tool follows that tool: leave out response_format and the like"
        raise ApiError(400, what, param="tool_choice")
    if choice == "required":
        return _forced(ToolChoice(how=Choosing.REQUIRED, tools=tools))
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise ApiError(400, f"tool_choice must be {_KINDS}, got {choice!r:.200}", param="tool_choice")
    if name not in names:
        raise ApiError(400, f"tool_choice names {name!r:.80}, which is none of the tools: {names!r:.500}", param="tool_choice")
    return _forced(ToolChoice(how=Choosing.NAMED, tools=tools, name=str(name)))


def _forced(choice: ToolChoice) -> ToolChoice:
    """The same. Raises ApiError where the arguments of a tool that may be called could be no object."""
    for tool in choice.callable:
        types = (tool["function"].get("parameters") or {}).get("type", "object")
        if types != "object" and not (isinstance(types, list) and "object" in types):
            what = f"the parameters of {tool['function']['name']:.80} {_OBJECT}"
            raise ApiError(400, what, param="tools")
    return choice


def _name(number: int, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if function is None or not isinstance(name, str) or not name:
        what = f'tools[{number}] must be {{"type": "function", "function": {{"name": ...}}}}'
        raise ApiError(400, what, param="tools")
    if tool.get("type") not in (None, "function"):
        raise ApiError(400, f"tools[{number}] is of type {tool['type']!r:.80}; only functions are supported", param="tools")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None) and parameters != []:  # which is how PHP writes an empty object
        raise ApiError(400, f"tools[{number}].function.parameters {_OBJECT}", param="tools")
    return name


def parameters_grammar(function: Mapping[str, Any]) -> Grammar:
    """Of the arguments of a call. Raises ApiError."""
    return schema_grammar(parameters_of(function), param=_PARAM, strict=_is_strict(function))


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def parameters_of(function: Mapping[str, Any]) -> Any:
    """A schema that does not say of what type it is may be met by what is no object, which arguments have to be."""
    return {**(function.get("parameters") or {}), "type": "object"}


def _texts(parameters: Any) -> frozenset[str]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    found = properties.items() if isinstance(properties, Mapping) else ()
    return frozenset(name for name, each in found if isinstance(each, Mapping) and each.get("type") == "string")


def _call_schema(name: str, parameters: str) -> dict[str, Any]:
    properties = {"name": {"const": name}, "parameters": {"$ref": parameters}}
    return {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False}


def _moved(schema: Any, to: str) -> Any:
    """A schema that stands within another: what it refers to within itself, as to `#/$defs/Place`, is found there."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    ref = schema.get("$ref")
    moved = {"$ref": to + ref[1:]} if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) else {}
    return {name: _moved(each, to) for name, each in schema.items()} | moved
