"""Schemas keep their meaning in the library's words: annotations go, and a oneOf is anyOf where no value fits two branches."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from stepwell.engine.requests.schemas import followable, in_plain_words

CAT: dict[str, Any] = {"type": "object", "properties": {"kind": {"const": "cat"}, "a": {}}, "required": ["kind"]}
DOG: dict[str, Any] = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}}
REFS = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
DATE = {"type": "string", "format": "date"}


def made(schema: Any) -> Any:
    return json.loads(followable(json.dumps(schema)))


def test_annotations_go_and_what_asserts_something_stays() -> None:
    given = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "int32"}, "format": DATE, "uniqueItems": False},
        "$defs": {"const": {"format": "password"}},
        "items": [{"uniqueItems": False}, {"uniqueItems": True}],
        "enum": [{"format": "x", "uniqueItems": False}],
        "const": {"format": "x", "oneOf": [{"type": "string"}, {"type": "null"}]},
    }
    assert made(given) == given | {
        "properties": {"a": {"type": "string"}, "format": DATE, "uniqueItems": False},
        "$defs": {"const": {}},
        "items": [{}, {"uniqueItems": True}],
    }
    assert made(True) is True


@pytest.mark.parametrize(
    ("branches", "apart"),
    [
        (REFS, True),
        ([CAT, DOG], True),  # one that needs the property is enough
        ([{"const": 1}, {"const": 2}, {"enum": [3, "1", True]}], True),
        ([{"type": "integer"}, {"type": ["string", "null"]}], True),
        ([CAT, {"type": "string"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"const": 1}, {"enum": [2, 1]}], False),
        ([{"const": 1}, {"const": 2}, {"const": 1}], False),
        ([{**CAT, "required": []}, DOG], False),  # it is not required
        ([CAT, {**DOG, "properties": {}}], False),
        ([CAT, {**DOG, "type": ["object", "null"]}], False),
        ([CAT, {"properties": DOG["properties"]}], False),
        ([{}, {"type": "string"}], False),
        ([{"$ref": "#/$defs/round"}, CAT], False),
        ([{"$ref": "#/$defs/none"}, CAT], False),
        ([{"$ref": "https://example.org/x"}, CAT], False),
    ],
    ids=str,
)
def test_a_one_of_is_any_of_only_where_no_value_fits_two_branches(branches: list[Any], apart: bool) -> None:
    given = {"title": "x", "oneOf": branches, "$defs": {"cat": CAT, "dog": DOG, "round": {"$ref": "#/$defs/round"}}}
    found = made(given)
    assert found == ({("anyOf" if name == "oneOf" else name): each for name, each in given.items()} if apart else given)
    assert list(found)[1] in ("anyOf", "oneOf"), "properties come in the order in which keywords do"


def test_a_one_of_stays_where_another_name_could_mean_something_else() -> None:
    apart = [{"type": "string"}, {"type": "null"}]
    both = {"oneOf": apart, "anyOf": [{"minLength": 1}]}
    referred = {"oneOf": apart, "properties": {"a": {"$ref": "#/oneOf/0"}}}
    elsewhere = {"$defs": {"cat": CAT, "dog": DOG}, "properties": {"a": {"$id": "https://example.org/a", "oneOf": REFS}}}
    for each in (both, referred, elsewhere):
        assert made(each) == each


def test_a_schema_is_read_in_bounded_time() -> None:
    long = {"enum": [f"value {number}" for number in range(4000)]}
    many = {"anyOf": [{"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}] * 900, "$defs": {"a": long}}
    wide = {"oneOf": [{"const": number} for number in range(3000)]}
    began = time.process_time()
    for each in (many, wide):
        made(each)
    assert time.process_time() - began < 5


def test_errors_are_in_plain_words() -> None:
    assert in_plain_words('Unimplemented keys: ["not", "if"]').startswith('"not" and "if" cannot be kept')
    assert '"anyOf"' in in_plain_words("oneOf constraints are not supported. Enable 'coerce_one_of' option")
    assert in_plain_words("something else") == "something else"
