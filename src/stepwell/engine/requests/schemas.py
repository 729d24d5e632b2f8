"""JSON schemas as the grammar library can follow them: annotations are left out, and equivalent forms replaced by its own.

    format                   an annotation, by JSON Schema's own rules, unless the library can follow it
    uniqueItems: false       asserts nothing
    oneOf                    the same as anyOf, where no value fits two of the branches

Pure. A schema keeps its meaning; what the library cannot follow stays in it, and is refused there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})  # no schemas stand in these
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # schemas by any name
_MOST_REFS = 8  # one behind the other
_FUEL = 100_000  # values that are looked at, in all: a fraction of a second
_NOT_FOLLOWED = re.compile(r"Unimplemented keys: (\[.*?\])")
_ONE_OF = "oneOf constraints are not supported"


def followable(source: str) -> str:
    """The same schema in JSON. Raises ValueError for what is no JSON, and RecursionError."""
    root = json.loads(source)
    return json.dumps(_Rewriter(root, proves="/oneOf" not in source).schema(root))


def in_plain_words(error: str) -> str:
    """The library's error for a schema that it cannot follow, in plain words."""
    found = _NOT_FOLLOWED.search(error)
    if found is not None:
        names = " and ".join(json.dumps(each) for each in json.loads(found.group(1)))
        return f"{names} cannot be kept by a grammar: leave it out of what has to be kept"
    if _ONE_OF in error:
        return '"oneOf" can only be kept where no value fits two of its branches: use "anyOf"'
    return error


class _Rewriter:
    def __init__(self, root: Any, *, proves: bool) -> None:
        """`proves`: whether a oneOf may become anyOf. Not where something refers to a part of it by that name."""
        self._root = root
        self._fuel = _FUEL if proves else 0
        # References are looked up from the root, which is where they begin unless a part has a name of its own.
        self._resolves = not _has_names(root)

    def schema(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.schema(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        found = {name: self._part(name, each) for name, each in schema.items() if not _says_nothing(name, each)}
        branches = schema.get("oneOf")
        if "anyOf" in schema or not isinstance(branches, list) or not self._are_apart(branches):
            return found
        return {"anyOf" if name == "oneOf" else name: each for name, each in found.items()}  # in the same order

    def _part(self, name: str, value: Any) -> Any:
        if name in _VALUES:
            return value
        if name in _BY_NAME and isinstance(value, Mapping):
            return {each: self.schema(schema) for each, schema in value.items()}
        return self.schema(value)

    def _are_apart(self, branches: Sequence[Any]) -> bool:
        """Whether it is certain that no value fits two of them."""
        found = [self._resolved(each) for each in branches]
        return all(self._apart(one, other) for at, one in enumerate(found) for other in found[at + 1 :])

    def _apart(self, one: Any, other: Any) -> bool:
        """Whether it is certain that no value fits both: by type, by value, or by a property that one of them has to have."""
        self._fuel -= 1
        if self._fuel < 0 or not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        types = _types(one), _types(other)
        if (types[0] and types[1] and not types[0] & types[1]) or self._no_common(one, other):
            return True
        if types != ({"object"}, {"object"}):
            return False
        mine, others = (each if isinstance(each, Mapping) else {} for each in (one.get("properties"), other.get("properties")))
        needed = [name for each in (one, other) for name in _required(each) if name in mine and name in others]
        return any(self._no_common(mine[name], others[name]) for name in needed)

    def _no_common(self, one: Any, other: Any) -> bool:
        values = [self._values(each) for each in (one, other)]
        return values[0] is not None and values[1] is not None and values[0].isdisjoint(values[1])

    def _values(self, schema: Any) -> set[str] | None:
        """All values that a schema allows, where it names them: texts, booleans and whole numbers, no two of them equal."""
        if not isinstance(schema, Mapping):
            return None
        found = [schema["const"]] if "const" in schema else schema.get("enum")
        self._fuel -= 1 + (len(found) if isinstance(found, list) else 0)
        if self._fuel < 0 or not isinstance(found, list) or not all(isinstance(each, str | bool | int) for each in found):
            return None
        return {json.dumps(each) for each in found}

    def _resolved(self, schema: Any) -> Any:
        """What has to hold for a schema at least."""
        for _ in range(_MOST_REFS):
            ref = schema.get("$ref") if isinstance(schema, Mapping) else None
            if ref is None:
                return schema
            schema = self._at(ref) if isinstance(ref, str) and self._resolves else None
        return None

    def _at(self, ref: str) -> Any:
        if not ref.startswith("#/") or "%" in ref or "~" in ref:
            return None
        found = self._root
        for name in ref[2:].split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _has_names(root: Any) -> bool:
    parts: list[Any] = [*root.values()] if isinstance(root, Mapping) else []
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping) and isinstance(part.get("$id"), str):
            return True
        parts += part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    return False


def _says_nothing(name: str, value: Any) -> bool:
    is_annotation = name == "format" and isinstance(value, str) and value not in FORMATS
    return is_annotation or (name == "uniqueItems" and value is False)


def _required(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required")
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema names; a whole number is a number."""
    types = schema.get("type")
    named = [types] if isinstance(types, str) else types
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        return None
    return {"number" if each == "integer" else each for each in named}
