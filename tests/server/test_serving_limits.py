"""Limits that operators set: how long a request may be, how long an answer is where none is asked for, how long it may take."""

from __future__ import annotations

import logging
import threading

import httpx
import openai
import pytest

from server.serving import NAME, Held, Running, running, tiny_checkpoint
from stepwell.base.errors import ConfigError
from stepwell.engine.building.build import build_engine
from stepwell.engine.building.settings import EngineConfig
from stepwell.engine.loading.chat import ChatTemplate
from waiting import PATIENCE_S

SHORT_S = 0.3
MESSAGES = [{"role": "user", "content": "Hi"}]


def ask(served: Running, *, path: str = "/v1/completions", **body: object) -> httpx.Response:
    body = {"model": NAME, "ignore_eos": True, **body}
    return httpx.post(served.address + path, json=body, timeout=PATIENCE_S)


# ---- length ---------------------------------------------------------------------------------------


def test_requests_beyond_the_longest_are_refused_and_those_up_to_it_are_answered() -> None:
    with running(max_context=64) as served:
        whole = ask(served, prompt=[65] * 40, max_tokens=24).json()
        assert whole["usage"]["total_tokens"] == 64
        refused = ask(served, prompt=[65] * 40, max_tokens=25)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert "the 64 that this server can hold" in refused.json()["error"]["message"]
        chat = ask(served, path="/v1/chat/completions", messages=MESSAGES).json()
        assert chat["usage"]["total_tokens"] == 64  # the most that fits
        assert httpx.get(f"{served.address}/v1/models").json()["data"][0]["max_model_len"] == 64


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_context": 100_000}, "made for 2048 at most"),
        ({"max_context": 2048, "device_memory": "256KiB"}, "device memory holds a request of"),
    ],
)
def test_a_length_that_cannot_be_had_is_refused_at_the_start(settings: dict[str, object], says: str) -> None:
    config = EngineConfig(device="cpu", page_tokens=16, host_memory="1MiB", **{"device_memory": "8MiB", **settings})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        build_engine(tiny_checkpoint(), config)


def test_answers_have_the_default_length_where_requests_do_not_say() -> None:
    with running(max_context=64, serving={"default_max_tokens": 20}) as served:
        counts = [
            ask(served, prompt="x").json()["usage"]["completion_tokens"],
            ask(served, path="/v1/chat/completions", messages=MESSAGES).json()["usage"]["completion_tokens"],
            ask(served, prompt="x", max_tokens=3).json()["usage"]["completion_tokens"],
            ask(served, prompt="x", min_tokens=30).json()["usage"]["completion_tokens"],
            ask(served, prompt=[65] * 50).json()["usage"]["completion_tokens"],  # what fits
        ]
        assert counts == [20, 20, 3, 30, 14]


# ---- time -----------------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_ends_with_a_clear_error_and_leaves_nothing() -> None:
    with running(serving={"request_timeout_s": SHORT_S}) as served:
        with Held(served):
            late = ask(served, prompt="Wait.", n=2)
            assert late.status_code == 504
            error = late.json()["error"]
            assert error["code"] == "request_timeout" and "--request-timeout" in error["message"]
            served.settle(lambda engine: engine.num_open == 0)
        assert served.on_engine(lambda engine: len(engine.scheduler.waiting) + len(engine.scheduler.active)) == 0
        served.audit()


def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    with running(serving={"request_timeout_s": SHORT_S}) as served, Held(served), served.client() as client:
        with pytest.raises(openai.APIError, match="took longer than the"):
            list(client.completions.create(model=NAME, prompt="Wait.", max_tokens=5, stream=True))
        served.audit()


def test_an_answer_under_way_is_ended_when_its_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="stepwell")
    with running(serving={"request_timeout_s": 3.0}) as served:
        step = served.engine.step

        def slowly() -> object:
            served.engine.clock.sleep(0.02)  # so that no machine is fast enough for 1,900 tokens
            return step()

        served.engine.step = slowly  # type: ignore[method-assign, assignment]
        late = ask(served, prompt="Go on.", max_tokens=1900, stream=True)
        assert late.status_code == 200 and late.text.count('"text"') > 1  # tokens came
        assert '"code":"request_timeout"' in late.text and "[DONE]" not in late.text
        served.audit()
        page = httpx.get(f"{served.address}/metrics", timeout=PATIENCE_S).text
    for outcome, count in (("timeout", 1), ("abort", 0)):
        assert f'stepwell_requests_total{{outcome="{outcome}",tenant=""}} {count}.0' in page
    assert 'stepwell_http_errors_total{status="504"} 1.0' in page, "though the stream began with 200"
    lines = {each.getMessage(): each.fields for each in caplog.records if hasattr(each, "fields")}
    assert lines["request ended"]["finish"] == "timeout" and lines["error sent"]["status"] == 504


def test_a_request_that_the_engine_has_not_even_taken_ends_in_time_too() -> None:
    with running(serving={"request_timeout_s": SHORT_S}) as served:
        go_on = threading.Event()
        served.server.served.loop.call(lambda engine: go_on.wait(PATIENCE_S))  # as a pass that takes very long
        late = ask(served, prompt="No one hears this.")
        go_on.set()
        assert late.status_code == 504 and late.json()["error"]["code"] == "request_timeout"
        served.audit()


def test_answers_in_time_are_whole_and_nothing_ends_them_later() -> None:
    with running(serving={"request_timeout_s": PATIENCE_S}) as served:
        assert ask(served, prompt="x", max_tokens=4).json()["usage"]["completion_tokens"] == 4


# ---- names and templates --------------------------------------------------------------------------


def test_a_model_answers_to_all_its_names_by_the_one_that_was_used() -> None:
    with running(serving={"aliases": ("other",)}) as served, served.client() as client:
        assert [model.id for model in client.models.list()] == [NAME, "other"]
        assert client.models.retrieve("other").id == "other"
        for name in (NAME, "other"):
            assert client.completions.create(model=name, prompt="x", max_tokens=1).model == name
        with pytest.raises(openai.NotFoundError, match="'tiny', 'other'"):
            client.completions.create(model="third", prompt="x")


def test_another_template_keeps_the_tokens_of_the_model() -> None:
    own = ChatTemplate("{{ bos_token }}own", bos_token="<bos>", eos_token="<eos>")
    other = own.with_source("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert other.render(MESSAGES) == "<bos>Hi<eos>" and own.render(MESSAGES) == "<bos>own"
