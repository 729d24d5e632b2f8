"""Fields of vLLM, SGLang and newer versions of OpenAI's API: honoured, refused with a reason, or ignored and named in the log."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

from server.serving import NAME, Running, running
from stepwell.base.meters import ManualClock
from stepwell.server.api.requests import MAX_UNKNOWN, UnknownFields
from waiting import PATIENCE_S

ASKED: dict[str, Any] = {"prompt": "Down the steps.", "max_tokens": 4, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Deep?"}], "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_regex", "x+"), ("no_stop_trim", True), ("lora_path", "some/adapter"), ("return_logprob", True),
        ("length_penalty", 0.5), ("detokenize", False), ("thinking_token_budget", 64), ("verbosity", "low"),
        ("max_new_tokens", 7), ("sampling_params", {"temperature": 1}), ("return_hidden_states", True),
    ],
)  # fmt: skip
def test_what_would_change_an_answer_is_refused_with_the_field(http: httpx.Client, field: str, value: object) -> None:
    for route, body in (("/v1/completions", ASKED), ("/v1/chat/completions", CHAT)):
        refused = http.post(route, json={**body, field: value})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == (field, "unsupported_parameter") and field in error["message"]


def test_values_that_change_nothing_are_taken(http: httpx.Client) -> None:
    neutral = {
        "stop_regex": [], "no_stop_trim": False, "lora_path": None, "return_logprob": False, "length_penalty": 1,
        "detokenize": True, "verbosity": "medium", "prediction": {"type": "content", "content": "x"},
    }  # fmt: skip
    plain = http.post("/v1/completions", json=ASKED).json()["choices"]
    assert http.post("/v1/completions", json={**ASKED, **neutral}).json()["choices"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_where_they_are_wanted(client: openai.OpenAI, stream: bool) -> None:
    more: dict[str, Any] = {"stream": stream, "extra_body": {"return_token_ids": True}}
    made = client.completions.create(model=NAME, **ASKED, **more)
    chunks: list[Any] = list(made) if stream else [made]
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.prompt_token_ids for choice in choices if choice.prompt_token_ids] == [[256, *ASKED["prompt"].encode()]]
    text = "".join(choice.text for choice in choices)
    ids = [token for choice in choices for token in choice.token_ids]
    assert len(ids) == 4 and bytes(token for token in ids if token < 256).decode() == text
    chat: Any = client.chat.completions.create(model=NAME, **CHAT, **more)
    parts = list(chat) if stream else [chat]
    tokens = client.post("/../tokenize", body={"messages": CHAT["messages"]}, cast_to=object)
    assert parts[0].prompt_token_ids == tokens["tokens"]  # type: ignore[index]
    assert sum(len(getattr(part.choices[0], "token_ids", None) or ()) for part in parts) == 4


def test_tokens_in_logprobs_are_ids_where_that_is_wanted(client: openai.OpenAI) -> None:
    as_ids: dict[str, Any] = {"extra_body": {"return_tokens_as_token_ids": True, "return_token_ids": True}}
    choice: Any = client.completions.create(model=NAME, **ASKED, logprobs=1, **as_ids).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    said: Any = client.chat.completions.create(model=NAME, **CHAT, logprobs=True, **as_ids).choices[0]
    assert [each.token for each in said.logprobs.content] == [f"token_id:{token}" for token in said.token_ids]


def test_every_chunk_has_the_usage_so_far_where_that_is_wanted(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": options}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    usages = [json.loads(line)["usage"] for line in lines[:-1]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 4
    assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/cache/explain"])
def test_many_fields_that_are_not_known_are_refused(http: httpx.Client, route: str) -> None:
    body = {**(CHAT if "chat" in route else ASKED), "input": "x"}
    body = body if "cache" not in route else {"prompt": "x"}
    refused = http.post(route, json={**body, **{f"made-up-{number}": 1 for number in range(MAX_UNKNOWN + 1)}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_fields"), refused.text
    assert str(MAX_UNKNOWN) in refused.json()["error"]["message"]


def test_a_body_of_nothing_but_fields_is_refused_soon() -> None:
    many = json.dumps({**ASKED, **{f"a made-up field {number}": number for number in range(300_000)}}).encode()
    nested = json.dumps({**ASKED, "metadata": {f"{number}": number for number in range(200)}, "pad": " " * (2 << 20)}).encode()
    headers = {"Content-Type": "application/json"}
    with (
        running(serving={"max_body_bytes": 32 << 20}) as served,
        httpx.Client(base_url=served.address, timeout=PATIENCE_S, headers=headers) as http,
    ):
        since_s = time.process_time()
        refused = http.post("/v1/completions", content=many)
        took_s = time.process_time() - since_s
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_fields")
        assert took_s < 1, f"{took_s:.2f} s of CPU time, of this client's too"
        assert http.post("/v1/completions", content=nested).status_code == 200, "fields of fields are not counted"


def test_a_client_that_makes_names_up_keeps_no_name_of_others_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    unknown = UnknownFields(clock)
    for number in range(5000):
        unknown.note([f"made-up-{number}"], "noisy")
    assert 0 < len(caplog.records) < 100
    caplog.clear()
    for _ in range(3):
        unknown.note(["a_new_field"], "quiet")
    assert ["a_new_field" in each for each in caplog.messages] == [True]
    clock.advance(60.0)
    unknown.note(["made-up-4999", "a_new_field"], "noisy")
    assert ["made-up-4999" in each for each in caplog.messages] == [False, True], "each is named once, if it is sent again"


def test_a_body_without_a_model_is_for_the_one_that_is_served(http: httpx.Client, served: Running) -> None:
    assert http.post("/v1/completions", json=ASKED).json()["model"] == NAME
    assert http.post("/v1/chat/completions", json=CHAT).json()["model"] == NAME
    made = http.post("/v1/responses", json={"input": "Deep?", "max_output_tokens": 30, "temperature": 0.5}).json()
    assert (made["model"], made["temperature"], made["top_p"]) == (NAME, 0.5, 1.0)
    assert (made["completed_at"] is None) == (made["status"] != "completed")
    ended = http.post("/v1/responses", json={"input": "Deep?", "max_output_tokens": 30, "stop": ["e", "a", "o", " "]}).json()
    assert ended["status"] != "completed" or ended["completed_at"] >= ended["created_at"]
