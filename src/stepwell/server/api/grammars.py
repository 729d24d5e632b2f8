"""What an answer is to follow, out of the fields that ask for it: OpenAI's `response_format`, vLLM's `structured_outputs`.

    response_format       {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": {...}}}
    structured_outputs    one of json, json_object, regex, choice, grammar
    guided_json, guided_regex, guided_choice, guided_grammar        as older clients of vLLM name them
    json_schema, regex, ebnf                                        as SGLang names them

Compiles on the calling thread, which must not be the event loop's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.base.errors import ConfigError
from stepwell.engine.requests.guided import NEEDS_EXTRA, Grammar, Guide, Kind, Thoughts
from stepwell.server.api.bodies import Asked
from stepwell.server.api.parsing.formats import REASONING, prompt_end
from stepwell.server.errors import ApiError
from stepwell.server.served import Served

MAX_CHOICES_TO_MAKE = 1000
_OPTIONS = "x-guidance"  # of the grammar library, which stand in a schema
_ANY_OBJECT = {"type": "object"}
TOO_DEEP = "the schema is nested too deeply to be followed"
_KINDS = ("json", "regex", "choice", "grammar")
_FORMATS = ("text", "json_object", "json_schema")


def guide_of(served: Served, body: Asked, tenant: str | None) -> Guide | None:
    """What a body says that its answer follows; None where it is free. Raises ApiError."""
    asked = grammar_of(body)
    return None if asked is None else compiled(served, asked[1], tenant, param=asked[0])


def grammar_of(body: Asked) -> tuple[str, Grammar] | None:
    """The field that says what an answer follows, and what that is. Raises ApiError."""
    asked = [each for each in (_of_format(body), *_of_structured(body), *_of_others(body)) if each is not None]
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise ApiError(400, f"an answer follows one thing: {names} were asked for", param=asked[0][0].split(".")[0])
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
    """What a model may think before an answer that follows a grammar; None where that begins with the first token.

    So it does for models that do not think, whose markers are not one token each, or whose prompt has ended the thoughts.
    `within`: what the message says so far that the answer goes on from, None for an answer of its own.
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
    """`strict`: what a grammar cannot keep of the schema is refused; otherwise it is left out. Raises ApiError."""
    if not strict and isinstance(schema, Mapping):
        options = schema.get(_OPTIONS)
        schema = {**schema, _OPTIONS: {"lenient": True, **(options if isinstance(options, Mapping) else {})}}
    try:
        return Grammar(kind=Kind.JSON_SCHEMA, source=schema if isinstance(schema, str) else json.dumps(schema))
    except RecursionError:
        raise ApiError(400, f"{param}: {TOO_DEEP}", param=param, code="invalid_grammar") from None


Asking = tuple[str, Grammar]


def _of_format(body: Asked) -> Asking | None:
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


def _of_structured(body: Asked) -> list[Asking]:
    """Options that are false are off; the schema `false` is none."""
    asked = (body.structured_outputs or {}).items()
    given = {name: value for name, value in asked if value is not None and (value is not False or name in _KINDS)}
    return [(f"structured_outputs.{name}", _grammar("structured_outputs", name, value)) for name, value in given.items()]


def _of_others(body: Asked) -> list[Asking]:
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
        raise ApiError(400, f"{param}: no answer fits the schema false; give another", param=param, code="invalid_grammar")
    if name == "json" and isinstance(value, str | Mapping):
        return schema_grammar(value, param=param)
    if name == "json_object" and value is True:
        return schema_grammar(_ANY_OBJECT, param=param)
    if name in ("regex", "grammar") and isinstance(value, str) and value:
        return Grammar(kind=Kind(name), source=value)
    if name == "choice" and _are_texts(value):
        return Grammar(kind=Kind.CHOICE, source=json.dumps(value))
    what = "one of json (a schema), json_object (true), regex and grammar (text), choice (a list of texts)"
    raise ApiError(400, f"{param}: {name!r:.80} is not known or has no such value; give {what}", param=param)


def _are_texts(value: Any) -> bool:
    some = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES_TO_MAKE
    return some and all(isinstance(each, str) and each for each in value)
