"""What the official client's own examples ask for, call by call: parsed answers and tools, whole and streamed, and errors.

The model has random weights, so what it would say of itself is scripted where an example leaves that to the model. Examples that
need kept responses, files, sound or images are none of this server's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

import openai
import pydantic
import pytest

pytest.importorskip("llguidance")

from server.serving import KEY, NAME, Running, running, tiny_checkpoint
from server.test_tool_calls import END, TEMPLATE, Script
from stepwell.engine.loading.chat import ChatTemplate

USER: Any = {"role": "user", "content": "Which wells in the north are deep, and not yet dry?"}
SYSTEM: Any = {"role": "system", "content": "You look things up about wells."}
SHORT = {"\n": -20, "\t": -20, " ": -20, '"': 6, "]": 6}  # so that free strings and lists come to an end


class Table(str, Enum):
    wells = "wells"
    visits = "visits"


class Operator(str, Enum):
    is_ = "="
    above = ">"
    not_ = "!="


class Column(pydantic.BaseModel):
    column_name: str


class Condition(pydantic.BaseModel):
    column: str
    operator: Operator
    value: str | int | Column


class Search(pydantic.BaseModel):
    table: Table
    columns: list[str]
    conditions: list[Condition]


class Weather(pydantic.BaseModel):
    city: str
    country: str


class Step(pydantic.BaseModel):
    explanation: str
    output: str


class Solution(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(max_length=2)
    final_answer: str


SEARCH = {
    "table": "wells", "columns": ["name", "depth"], "conditions": [
        {"column": "depth", "operator": ">", "value": 20}, {"column": "seen", "operator": "!=", "value": {"column_name": "dry"}},
    ],
}  # fmt: skip
CITIES = [{"city": "Agra", "country": "India"}, {"city": "Rome", "country": "Italy"}]


def call(name: str, arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    chat = ChatTemplate(TEMPLATE, bos_token="<bos>", eos_token="<eos>")
    with running(api_key=KEY, checkpoint=replace(tiny_checkpoint(), chat=chat)) as made:
        yield made


@pytest.fixture
def script(served: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda text: monkeypatch.setattr(served.engine.text, "stream", lambda after, *, special: Script(text))


def brief(served: Running) -> dict[str, Any]:
    bias = {str(ord(each)): value for each, value in SHORT.items()}
    return {"model": NAME, "temperature": 0.7, "extra_body": {"logit_bias": bias, "seed": 3}}


# ---- chats ----------------------------------------------------------------------------------------


def test_answers_are_told_whole_streamed_and_raw(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": [USER], "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = [chunk for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    assert whole and "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    raw = client.chat.completions.with_raw_response.create(**asked)
    assert raw.parse().choices[0].message.content == whole and raw.http_response.status_code == 200


def test_the_asynchronous_client_and_that_of_the_module_say_the_same(
    served: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Any = {"model": NAME, "prompt": "Say this is a test", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text

    async def streamed() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0) as made:
            return "".join([chunk.choices[0].text async for chunk in await made.completions.create(**asked, stream=True)])

    monkeypatch.setattr(openai, "base_url", f"{served.address}/v1/")
    monkeypatch.setattr(openai, "api_key", KEY)
    assert asyncio.run(streamed()) == whole == openai.completions.create(**asked).choices[0].text


def test_errors_are_those_that_clients_catch(served: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError), served.client("of no user") as other:
        other.models.list()
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=NAME, messages=[USER], temperature=-1.0)
    assert isinstance(caught.value.body, dict) and caught.value.body["message"]


def test_an_answer_is_parsed_into_nested_types_whole_and_as_it_grows(served: Running, client: openai.OpenAI) -> None:
    asked: Any = {**brief(served), "messages": [SYSTEM, USER], "response_format": Solution, "max_tokens": 1500}
    found = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(found, Solution)
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        last = stream.get_final_completion().choices[0].message
    grown = [event.parsed for event in events if event.type == "content.delta"]
    assert len(grown) > 3 and grown[-1] == found.model_dump() and last.parsed == found
    assert [event.parsed for event in events if event.type == "content.done"] == [found]


def test_arguments_of_tools_are_parsed_into_the_types_that_were_given(client: openai.OpenAI, script: Any) -> None:
    script(call("Search", SEARCH))
    tools = [openai.pydantic_function_tool(Search)]
    made: Any = client.chat.completions.parse(
        model=NAME, messages=[SYSTEM, USER], tools=tools, stop=END, max_tokens=300, temperature=0
    )
    (found,) = made.choices[0].message.tool_calls
    assert found.function.parsed_arguments == Search.model_validate(SEARCH)


def test_a_grammar_keeps_arguments_to_the_types_that_were_given(served: Running, client: openai.OpenAI) -> None:
    asked: Any = {**brief(served), "messages": [USER], "max_tokens": 800, "tool_choice": "required"}
    asked |= {"tools": [openai.pydantic_function_tool(Search)], "parallel_tool_calls": False}
    made: Any = client.chat.completions.parse(**asked)
    (found,) = made.choices[0].message.tool_calls
    assert isinstance(found.function.parsed_arguments, Search)


def test_calls_are_told_as_they_grow_and_parsed_when_they_are_done(client: openai.OpenAI, script: Any) -> None:
    script("\n".join(call("get_weather", each) for each in CITIES))
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    with client.chat.completions.stream(
        model=NAME, messages=[USER], tools=tools, parallel_tool_calls=True, stop=END, max_tokens=300, temperature=0
    ) as stream:
        events = list(stream)
        final: Any = stream.get_final_completion().choices[0].message
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    done: list[Any] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    wanted = [Weather.model_validate(each) for each in CITIES]
    assert len(deltas) > 6 and [event.parsed_arguments for event in done] == wanted
    assert [each.function.parsed_arguments for each in final.tool_calls] == wanted


# ---- responses ------------------------------------------------------------------------------------


def test_a_response_is_parsed_whole_and_as_it_grows(served: Running, client: openai.OpenAI) -> None:
    asked: Any = {**brief(served), "input": USER["content"], "text_format": Solution, "max_output_tokens": 1500}
    found = client.responses.parse(**asked).output_parsed
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(found, Solution) and stream.get_final_response().output_parsed == found
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed" and "response.output_text.delta" in kinds


def test_tools_of_a_response_are_given_as_types_and_their_arguments_parsed(client: openai.OpenAI, script: Any) -> None:
    script(call("Search", SEARCH))
    asked: Any = {"model": NAME, "input": USER["content"], "tools": [openai.pydantic_function_tool(Search)]}
    asked |= {"max_output_tokens": 300, "temperature": 0, "extra_body": {"stop": END}}
    (found,) = client.responses.parse(**asked).output
    assert found.type == "function_call" and found.parsed_arguments == Search.model_validate(SEARCH)
    with client.responses.stream(**asked) as stream:
        deltas = sum(event.type == "response.function_call_arguments.delta" for event in stream)
        (same,) = stream.get_final_response().output
    assert same.type == "function_call" and json.loads(same.arguments) == SEARCH and deltas > 3


def test_results_of_functions_are_input(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "Answer by what the functions found."}, USER,
        {"type": "function_call", "call_id": "call_7", "name": "look_up", "arguments": '{"well": "of the north"}'},
        {"type": "function_call_output", "call_id": "call_7", "output": '{"depth": 30}'},
    ]  # fmt: skip
    made = client.responses.create(model=NAME, input=items, max_output_tokens=16)
    assert made.output_text and made.usage is not None and made.usage.output_tokens == 16
