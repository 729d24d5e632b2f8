"""Spans of requests: what they are made of, whose children they are, and that no collector holds a request up."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from server.serving import NAME, Running, running
from stepwell.base.errors import ConfigError
from stepwell.base.extras import install
from stepwell.base.meters import SystemClock
from stepwell.cli import otlp
from stepwell.engine.engine import Engine
from stepwell.server.monitoring.tracing import Traces, _Once, spans_to
from waiting import PATIENCE_S, wait_until

SECRET = "no one but the engine may read this"
PROMPT = f"{SECRET}. " * 6
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


class Spans:
    """Everything a server reported about its requests."""

    def __init__(self, exporter: InMemorySpanExporter, http: httpx.Client) -> None:
        self._exporter, self.http = exporter, http

    def ask(self, headers: dict[str, str] | None = None, **more: object) -> dict[str, ReadableSpan]:
        """The spans of one request, by name."""
        self._exporter.clear()
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True} | more
        self.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
        return {span.name: span for span in self.found("request")}

    def found(self, last: str, count: int = 1) -> Sequence[ReadableSpan]:
        """All spans, once `count` of one name are there; a request's own ends behind its parts."""
        wait_until(lambda: sum(each.name == last for each in self._exporter.get_finished_spans()) >= count)
        return self._exporter.get_finished_spans()


@contextmanager
def traced(**settings: object) -> Iterator[tuple[Spans, Running]]:
    exporter, clock = InMemorySpanExporter(), SystemClock()
    traces = Traces(SimpleSpanProcessor(exporter), model=NAME, clock=clock, environment={})
    with (
        running(serving={"traces": traces}, **settings) as served,
        httpx.Client(base_url=served.address, timeout=PATIENCE_S) as http,
    ):
        yield Spans(exporter, http), served


@pytest.fixture(scope="module")
def spans() -> Iterator[Spans]:
    with traced() as (made, _):
        yield made


def lasted_s(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_one_span_with_its_parts_below_it_in_order(spans: Spans) -> None:
    found = spans.ask(cache_salt="parts")
    assert found.keys() == {"request", "lookup", "prefill", "decode"}  # nothing to fetch, nothing to load
    request = found["request"]
    assert request.parent is None and lasted_s(request) < PATIENCE_S
    at = request.start_time
    for name in ("lookup", "prefill", "decode"):
        part = found[name]
        assert part.parent == request.context and part.context.trace_id == request.context.trace_id
        assert at <= part.start_time <= part.end_time <= request.end_time
        at = part.end_time


def test_token_counts_by_source_are_attributes(spans: Spans) -> None:
    cold, warm = (spans.ask(cache_salt="sources")["request"].attributes for _ in range(2))
    prompt = cold["gen_ai.usage.input_tokens"]
    assert cold["stepwell.computed_tokens"] == prompt and cold["gen_ai.usage.output_tokens"] == 5
    assert warm["stepwell.device_tokens"] > prompt / 2
    assert sum(warm[f"stepwell.{source}_tokens"] for source in ("device", "host", "store", "computed")) == prompt
    assert cold["gen_ai.response.finish_reasons"] == ("length",) and cold["gen_ai.response.id"].startswith("cmpl-")


def test_no_span_has_the_text_of_a_prompt_or_an_answer(spans: Spans) -> None:
    found = spans.ask(cache_salt=f"salt {SECRET}", stop=[SECRET])
    assert SECRET not in "".join(span.to_json() for span in found.values())


def test_the_clients_span_is_the_parent_and_a_broken_header_is_none(spans: Spans) -> None:
    found = spans.ask(CLIENT)
    assert f"{found['request'].context.trace_id:032x}" == TRACE and f"{found['request'].parent.span_id:016x}" == SPAN
    assert f"{found['decode'].context.trace_id:032x}" == TRACE
    for broken in ("", "00-zz-zz-01", "x" * 5000):
        assert spans.ask({"traceparent": broken})["request"].parent is None


def test_a_client_that_does_not_sample_gets_no_spans(spans: Spans) -> None:
    spans._exporter.clear()
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 2}
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    spans.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
    assert spans.ask()["request"].context.trace_id != int(TRACE, 16)
    assert all(span.context.trace_id != int(TRACE, 16) for span in spans.found("request"))


def test_chats_responses_and_each_of_several_answers_have_spans(spans: Spans) -> None:
    said = [{"role": "user", "content": "Hello"}]
    spans._exporter.clear()
    spans.http.post("/v1/chat/completions", json={"model": NAME, "messages": said, "max_tokens": 2, "n": 2}).raise_for_status()
    spans.http.post("/v1/responses", json={"model": NAME, "input": "Hello", "max_output_tokens": 2}).raise_for_status()
    found = [span.attributes for span in spans.found("request", 3) if span.name == "request"]
    assert sorted(str(each.get("stepwell.choice")) for each in found) == ["0", "1", "None"]
    assert {each["gen_ai.response.id"].partition("-")[0].partition("_")[0] for each in found} == {"chatcmpl", "resp"}


def test_what_comes_from_the_store_has_a_prefetch_and_what_comes_up_a_load(tmp_path: Path) -> None:
    with traced(store=f"log:{tmp_path}", store_options={"budget": "64MiB"}) as (spans, served):
        assert "load" not in spans.ask()

        def stored(engine: Engine) -> bool:
            return not engine.num_open and not engine.cache.stats().pending and not engine.cache.stats().deferred

        served.settle(stored)
        served.on_engine(lambda engine: engine.cache.flush())
        found = spans.ask()
        assert found.keys() == {"request", "lookup", "prefetch", "load", "prefill", "decode"}
        stored_tokens = found["request"].attributes["stepwell.store_tokens"]
        assert stored_tokens > 0 and found["prefetch"].attributes == {"stepwell.store_tokens": stored_tokens}
        assert found["load"].attributes["stepwell.store_tokens"] == stored_tokens
        assert found["prefetch"].end_time <= found["load"].start_time <= found["load"].end_time <= found["prefill"].end_time


def test_a_client_that_leaves_ends_its_span() -> None:
    with traced() as (spans, _):
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with spans.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        found = {span.name: span for span in spans.found("request")}
        assert found["request"].attributes["gen_ai.response.finish_reasons"] == ("abort",)


# ---- over HTTP --------------------------------------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """What OpenTelemetry sends, as a collector would get it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def names(self) -> list[str]:
        return [span.name for each in self.got for one in each.resource_spans for two in one.scope_spans for span in two.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        self.server.got.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


def ask_once(traces: Traces) -> None:
    with running(serving={"traces": traces}) as served:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 3}
        httpx.post(f"{served.address}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_a_collector_gets_spans_by_the_end_of_the_server(path: str) -> None:
    with collecting() as collector:
        ask_once(Traces(spans_to(collector.address + path), model=NAME, clock=SystemClock(), environment={}))
        assert sorted(collector.names()) == ["decode", "lookup", "prefill", "request"] and set(collector.paths) == {"/v1/traces"}
        names = {each.key: each.value.string_value for each in collector.got[0].resource_spans[0].resource.attributes}
        assert names["service.name"] == "stepwell" and SECRET not in str(collector.got)


def test_what_a_collector_decodes_has_names_parents_times_and_attributes() -> None:
    """What `--otlp-endpoint` sends, read with OpenTelemetry's own messages, as the standard's receivers read it."""
    with collecting() as collector:
        options = Namespace(otlp_endpoint=collector.address)
        traces = otlp.open_traces(options, {}, model=NAME, clock=SystemClock())
        with running(serving={"traces": traces}) as served:
            body = {"model": NAME, "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
            httpx.post(f"{served.address}/v1/completions", json=body, headers=CLIENT, timeout=PATIENCE_S).raise_for_status()
        sent = [scope for each in collector.got for resource in each.resource_spans for scope in resource.scope_spans]
    spans = {span.name: span for scope in sent for span in scope.spans}
    assert spans.keys() == {"request", "lookup", "prefill", "decode"} and {scope.scope.name for scope in sent} == {"stepwell"}
    request = spans.pop("request")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, SPAN) and request.kind == request.SPAN_KIND_SERVER
    for part in spans.values():
        assert (part.trace_id, part.parent_span_id) == (request.trace_id, request.span_id) and part.span_id != request.span_id
        assert request.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano <= request.end_time_unix_nano
    reported = {each.key: each.value for each in request.attributes}
    assert reported["gen_ai.request.model"].string_value == NAME and reported["gen_ai.usage.output_tokens"].int_value == 3
    assert reported["stepwell.computed_tokens"].int_value == reported["gen_ai.usage.input_tokens"].int_value > 0
    assert [each.string_value for each in reported["gen_ai.response.finish_reasons"].array_value.values] == ["length"]


class Failing(SpanExporter):
    """Fails, raises or succeeds, as the test says."""

    def __init__(self) -> None:
        self.result: SpanExportResult | Exception = SpanExportResult.FAILURE

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_spans_that_cannot_be_sent_are_one_warning_until_they_can_be(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    once = _Once(failing)

    def said() -> list[str]:
        found = [record.levelname for record in caplog.records]
        caplog.clear()
        return found

    with caplog.at_level(logging.INFO):
        assert [once.export([]) for _ in range(3)] == [SpanExportResult.FAILURE] * 3 and said() == ["WARNING"]
        failing.result = RuntimeError("a bug of the exporter")
        assert once.export([]) is SpanExportResult.FAILURE and said() == []
        failing.result = SpanExportResult.SUCCESS
        assert [once.export([]) for _ in range(2)] == [SpanExportResult.SUCCESS] * 2 and said() == ["INFO"]
        failing.result = RuntimeError("again")
        assert [once.export([]) for _ in range(2)] == [SpanExportResult.FAILURE] * 2 and said() == ["WARNING"]


def test_a_collector_that_is_gone_costs_one_warning_and_no_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # for which one batch is tried again
    with collecting() as collector:
        gone = collector.address
    processor = spans_to(gone)
    hostile = {"traceparent": CLIENT["traceparent"], "tracestate": SECRET}  # which OpenTelemetry would log
    with (
        caplog.at_level(logging.INFO),
        running(serving={"traces": Traces(processor, model=NAME, clock=SystemClock(), environment={})}) as served,
    ):
        for _ in range(3):
            body = {"model": NAME, "prompt": PROMPT, "max_tokens": 3}
            httpx.post(f"{served.address}/v1/completions", json=body, headers=hostile, timeout=PATIENCE_S).raise_for_status()
            processor.force_flush(100)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "spans cannot be sent" in warnings[0] and SECRET not in caplog.text


def test_the_service_is_called_what_the_standard_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(**environment: str) -> object:
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        traces = Traces(SimpleSpanProcessor(InMemorySpanExporter()), model=NAME, clock=SystemClock(), environment=environment)
        return traces._provider.resource.attributes["service.name"]

    assert name() == "stepwell"
    assert name(OTEL_RESOURCE_ATTRIBUTES="host.name=here,service.name=wells") == "wells"
    assert name(OTEL_SERVICE_NAME="water") == "water"


# ---- which options turn it on ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environment", "where"),
    [
        (None, {}, None),
        ("http://one:4318", {}, "http://one:4318"),
        ("http://user:word@one:4318", {}, "http://one:4318"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:word@[::1"}, "http://[::1"),  # costs a warning, not the server
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two:4318"}, "http://two:4318"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://three"},
            "http://three",
        ),
        ("http://one:4318", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two:4318"}, "http://one:4318"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two", "OTEL_SDK_DISABLED": "true"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://two", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_the_option_or_the_standard_variables_say_where_spans_go(
    given: str | None, environment: dict[str, str], where: str | None
) -> None:
    assert otlp.summary(Namespace(otlp_endpoint=given), environment) == ([] if where is None else [("spans", where)])


@pytest.mark.parametrize("wrong", ["", "localhost:4318", "grpc://one:4317", "http://", "http://[::1", "http://one:port"])
def test_an_endpoint_that_is_no_address_is_refused_before_weights_are_read(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be a URL"):
        otlp.check(Namespace(otlp_endpoint=wrong))


WITHOUT = """
import sys
from argparse import Namespace
sys.modules["opentelemetry.sdk"] = sys.modules["opentelemetry.exporter"] = None
from stepwell.base.errors import ConfigError
from stepwell.base.meters import SystemClock
from stepwell.cli import otlp
import stepwell.server.running
assert otlp.open_traces(Namespace(otlp_endpoint=None), {}, model="x", clock=SystemClock()) is None
there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
assert otlp.open_traces(Namespace(otlp_endpoint=None), there, model="x", clock=SystemClock()) is None
assert otlp.summary(Namespace(otlp_endpoint=None), there) == []
try:
    otlp.check(Namespace(otlp_endpoint="http://127.0.0.1:1"))
except ConfigError as error:
    print(error)
"""


def test_without_the_extra_the_server_runs_and_the_option_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert install("otel") in done.stdout and install("otel") in done.stderr
