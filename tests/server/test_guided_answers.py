"""`response_format` and vLLM's fields for guided output, by the official client."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import openai
import pydantic
import pytest

pytest.importorskip("llguidance")

from server.serving import NAME, running, tiny_checkpoint, tiny_draft
from server.test_openai_client import STORY, chat, complete
from stepwell.engine.loading.chat import ChatTemplate
from stepwell.engine.loading.random_hybrid import CHAT_TEMPLATE
from stepwell.server.api.parsing import formats
from stepwell.server.api.parsing.blocks import Reasoning


class Step(pydantic.BaseModel):
    depth: Literal[1, 2, 3]
    wet: bool


class Well(pydantic.BaseModel):
    name: Literal["Chand Baori", "Rani ki Vav"]
    steps: list[Step] = pydantic.Field(max_length=2)


MESSAGES: Any = [{"role": "user", "content": STORY}]


def test_an_answer_is_parsed_into_the_type_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=NAME, messages=MESSAGES, response_format=Well, max_tokens=300, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Well) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model=NAME, messages=MESSAGES, response_format=Well, max_tokens=300, temperature=0
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_an_object_is_an_object(client: openai.OpenAI) -> None:
    free = {"max_tokens": 400, "temperature": 0, "logit_bias": {str(ord("}")): 8, str(ord('"')): 8}}
    answer = chat(client, "Objects.", STORY, response_format={"type": "json_object"}, **free).choices[0]
    assert answer.finish_reason == "stop" and isinstance(json.loads(answer.message.content or ""), dict)


@pytest.mark.parametrize(
    ("field", "matches"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-[xyz]+;"}}, r"\d{3}-[xyz]+;"),
        ({"structured_outputs": {"choice": ["up", "down"]}}, "up|down"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"~3'}}, "abbb"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, r"x\dy"),
        ({"structured_outputs": {"json": {"enum": ["so", 7]}}}, '"so"|7'),
        ({"guided_regex": "(ab|cd){2}"}, "(ab|cd){2}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": {"const": True}}, "true"),
        ({"guided_grammar": 'start: "q" /[a-c]/'}, "q[abc]"),
        ({"regex": r"\d{4}-\d{2}-\d{2}"}, r"\d{4}-\d{2}-\d{2}"),
        ({"ebnf": 'root ::= "x" [0-9] "y"'}, r"x\dy"),
        ({"json_schema": '{"const": true}'}, "true"),
        ({"json_schema": {"const": 7}}, "7"),
    ],
    ids=str,
)
def test_the_fields_of_vllm(client: openai.OpenAI, field: dict[str, Any], matches: str) -> None:
    more = {"max_tokens": 60, "extra_body": field | {"logit_bias": {str(ord(";")): 5}}}
    answer = complete(client, "Guided. " + STORY, **more).choices[0]
    assert re.fullmatch(matches, answer.text) and answer.finish_reason == "stop", answer
    streamed = complete(client, "Guided. " + STORY, stream=True, **more)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.text


def asked(client: openai.OpenAI, number: int) -> str:
    body = {"structured_outputs": {"regex": "[a-z]{5,20}[.]"}} if number % 3 else {}
    return complete(client, f"{number}. {STORY}", max_tokens=30, temperature=1, seed=number, extra_body=body).choices[0].text


def test_many_at_once_answer_as_they_do_alone_and_with_a_draft() -> None:
    with running() as served, served.client() as client:
        alone = [asked(client, number) for number in range(12)]
        with ThreadPoolExecutor(12) as threads:
            assert list(threads.map(lambda number: asked(client, number), range(12))) == alone
    with running(draft=tiny_draft()) as served, served.client() as client, ThreadPoolExecutor(12) as threads:
        assert list(threads.map(lambda number: asked(client, number), range(12))) == alone


def test_a_server_without_the_library_says_what_to_install(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"pip install 'llguidance>=1\.7'") as caught:
        chat(client, "Missing.", STORY, response_format={"type": "json_schema", "json_schema": {"schema": {"enum": [17]}}})
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_parameter")


TOOL: Any = {"type": "function", "function": {"name": "dig", "parameters": {"enum": [{}]}}}


@pytest.mark.parametrize("opening", ["[", "[]"], ids=["the prompt opens thoughts", "the prompt has ended them"])
def test_formats_and_forced_calls_begin_behind_what_a_model_thinks(opening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.REASONING, "think", Reasoning(open="[", close="]"))  # type: ignore[index]
    template = CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n" + opening + "{%") + "{# tools #}"
    chat = ChatTemplate(template, bos_token="<bos>", eos_token="<eos>")
    more: Any = {"max_tokens": 200, "temperature": 1, "seed": 4, "logit_bias": {str(ord("]")): 2}}
    choice: Any = {"extra_body": {"structured_outputs": {"choice": ["up", "down"]}}}
    named: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "dig"}}}
    with (
        running(checkpoint=replace(tiny_checkpoint(), chat=chat), serving={"reasoning_parser": "think"}) as served,
        served.client() as client,
    ):

        def ask(**settings: Any) -> Any:
            return client.chat.completions.create(model=NAME, messages=MESSAGES, **more, **settings)

        def thought(message: Any) -> str:
            return str((message.model_extra or {}).get("reasoning_content") or "")

        messages = [each.message for each in ask(n=8, **choice).choices]
        assert all(each.content in ("up", "down") and "]" not in thought(each) for each in messages)
        assert any(map(thought, messages)) is (opening == "["), "thoughts are reported separately, where there are any"
        message = messages[0]  # which a stream with the same seed repeats
        pieces = [chunk.choices[0].delta for chunk in ask(stream=True, **choice)]
        assert "".join(each.content or "" for each in pieces) == message.content
        assert "".join(map(thought, pieces)) == thought(message)
        called = [each.message for each in ask(n=8, **named).choices]
        assert all((each.content, json.loads(each.tool_calls[0].function.arguments)) == (None, {}) for each in called)
        assert any(map(thought, called)) is (opening == "[")
        begun: Any = [*MESSAGES, {"role": "assistant", "content": "[so far"}]  # whatever the template would open
        goes_on = choice["extra_body"] | {"add_generation_prompt": False, "continue_final_message": True}
        made = client.chat.completions.create(model=NAME, messages=begun, n=8, extra_body=goes_on, **more)
        ended = [each.message for each in made.choices if each.finish_reason == "stop"]  # others still think
        assert ended and all(each.content in ("up", "down") for each in ended)
        assert any(thought(each.message) for each in made.choices), "it thinks on"


def test_a_tool_that_cannot_be_called_is_refused_in_words_of_the_client() -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]
    checkpoint = replace(
        tiny_checkpoint(), chat=ChatTemplate("{{ tools }}<tool_call>" + CHAT_TEMPLATE, bos_token="", eos_token="")
    )
    refused = pytest.raises(openai.BadRequestError, match="the grammar cannot be followed")
    with running(checkpoint=checkpoint) as served, served.client() as other, refused:
        other.chat.completions.create(model=NAME, messages=MESSAGES, tools=tools, tool_choice="required")


def test_a_grammar_that_grows_too_complex_is_the_request_s_mistake(client: openai.OpenAI) -> None:
    """No 500: the client's library would try that again."""
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="too complex to follow in the middle") as caught:
        chat(client, "Large.", STORY, response_format=wanted)
    assert caught.value.code == "invalid_grammar"
    with pytest.raises(openai.APIError, match="too complex to follow") as reported:
        list(client.chat.completions.create(model=NAME, messages=MESSAGES, response_format=wanted, stream=True))
    assert reported.value.code == "invalid_grammar"
