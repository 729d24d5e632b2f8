"""Grammars for answers: structured output, and forced tool calls.

    response_format       {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": {...}}}
    structured_outputs    one of json, json_object, regex, choice, grammar (vLLM)
    guided_json, guided_regex, guided_choice, guided_grammar        older names of vLLM's
    json_schema, regex, ebnf                                        SGLang's names

    tool_choice none        the template does not see the tools
    tool_choice auto        the model decides, and calls are parsed from its answer
    tool_choice required    a grammar forces calls, in the model's own format if known (`frames.py`), else a list in JSON
    tool_choice by name     a grammar forces a call of that tool, in the model's own format, else its arguments in JSON

Compiles on the calling thread, which must not be the event loop's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from stepwell.base.errors import ConfigError
from stepwell.engine.requests.guided import NEEDS_EXTRA, Grammar, Guide, Kind, Thoughts
from stepwell.server.api.bodies import ChatBody, GenerationBody
from stepwell.server.api.parsing.formats import REASONING, prompt_end
from stepwell.server.errors import ApiError
from stepwell.server.served import Served

MAX_CHOICES_TO_MAKE = 1000
_OPTIONS = "x-guidance"  # options of the grammar library, inside a schema
_ANY_OBJECT = {"type": "object"}
TOO_DEEP = "the schema is nested too deeply"
_KINDS = ("json", "regex", "choice", "grammar")
_FORMATS = ("text", "json_object", "json_schema")


def guide_of(served: Served, body: GenerationBody, tenant: str | None) -> Guide | None:
    """The compiled grammar of a body; None without one. Raises ApiError."""
    asked = grammar_of(body)
    return None if asked is None else compiled(served, asked[1], tenant, param=asked[0])


def grammar_of(body: GenerationBody) -> tuple[str, Grammar] | None:
    """The field that asks for a grammar, and that grammar. Raises ApiError."""
    asked = [each for each in (_of_format(body), *_of_structured(body), *_of_others(body)) if each is not None]
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise ApiError(400, f"only one grammar is possible, got {names}", param=asked[0][0].split(".")[0])
    name, grammar = asked[0]
    return name.split(".")[0], grammar


def compiled(served: Served, grammar: Grammar, tenant: str | None, *, param: str) -> Guide:
    """Raises ApiError."""
    if served.guides is None:
        raise ApiError(400, f"{param} needs a tokenizer, and this model has none", param=param, code="unsupported_parameter")
    try:
        return served.guides.compile(grammar, tenant=tenant)
    except ConfigError as error:
        code = "unsupported_parameter" if str(error) == NEEDS_EXTRA else "invalid_grammar"
        raise ApiError(400, f"{param}: {error}", param=param, code=code) from None


def thoughts_of(served: Served, tokens: Sequence[int], *, within: str | None) -> Thoughts | None:
    """The reasoning a model may write before an answer that follows a grammar; None if the grammar begins at the first token.

    That is the case for models without reasoning, with markers of several tokens, or with a prompt that has ended the reasoning.
    `within` is the text of the message that the answer continues; None for a new message.
    """
    around = REASONING.get(served.reasoning_parser or "")
    if around is None or served.text is None:
        return None
    marked = [served.text.encode(marker, special=False) for marker in (around.open, around.close)]
    if [len(each) for each in marked] != [1, 1]:
        return None
    end = prompt_end(served.text, tokens).rstrip()
    begun = end.endswith(around.open) or (within or "").rfind(around.open) > (within or "").rfind(around.close)
    if not begun and (within is not None or end.endswith(around.close)):
        return None
    return Thoughts(open=marked[0][0], close=marked[1][0], begun=begun)


def schema_grammar(schema: Any, *, param: str, strict: bool = True) -> Grammar:
    """If `strict`, unsupported parts of the schema are refused; otherwise ignored. Raises ApiError."""
    if not strict and isinstance(schema, Mapping):
        options = schema.get(_OPTIONS)
        schema = {**schema, _OPTIONS: {"lenient": True, **(options if isinstance(options, Mapping) else {})}}
    try:
        return Grammar(kind=Kind.JSON_SCHEMA, source=schema if isinstance(schema, str) else json.dumps(schema))
    except RecursionError:
        raise ApiError(400, f"{param}: {TOO_DEEP}", param=param, code="invalid_grammar") from None


Asking = tuple[str, Grammar]


def _of_format(body: GenerationBody) -> Asking | None:
    name, wanted = "response_format", body.response_format or {}
    kind = wanted.get("type", "text") if wanted else "text"
    if kind not in _FORMATS:
        raise ApiError(400, f"response_format must be of type {', '.join(_FORMATS)}, got {kind!r:.80}", param=name)
    if kind == "text":
        return None
    if kind == "json_object":
        return name, schema_grammar(_ANY_OBJECT, param=name)
    described = wanted.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(schema, Mapping):
        raise ApiError(400, 'response_format needs {"json_schema": {"name": ..., "schema": {...}}}', param=name)
    return name, schema_grammar(schema, param=name, strict=described.get("strict") is True)


def _of_structured(body: GenerationBody) -> list[Asking]:
    """Options set to false are off; the schema `false` is an error."""
    asked = (body.structured_outputs or {}).items()
    given = {name: value for name, value in asked if value is not None and (value is not False or name in _KINDS)}
    return [(f"structured_outputs.{name}", _grammar("structured_outputs", name, value)) for name, value in given.items()]


def _of_others(body: GenerationBody) -> list[Asking]:
    older = {
        "guided_json": ("json", body.guided_json), "guided_regex": ("regex", body.guided_regex),
        "guided_choice": ("choice", body.guided_choice), "guided_grammar": ("grammar", body.guided_grammar),
        "json_schema": ("json", body.json_schema), "regex": ("regex", body.regex), "ebnf": ("grammar", body.ebnf),
    }  # fmt: skip
    return [(field, _grammar(field, name, value)) for field, (name, value) in older.items() if value is not None]


def _grammar(param: str, name: str, value: Any) -> Grammar:
    if name == "json" and isinstance(value, bool):
        if value:
            return schema_grammar({}, param=param)
        raise ApiError(400, f"{param}: no answer matches the schema false; use another one", param=param, code="invalid_grammar")
    if name == "json" and isinstance(value, str | Mapping):
        return schema_grammar(value, param=param)
    if name == "json_object" and value is True:
        return schema_grammar(_ANY_OBJECT, param=param)
    if name in ("regex", "grammar") and isinstance(value, str) and value:
        return Grammar(kind=Kind(name), source=value)
    if name == "choice" and _are_texts(value):
        return Grammar(kind=Kind.CHOICE, source=json.dumps(value))
    what = "one of json (a schema), json_object (true), regex and grammar (text), choice (a list of texts)"
    raise ApiError(400, f"{param}: {name!r:.80} is unknown or has a wrong value; use {what}", param=param)


def _are_texts(value: Any) -> bool:
    some = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES_TO_MAKE
    return some and all(isinstance(each, str) and each for each in value)


_PARAM = "tool_choice"
_OBJECT = "must be a schema of type object, or left out"
MOST_CALLS = 16  # of an answer with forced calls
_CHOICES = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"


class Choosing(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    how: Choosing
    tools: Sequence[Mapping[str, Any]] = ()
    name: str | None = None  # of the forced tool

    @property
    def is_forced(self) -> bool:
        return self.how in (Choosing.REQUIRED, Choosing.NAMED)

    @property
    def callable(self) -> Sequence[Mapping[str, Any]]:
        """Tools that an answer may call."""
        return [tool for tool in self.tools if self.name in (None, tool["function"]["name"])]

    @property
    def names(self) -> list[str]:
        return [str(tool["function"]["name"]) for tool in self.callable]

    @property
    def texts(self) -> dict[str, frozenset[str]]:
        """Parameters of type string, by tool."""
        return {tool["function"]["name"]: _texts(parameters_of(tool["function"])) for tool in self.tools}

    def grammar(self, *, several: bool) -> Grammar:
        """The grammar of forced calls in JSON; more than one call if `several`. Raises ApiError."""
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
        raise ApiError(400, "tool_choice needs tools: add some, or leave it out", param="tool_choice")
    if body.is_guided:
        what = "a forced tool call cannot also follow response_format or another grammar: leave one out"
        raise ApiError(400, what, param="tool_choice")
    if choice == "required":
        return _forced(ToolChoice(how=Choosing.REQUIRED, tools=tools))
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise ApiError(400, f"tool_choice must be {_CHOICES}, got {choice!r:.200}", param="tool_choice")
    if name not in names:
        raise ApiError(400, f"tool_choice names {name!r:.80}, which is not one of the tools: {names!r:.500}", param="tool_choice")
    return _forced(ToolChoice(how=Choosing.NAMED, tools=tools, name=str(name)))


def _forced(choice: ToolChoice) -> ToolChoice:
    """Returns the choice. Raises ApiError if the arguments of a callable tool need not be an object."""
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
    if not isinstance(parameters, Mapping | None) and parameters != []:  # PHP writes an empty object so
        raise ApiError(400, f"tools[{number}].function.parameters {_OBJECT}", param="tools")
    return name


def parameters_grammar(function: Mapping[str, Any]) -> Grammar:
    """The grammar of a call's arguments. Raises ApiError."""
    return schema_grammar(parameters_of(function), param=_PARAM, strict=_is_strict(function))


def _is_strict(function: Mapping[str, Any]) -> bool:
    return function.get("strict") is True


def parameters_of(function: Mapping[str, Any]) -> Any:
    """Adds `type: object`, because a schema without a type also matches other values."""
    return {**(function.get("parameters") or {}), "type": "object"}


def _texts(parameters: Any) -> frozenset[str]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    found = properties.items() if isinstance(properties, Mapping) else ()
    return frozenset(name for name, each in found if isinstance(each, Mapping) and each.get("type") == "string")


def _call_schema(name: str, parameters: str) -> dict[str, Any]:
    properties = {"name": {"const": name}, "parameters": {"$ref": parameters}}
    return {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False}


def _moved(schema: Any, to: str) -> Any:
    """Rewrites references within a schema, such as `#/$defs/Place`, for its place within another schema."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    ref = schema.get("$ref")
    moved = {"$ref": to + ref[1:]} if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) else {}
    return {name: _moved(each, to) for name, each in schema.items()} | moved
