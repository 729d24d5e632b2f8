"""A schema in the library's words allows the same values: random schemas, judged by a validator of what they are made of."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from stepwell.engine.requests.schemas import followable

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 1.5, "a", "b", [], {}, {"k": 1}, {"k": "a"}, {"k": True}, {"m": 1}, {"k": 1, "m": "a"},
    {"k": "a", "m": 2}, {"k": "b", "m": 1},
]  # fmt: skip
PLAIN = VALUES[:9]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def is_a(value: Any, kind: str) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in ("integer", "number"):
        return number and (kind == "number" or value == int(value))
    known = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
    return isinstance(value, known[kind])


def fits(schema: Any, value: Any, root: Any) -> bool:
    types = schema.get("type", TYPES)
    held = [
        "$ref" not in schema or fits(root["$defs"][schema["$ref"][-1]], value, root),
        any(is_a(value, each) for each in ([types] if isinstance(types, str) else types)),
        "const" not in schema or same(value, schema["const"]),
        "enum" not in schema or any(same(value, each) for each in schema["enum"]),
        "oneOf" not in schema or sum(fits(each, value, root) for each in schema["oneOf"]) == 1,
        "anyOf" not in schema or any(fits(each, value, root) for each in schema["anyOf"]),
    ]
    if isinstance(value, dict):
        held += [name in value for name in schema.get("required", ())]
        held += [fits(each, value[name], root) for name, each in schema.get("properties", {}).items() if name in value]
    return all(held)


def a_schema(random: Random, *, refers: bool) -> dict[str, Any]:
    if refers and random.random() < 0.25:
        beside = {"type": random.choice(TYPES)} if random.random() < 0.3 else {}
        return {"$ref": f"#/$defs/{random.choice('xy')}", **beside}
    schema: dict[str, Any] = {}
    if random.random() < 0.5:
        properties = {
            name: random.choice([{"const": random.choice(PLAIN)}, {"enum": random.sample(PLAIN, 2)}, {}]) for name in "km"
        }
        schema |= {"type": "object", "properties": properties}
        return schema | ({"required": random.sample("km", random.randint(1, 2))} if random.random() < 0.7 else {})
    if random.random() < 0.6:
        schema["type"] = random.choice(TYPES) if random.random() < 0.7 else random.sample(TYPES, 2)
    if random.random() < 0.5:
        schema |= random.choice([{"const": random.choice(PLAIN)}, {"enum": random.sample(PLAIN, 2)}])
    return schema


def test_a_one_of_that_became_any_of_allows_the_same_values() -> None:
    random, became = Random(7), 0
    for _ in range(6000):
        defined = {name: a_schema(random, refers=False) for name in "xy"}
        given = {"oneOf": [a_schema(random, refers=True) for _ in range(random.randint(2, 3))], "$defs": defined}
        made = json.loads(followable(json.dumps(given)))
        if "anyOf" in made:
            became += 1
            wrong = [value for value in VALUES if fits(given, value, given) != fits(made, value, made)]
            assert not wrong, (given, wrong)
    assert became > 300, "or nothing was tried"
