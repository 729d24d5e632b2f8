"""What a server logs of requests: where their tokens came from and how long they took. Never what they say."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from server.serving import ADMIN, NAME, Held, Running, running
from stepwell.server.access.tenants import Principal, Tenant
from stepwell.server.monitoring.log_lines import _Json, _Text
from waiting import PATIENCE_S, wait_until

KEY = "a key of alice, and hers"
SECRET = "Xylophone-quark-7731"
PROMPT = f"The password of the vault is {SECRET}, and it stays between the two of us."


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    alice = Tenant(principal=Principal(name="alice"), key_sha256=hashlib.sha256(KEY.encode()).digest())
    with running(tenants=[alice]) as made:
        yield made


@pytest.fixture
def client(served: Running, caplog: pytest.LogCaptureFixture) -> Iterator[openai.OpenAI]:
    caplog.set_level(logging.DEBUG, logger="stepwell")
    with served.client(KEY) as made:
        yield made


def ended(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [dict(each.fields) for each in caplog.records if each.getMessage() == "request ended"]  # type: ignore[attr-defined]


def test_a_request_that_ends_is_one_line_with_the_numbers_its_client_has(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, temperature=0) for _ in range(2)]
    for answer, line in zip(answers, ended(caplog), strict=True):
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert (line["id"], line["tenant"], line["finish"]) == (answer.id, "alice", "length")
        assert (line["prompt_tokens"], line["output_tokens"]) == (answer.usage.prompt_tokens, 5)
        cached = line["device_tokens"] + line["host_tokens"] + line["store_tokens"]
        assert cached == answer.usage.prompt_tokens_details.cached_tokens
        assert cached + line["computed_tokens"] == line["prompt_tokens"]
        assert 0 < line["first_token_s"] <= line["total_s"]
    assert ended(caplog)[0]["device_tokens"] == 0 < ended(caplog)[1]["device_tokens"]


def test_each_of_several_answers_has_a_line_that_says_which(client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, n=2, max_tokens=2)
    assert sorted((line["id"], line["choice"]) for line in ended(caplog)) == [(answer.id, 0), (answer.id, 1)]


def test_a_client_that_leaves_is_a_line_too(served: Running, client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    with Held(served):
        stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=50, stream=True)
        stream.close()
        wait_until(lambda: len(ended(caplog)) == 1)
    line = ended(caplog)[0]
    assert (line["finish"], line["output_tokens"]) == ("abort", 0) and "computed_tokens" not in line


def test_an_error_is_a_line_that_says_to_whom_and_not_why(
    served: Running, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S, headers={"Authorization": f"Bearer {KEY}"}) as http:
        http.post("/v1/completions", json={"model": NAME, "prompt": PROMPT, "max_tokens": SECRET})
        http.post("/v1/completions", json={"model": NAME, "prompt": PROMPT}, headers={"Authorization": "Bearer of nothing"})
        http.get(f"/nothing{'/here' * 100}", params={"why": SECRET})
        http.get("/health")
    lines = [dict(each.fields) for each in caplog.records if each.getMessage() == "error sent"]  # type: ignore[attr-defined]
    assert [(line["method"], line["status"], line.get("tenant")) for line in lines] == [
        ("POST", 400, "alice"), ("POST", 401, None), ("GET", 404, None),
    ]  # fmt: skip
    assert lines[0]["path"] == "/v1/completions" and lines[0]["total_s"] >= 0
    assert lines[2]["path"].startswith("/nothing/here") and len(lines[2]["path"]) == 100
    assert SECRET not in str(lines)


def test_probes_of_a_server_that_stops_are_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="stepwell")
    with running() as served, httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http, Held(served) as held:
        stream = served.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=2, stream=True)
        served.server.stop()
        assert http.get("/ready").status_code == 503
        assert http.get("/cache").status_code == 503
        held.let_go()
        assert list(stream)
    lines = [each.fields["path"] for each in caplog.records if each.getMessage() == "error sent"]  # type: ignore[attr-defined]
    assert lines == ["/cache"]


def test_no_line_ever_has_a_prompt_or_an_answer(
    served: Running, client: openai.OpenAI, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0)
    said = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": PROMPT}], max_tokens=24)
    for piece in client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, stream=True, stop=[SECRET]):
        assert piece.id
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=served.address, timeout=PATIENCE_S, headers=headers) as http:
        body = {"model": NAME, "prompt": PROMPT}
        assert http.post("/v1/completions", json=body | {"max_tokens": SECRET}).status_code == 400
        assert http.post("/v1/completions", json=body | {"prompt": {"text": PROMPT}}).status_code == 400
        assert http.post("/v1/completions", content=f'{{"prompt": "{PROMPT}').status_code == 400
        assert http.post("/v1/completions", json=body | {"response_format": {"type": SECRET}}).status_code == 400
        assert http.post("/v1/completions", json=body | {"prompt": PROMPT * 100}).status_code == 400
        assert http.post("/v1/chat/completions", json={"model": NAME, "messages": PROMPT}).status_code == 400
        admin = {"Authorization": f"Bearer {ADMIN}"}
        assert http.post("/cache/explain", json={"prompt": PROMPT, "tenant": "alice"}, headers=admin).status_code == 200
        monkeypatch.setattr(served.engine.passing, "compute", _broken)
        assert http.post("/v1/completions", json=body).status_code == 500
    assert "a pass failed" in caplog.messages and len(ended(caplog)) == 4
    forms = _Text(), _Json()
    lines = "\n".join(form.format(record) for record in caplog.records for form in forms)
    assert answer.choices[0].text.strip() and said.choices[0].message.content
    for text in (SECRET, PROMPT[:20], answer.choices[0].text, said.choices[0].message.content):
        assert text not in lines, re.findall(f".*{re.escape(text)}.*", lines)


def _broken(chunks: object) -> None:
    raise RuntimeError("a device that failed")
