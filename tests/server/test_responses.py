"""`/v1/responses` as the official client uses it for text: whole and streamed, the same answers as chats."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from server.serving import NAME, Held, Running, running

SAID: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 12}


class Well(pydantic.BaseModel):
    name: Literal["Chand Baori", "Rani ki Vav"]
    wet: bool


def chatted(client: openai.OpenAI, *messages: Any) -> str | None:
    made = client.chat.completions.create(model=NAME, messages=list(messages), temperature=0, max_tokens=12)
    return made.choices[0].message.content


def test_text_in_is_text_out_and_the_same_as_a_chat(client: openai.OpenAI) -> None:
    made = client.responses.create(**SAID, instructions="Be a well.", input="How deep?")
    asked = ({"role": "system", "content": "Be a well."}, {"role": "user", "content": "How deep?"})
    assert made.output_text == chatted(client, *asked) and made.output_text
    assert (made.status, made.model, made.object) == ("incomplete", NAME, "response")
    assert made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None and made.usage.output_tokens == 12
    assert made.usage.total_tokens == made.usage.input_tokens + 12


def test_a_conversation_is_given_as_items(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "One."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Two.", "annotations": []}]},
        {"role": "user", "content": "Three."},
    ]  # fmt: skip
    turns = (("user", "One."), ("assistant", "Two."), ("user", "Three."))
    made = client.responses.create(**SAID, input=items)
    assert made.output_text == chatted(client, *({"role": role, "content": text} for role, text in turns))


def test_what_one_turn_returned_is_taken_by_the_next(client: openai.OpenAI) -> None:
    first = client.responses.create(**SAID, input="Begin.")
    items: list[Any] = [{"role": "user", "content": "Begin."}, *(each.model_dump() for each in first.output)]
    assert client.responses.create(**SAID, input=[*items, {"role": "user", "content": "Go on."}]).output_text


def test_a_stream_tells_the_same_in_the_order_of_the_api(client: openai.OpenAI) -> None:
    whole = client.responses.create(**SAID, input="Flow.")
    events = list(client.responses.create(**SAID, input="Flow.", stream=True))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete" and text == whole.output_text == last.response.output_text


def test_the_client_s_own_stream_helper_puts_it_together(client: openai.OpenAI) -> None:
    with client.responses.stream(**SAID, input="Flow.", extra_body={"stop_token_ids": list(range(32, 127))}) as stream:
        made = stream.get_final_response()
    assert made.status == "completed" and made.incomplete_details is None and made.output_text == ""


def test_an_answer_is_parsed_into_the_type_that_was_asked_for(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    more: Any = {**SAID, "max_output_tokens": 300, "input": "A well, please.", "metadata": {"run": "7"}}
    made = client.responses.parse(**more, text_format=Well)
    assert isinstance(made.output_parsed, Well) and made.status == "completed" and made.metadata == {"run": "7"}
    with client.responses.stream(**more, text_format=Well) as stream:
        assert stream.get_final_response().output_parsed == made.output_parsed
    free = {"logit_bias": {str(ord("}")): 8, str(ord('"')): 8}}
    any_object = client.responses.create(**more, text={"format": {"type": "json_object"}}, extra_body=free)
    assert isinstance(json.loads(any_object.output_text), dict) and any_object.text is not None
    assert any_object.text.format is not None and any_object.text.format.type == "json_object"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("conversation", "conv_1"),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("reasoning", {"summary": "all of it"}),
        ("reasoning", {"context": "all_turns"}),
        ("reasoning", {"mode": "pro"}),
        ("text", {"verbosity": "low"}),
        ("include", ["message.output_text.logprobs"]),
        ("include", "reasoning.encrypted_content"),
        ("store", "no"),
        ("max_tool_calls", 0),
        ("stream_options", {"include_obfuscation": True}),
        ("context_management", [{"type": "compaction"}]),
        ("moderation", {"model": "x"}),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("prompt_logprobs", 3),
        ("text", {"format": "json"}),
        ("text", {"format": {"type": "grammar"}}),
        ("text", {"format": {"type": "json_schema", "name": "x"}}),
        ("metadata", {"x": 5}),
        ("truncation", "middle"),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("input", [{"type": "function_call", "name": "f", "arguments": "{}"}]),
        ("input", [{"type": "function_call_output", "call_id": 7, "output": "x"}]),
        ("input", []),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("reasoning", {"effort": 5}),
        ("temperature", -1),
        ("max_output_tokens", 0),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http: httpx.Client, field: str, value: object) -> None:
    refused = http.post("/v1/responses", json={"model": NAME, "input": "x", field: value})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_errors_name_what_the_client_sent(http: httpx.Client) -> None:
    for fields, said in (
        ({"instructions": "Be nice.", "input": [{"role": "user", "content": 1}]}, "input: content must be"),
        ({"input": [{"type": "reasoning", "content": []}]}, "input:"),
        ({"reasoning": {"effort": 3}}, "reasoning:"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format needs"),
    ):
        reported = http.post("/v1/responses", json={**SAID, "input": "x", **fields}).json()["error"]["message"]
        assert reported.startswith(said), reported
    tools = [{"type": "function", "name": "messages", "parameters": {}}]
    more = {"input": "x", "tools": tools, "tool_choice": {"type": "function", "name": "other"}}
    assert "['messages']" in http.post("/v1/responses", json={**SAID, **more}).json()["error"]["message"], "what is quoted stays"


DEFAULTS: dict[str, Any] = {  # what agents send with every request, whatever the model
    "store": True,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "reasoning": {"effort": "low", "summary": "auto", "generate_summary": None, "context": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "truncation": "auto",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "metadata": {"run": "7"},
    "service_tier": "auto",
    "max_tool_calls": 5,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "user": "u",
    "background": False,
    "top_logprobs": 0,
    "previous_response_id": None,
    "conversation": None,
}


def test_what_agents_send_by_default_is_taken_and_the_response_says_what_holds(client: openai.OpenAI) -> None:
    plain = client.responses.create(**SAID, input="How deep?")
    made = client.responses.create(**SAID, **DEFAULTS, input="How deep?")
    assert made.output_text == plain.output_text
    held = made.model_dump()
    assert (held["store"], held["truncation"], held["parallel_tool_calls"]) == (False, "disabled", True)
    assert held["reasoning"]["summary"] is None and held["reasoning"]["effort"] == "low" and held["metadata"] == {"run": "7"}
    assert held["text"]["format"] == {"type": "text"} and held["max_tool_calls"] == 5 and held["background"] is False
    stream = client.responses.create(
        **SAID, **DEFAULTS, input="How deep?", stream=True, stream_options={"include_obfuscation": False}
    )
    last: Any = list(stream)[-1]
    assert last.response.output_text == plain.output_text and last.response.store is False


def test_a_format_that_is_null_is_text_and_told_as_that(http: httpx.Client) -> None:
    made = http.post("/v1/responses", json={**SAID, "input": "How deep?", "text": {"format": None, "verbosity": None}})
    assert made.status_code == 200 and made.json()["text"] == {"format": {"type": "text"}}


def test_an_input_that_is_too_long_is_refused_and_never_cut(http: httpx.Client) -> None:
    refused = http.post("/v1/responses", json={**SAID, "input": "x" * 100_000, "truncation": "auto"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


def test_another_model_is_not_found_and_fields_of_the_cache_count(http: httpx.Client) -> None:
    assert http.post("/v1/responses", json={"model": "other", "input": "x"}).status_code == 404
    body = {**SAID, "input": "A long enough prompt to fill some pages of sixteen tokens each."}
    cached = [http.post("/v1/responses", json=body | more).json()["usage"] for more in ({}, {}, {"cache_salt": "mine"})]
    assert [each["input_tokens_details"]["cached_tokens"] > 0 for each in cached] == [False, True, False]


def test_a_stream_whose_time_is_up_ends_with_an_error_event() -> None:
    with running(serving={"request_timeout_s": 0.5}) as served, Held(served):
        reported = httpx.post(f"{served.address}/v1/responses", json={**SAID, "input": "x", "stream": True}, timeout=60).text
        assert "request_timeout" in reported and "response.completed" not in reported
        served.audit()


def test_leaving_a_response_aborts_it(served: Running, client: openai.OpenAI) -> None:
    body = {"ignore_eos": True}
    stream = client.responses.create(model=NAME, input="Go on.", max_output_tokens=1900, stream=True, extra_body=body)
    next(iter(stream))
    stream.close()
    served.audit()


def test_half_characters_that_a_client_sends_beside_the_prompt_break_nothing(http: httpx.Client) -> None:
    body = json.dumps({**SAID, "input": "x", "metadata": {"a": "\ud800"}})
    response = http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200 and response.json()["metadata"] == {"a": "\ud800"}
