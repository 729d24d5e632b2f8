"""Requests that cannot be served get an error in OpenAI's form, and disturb no other request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from server.serving import CONTEXT, MAX_BODY, NAME, Running, running
from waiting import PATIENCE_S

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}

BAD: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["fine", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5, 2]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, None),
    (COMPLETIONS, {"prompt": [260]}, None),
    (COMPLETIONS, {"prompt": [10**30]}, None),
    (COMPLETIONS, {"prompt": ["x"] * 65}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 9, "n": 8}, "n"),
    (COMPLETIONS, {"prompt": "x" * CONTEXT}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": CONTEXT}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "12"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 1000}, "n"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**63}, "seed"),
    (COMPLETIONS, {"prompt": "x", "seed": -(2**63) - 1}, "seed"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["s"] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "echo": "yes"}, "echo"),
    (COMPLETIONS, {"prompt": [1, 2**40], "echo": True}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty"),
    (COMPLETIONS, {"prompt": "x", "presence_penalty": -3}, "presence_penalty"),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "x", "min_p": 1.1}, "min_p"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"one": 2}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": "2"}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"260": 1}}, None),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [260]}, None),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [-1]}, None),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * 129}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHATS, HELLO | {"continue_final_message": True}, "continue_final_message"),
    (CHATS, HELLO | {"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    (CHATS, HELLO | {"echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "x", "priority": -1}, "priority"),
    (COMPLETIONS, {"prompt": "x", "priority": 1}, "priority"),
    (COMPLETIONS, {"prompt": "x", "priority": 1000}, "priority"),
    (COMPLETIONS, {"prompt": "x", "use_cache": "no"}, "use_cache"),
    (COMPLETIONS, {"prompt": "half \ud800"}, "prompt"),
    (COMPLETIONS, {"prompt": ["whole", "\udfff half"]}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "stop": "\ud800"}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["whole", "\ud83d"]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "cache_ttl_s": 0}, "cache_ttl_s"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "\ud800"}, "cache_salt"),
    (CHATS, {}, "messages"),
    (CHATS, {"messages": []}, "messages"),
    (CHATS, {"messages": ["Hello"]}, "messages"),
    (CHATS, {"messages": [{"content": "no role"}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": 7}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
    (CHATS, {"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages"),
    (CHATS, {"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": "half \ud83d"}]}, "messages"),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, "messages"),
    (CHATS, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, "messages"),
    (CHATS, HELLO | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHATS, HELLO | {"top_logprobs": 2}, "top_logprobs"),
    (CHATS, HELLO | {"response_format": {"type": "xml"}}, "response_format"),
    (CHATS, HELLO | {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHATS, HELLO | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
    (COMPLETIONS, {"prompt": "x", "guided_regex": "(a"}, "guided_regex"),
    (COMPLETIONS, {"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    (COMPLETIONS, {"prompt": "x", "guided_choice": []}, "guided_choice"),
    (COMPLETIONS, {"prompt": "x", "guided_choice": ["a", ""]}, "guided_choice"),
    (COMPLETIONS, {"prompt": "x", "guided_grammar": "start: b"}, "guided_grammar"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regexp": "a"}}, "structured_outputs"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": 7}}, "structured_outputs"),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"json": {"enum": ["x" * (1 << 17)]}}}, "structured_outputs"),
    (CHATS, HELLO | {"tool_choice": "required", "tools": [{}]}, "tools"),
    (CHATS, HELLO | {"tool_choice": "required"}, "tool_choice"),
    (CHATS, HELLO | {"tool_choice": "any", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
    (CHATS, HELLO | {"tool_choice": {"type": "function", "function": {"name": "g"}},
                     "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
]  # fmt: skip


@pytest.fixture(scope="module")
def others(served: Running) -> Iterator[None]:
    """A long answer to another client, which must come out whole whatever happens at the same time."""
    with served.client() as client, ThreadPoolExecutor(1) as threads:
        expected = _long_answer(client)
        running = threads.submit(lambda: [_long_answer(client) for _ in range(3)])
        yield
        assert running.result() == [expected] * 3
        served.audit()


def _long_answer(client: openai.OpenAI) -> str:
    return client.completions.create(model=NAME, prompt="A long one.", max_tokens=200, temperature=0).choices[0].text


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_bad_bodies_are_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str | None) -> None:
    sent = json.dumps({"model": NAME} | body)
    response = http.post(path, content=sent, headers={"content-type": "application/json"})
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert error["message"]


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}'])
def test_bodies_that_are_no_json_objects_are_refused(http: httpx.Client, content: bytes) -> None:
    response = http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


def test_forms_of_other_pages_are_refused(http: httpx.Client) -> None:
    """A page in another user's browser can post text without asking first, but not JSON."""
    body = json.dumps({"model": NAME, "prompt": "x"})
    assert http.post(COMPLETIONS, content=body, headers={"content-type": "text/plain"}).status_code == 400
    assert http.post(COMPLETIONS, content=body).status_code == 400


def test_too_long_a_prompt_says_so_in_a_way_clients_know(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"exceed the {CONTEXT}") as caught:
        client.completions.create(model=NAME, prompt="x" * CONTEXT)
    assert caught.value.code == "context_length_exceeded"


def test_unknown_models_are_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny") as caught:
        client.completions.create(model="gpt-5", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def test_a_name_that_cannot_be_encoded_is_not_found_either(http: httpx.Client) -> None:
    body = b'{"model": "\\ud800", "prompt": "x"}'
    response = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"


def test_unknown_routes_are_not_found(http: httpx.Client) -> None:
    error = error_of(http.get("/v1/nothing"))
    assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_url")
    assert "GET /v1/nothing" in error["message"] and "/v1" in error_of(http.post("/chat/completions"))["message"]
    wrong = http.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"], error_of(wrong)["code"]) == (405, "POST", "method_not_allowed")
    assert http.get("/docs").status_code == http.get("/openapi.json").status_code == 404


@pytest.mark.usefixtures("others")
def test_huge_bodies_are_refused(http: httpx.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=NAME, prompt="x" * 2 * MAX_BODY)
    assert caught.value.status_code == 413

    def pieces() -> Iterator[bytes]:  # with no length said in advance
        yield b'{"model": "tiny", "prompt": "'
        for _ in range(20):
            yield b"x" * (MAX_BODY // 10)

    response = http.post(COMPLETIONS, content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413 and "1.0 MiB" in error_of(response)["message"]
    assert error_of(response)["code"] == "body_too_large"


def test_a_connection_whose_body_nobody_waits_for_is_closed(served: Running) -> None:
    address = httpx.URL(served.address)
    head = f"POST /nothing/here HTTP/1.1\r\nHost: {address.host}\r\nContent-Length: 1000\r\n\r\nsome of it"
    with socket.create_connection((address.host, address.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode())
        answer = b""
        while piece := connection.recv(4096):  # until the server closes it
            answer += piece
    assert answer.startswith(b"HTTP/1.1 404 ") and b"connection: close" in answer.lower()


def test_fields_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hello", "name": "a-friend"}],
        max_tokens=3,
        user="u",
        metadata={"a": "b"},
        store=False,
        frequency_penalty=0,
        presence_penalty=None,
        response_format={"type": "text"},
        tool_choice="auto",
        parallel_tool_calls=True,
        prompt_cache_key="k",
        extra_body={"something_new": [1], "top_k": -1, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 3


def test_fields_that_nobody_knows_are_said_once_in_the_log(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": NAME, "prompt": "x", "max_tokens": 1, "user": "u", "min_p": 0.0}
    with caplog.at_level("WARNING", logger="stepwell.server.api.requests"):
        for _ in range(3):
            assert http.post(COMPLETIONS, json=body | {"use_cash": False}).status_code == 200
        names = [f"{number}{'long' * 40}" for number in range(60)]  # are the client's to choose, and the log is not
        assert http.post(COMPLETIONS, json=body | dict.fromkeys(names, 1)).status_code == 200
    said = [record.getMessage() for record in caplog.records]
    assert sum("'use_cash'" in each for each in said) == 1 and not any("'user'" in each or "min_p" in each for each in said)
    assert 1 < len(said) < 60 and max(map(len, said)) < 200


def test_priorities_above_the_server_s_bound_are_refused(http: httpx.Client) -> None:
    body = {"model": NAME, "prompt": "x", "max_tokens": 1}
    refused = http.post(COMPLETIONS, json=body | {"priority": 1})
    assert refused.status_code == 400 and "--max-priority 1" in error_of(refused)["message"]
    assert http.post(COMPLETIONS, json=body | {"priority": 0}).status_code == 200
    with running(max_priority=3) as made, httpx.Client(base_url=made.address, timeout=60) as other:
        statuses = [other.post(COMPLETIONS, json=body | {"priority": priority}).status_code for priority in (3, 4, 11)]
    assert statuses == [200, 400, 400]
