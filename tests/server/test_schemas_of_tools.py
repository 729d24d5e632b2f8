"""Schemas as tools of every day have them: followed where a grammar can, refused by name where it was promised and cannot."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance")

from server.serving import NAME, Running, running, tiny_checkpoint
from server.test_tool_calls import TEMPLATE, USER, calls_of
from stepwell.engine.loading.chat import ChatTemplate

MANY = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2, "uniqueItems": True}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"], "additionalProperties": False}
DOG = {**CAT, "properties": {"kind": {"const": "dog"}}}
PET = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}}
LONG = {"type": "string", "maxLength": 3, "format": "password"}
NOT_KEPT = {
    "not": {"not": {"const": 7}}, "uniqueItems": {"uniqueItems": True}, "contains": {"contains": {"const": 1}},
    "propertyNames": {"propertyNames": {"maxLength": 3}}, "if": {"if": {"type": "string"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(
        checkpoint=replace(tiny_checkpoint(), chat=ChatTemplate(TEMPLATE, bos_token="<bos>", eos_token="<eos>"))
    ) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    bias = {str(ord(each)): 4 for each in '"]}'}
    return client.chat.completions.create(model=NAME, messages=[USER], temperature=0, max_tokens=300, logit_bias=bias, **more)


def as_format(schema: Any, **more: Any) -> Any:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}}


def as_json(schema: Any) -> Any:
    return {"extra_body": {"structured_outputs": {"json": schema}}}


@pytest.mark.parametrize("how", [lambda schema: as_format(schema, strict=True), as_json, as_format])
def test_formats_that_are_annotations_and_branches_that_are_apart_are_followed(client: openai.OpenAI, how: Any) -> None:
    assert len(json.loads(ask(client, **how(LONG)).choices[0].message.content)) <= 3
    assert json.loads(ask(client, **how(PET)).choices[0].message.content)["kind"] in ("cat", "dog")
    assert json.loads(ask(client, **how({"type": "integer", "enum": [4], "uniqueItems": False})).choices[0].message.content) == 4


@pytest.mark.parametrize("keyword", NOT_KEPT)
def test_what_cannot_be_kept_is_refused_by_name_unless_it_was_not_promised(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture, keyword: str
) -> None:
    caplog.set_level(logging.INFO, logger="stepwell.engine.requests.guided")
    schema = {"type": "object", "properties": {"a": {**NOT_KEPT[keyword], "enum": [7]}}, "required": ["a"]} | {
        "additionalProperties": False
    }
    for asked in (as_format(schema, strict=True), as_json(schema)):
        with pytest.raises(openai.BadRequestError, match=f'"{keyword}" cannot be kept by a grammar') as caught:
            ask(client, **asked)
        assert caught.value.code == "invalid_grammar"
    for asked in (as_format(schema), as_format(schema, strict=False)):
        assert json.loads(ask(client, **asked).choices[0].message.content) == {"a": 7}, "all the rest is kept"
    (reported,) = [each.getMessage() for each in caplog.records if each.name == "stepwell.engine.requests.guided"]
    assert "follow a schema in part" in reported and f'"{keyword}"' in reported, "once for each schema"


def tool(*, strict: bool | None) -> Any:
    parameters = {"type": "object", "properties": {"days": MANY}, "required": ["days"], "additionalProperties": False}
    return {"type": "function", "function": {"name": "plan", "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "plan"}}], ids=str)
@pytest.mark.parametrize("several", [True, False], ids=["one form", "with a tool that has no plain name"])
def test_a_forced_call_keeps_what_it_can_of_a_tool_that_is_not_strict(client: openai.OpenAI, choice: Any, several: bool) -> None:
    others = (
        []
        if several
        else [{"type": "function", "function": {"name": "not plain", "parameters": {"additionalProperties": False}}}]
    )
    for strict in (None, False):
        made = ask(client, tools=[tool(strict=strict), *others], tool_choice=choice, parallel_tool_calls=False).choices[0].message
        names = {name for name, _ in calls_of(made)}
        days = [arguments["days"] for name, arguments in calls_of(made) if name == "plan"]
        assert names <= {"plan", "not plain"} and all(set(each) <= {1, 2} and 1 <= len(each) <= 2 for each in days)
    with pytest.raises(openai.BadRequestError, match='"uniqueItems" cannot be kept by a grammar'):
        ask(client, tools=[tool(strict=True), *others], tool_choice=choice)


def test_schemas_that_no_answer_fits_are_refused_in_plain_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="refers to nothing but itself"):
        ask(client, **as_json({"$ref": "#"}))
    with pytest.raises(openai.BadRequestError, match="no answer matches the schema false") as caught:
        ask(client, **as_json(False))
    assert caught.value.code == "invalid_grammar"
    with pytest.raises(openai.BadRequestError, match='"oneOf" can only be kept where no value fits two'):
        ask(client, **as_json({"oneOf": [{"type": "integer"}, {"type": "number"}]}))
    with pytest.raises(openai.BadRequestError, match="has a wrong value"):
        ask(client, extra_body={"structured_outputs": {"regex": False}})


def test_options_that_are_off_are_no_format_and_the_schema_true_is_any_json(client: openai.OpenAI) -> None:
    off = {"structured_outputs": {"json_object": False, "disable_any_whitespace": False}}
    assert ask(client, extra_body=off).choices[0].finish_reason
    made = ask(client, **as_json(True)).choices[0]
    assert made.finish_reason == "stop" and isinstance(json.loads(made.message.content), str | int | float | list | dict | None)
