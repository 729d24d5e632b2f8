"""OpenTelemetry spans: one per request, with child spans for its phases. The only file that imports OpenTelemetry.

    request   |----------------------------------------------------------|   from arrival to the end of the answer
    lookup      |-|                                                          the prompt is looked up
    prefetch      |-------|                                                  waiting for the store
    load                     |----|                                          copies from the host
    prefill                       |-------------|                            to the first token
    decode                                      |-------------------------|

Spans are made from the `Usage` of a request that ended, like the log and the metrics. They hold numbers and names, never text of
a prompt or an answer. A thread sends them from a bounded queue, so that a slow or missing collector delays no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from threading import Thread

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from stepwell import __version__
from stepwell.base.meters import Clock
from stepwell.engine.requests.request import Delta, Finish, GenerateRequest, Usage

CLOSE_S = 5.0  # longest wait for the last spans at shutdown
_PATH = "/v1/traces"
# These loggers would write a line for each failed attempt, or for each malformed header of a client.
_LOUD = ("opentelemetry.exporter", "opentelemetry.sdk.trace.export", "opentelemetry.sdk._shared_internal", "opentelemetry.trace")

Ended = Callable[["int | None", GenerateRequest, Delta], None]

log = logging.getLogger(__name__)
_propagator = TraceContextTextMapPropagator()


def spans_to(endpoint: str | None) -> SpanProcessor:
    """Sends spans to a collector over HTTP, in batches. Without an endpoint, the `OTEL_*` variables name it."""
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    where = None if endpoint is None else endpoint.rstrip("/").removesuffix(_PATH) + _PATH
    return BatchSpanProcessor(_Once(OTLPSpanExporter(endpoint=where)))


class Traces:
    """Makes spans of requests that have ended. Any thread. Call `close` once, at the end."""

    def __init__(self, processor: SpanProcessor, *, model: str, clock: Clock, environment: Mapping[str, str]) -> None:
        """`clock` is the engine's."""
        named = environment.get("OTEL_SERVICE_NAME") or f"{SERVICE_NAME}=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
        name = {} if named else {SERVICE_NAME: "stepwell"}
        self._provider = TracerProvider(resource=Resource.create({**name, SERVICE_VERSION: __version__}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("stepwell", __version__)
        self._model, self._clock = model, clock

    def listener(self, request: str, headers: Mapping[str, str]) -> Ended:
        """Returns a callback for an answer that ended: its choice (if there are several), request and last delta. `request`
        is the id in responses and log. The parent is the client's span, if `traceparent` names one.
        """
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = _propagator.extract(given, Context())
        return lambda choice, ask, delta: self._ended(request, choice, ask, delta, parent)

    def _ended(self, request: str, choice: int | None, ask: GenerateRequest, delta: Delta, parent: Context) -> None:
        usage = delta.usage
        if usage is None:
            return  # the engine has died
        since_s = usage.total_s if ask.arrived_s is None else self._clock.now() - ask.arrived_s
        arrived_ns = time.time_ns() - round(since_s * 1e9)
        span = self._tracer.start_span(
            "request", parent, SpanKind.SERVER, self._attributes(request, choice, ask, delta, usage), start_time=arrived_ns
        )
        if delta.finish in (Finish.FAILED, Finish.LATE):
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span, parent)
        for name, begin_s, end_s, attributes in _parts(usage):
            part = self._tracer.start_span(name, inside, attributes=attributes, start_time=arrived_ns + round(begin_s * 1e9))
            part.end(arrived_ns + round(max(end_s, begin_s) * 1e9))
        span.end(arrived_ns + round(usage.total_s * 1e9))

    def close(self) -> None:
        """Sends the remaining spans, for CLOSE_S at most."""
        thread = Thread(target=self._provider.shutdown, name="stepwell-spans", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _attributes(
        self, request: str, choice: int | None, ask: GenerateRequest, delta: Delta, usage: Usage
    ) -> dict[str, AttributeValue]:  # fmt: skip
        found: dict[str, AttributeValue] = {
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request,
            "gen_ai.response.finish_reasons": [(delta.finish or Finish.FAILED).value],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "stepwell.preemptions": usage.preemptions,
        }
        if usage.completion_tokens:  # otherwise the prompt has no sources
            found |= {f"stepwell.{source}_tokens": count for source, count in asdict(usage.sources).items()}
        if choice is not None:
            found["stepwell.choice"] = choice
        if ask.tenant is not None:
            found["stepwell.tenant"] = ask.tenant
        return found


def _parts(usage: Usage) -> Iterator[tuple[str, float, float, dict[str, AttributeValue]]]:
    """The phases that a request reached, in seconds after its arrival."""
    sources, end_s = usage.sources, usage.total_s
    if usage.looked_up_s is not None:
        yield "lookup", usage.entered_s, usage.looked_up_s, {}
        if usage.fetched_s is not None:
            yield "prefetch", usage.looked_up_s, usage.fetched_s, {"stepwell.store_tokens": sources.store}
    if usage.computes_s is None:
        return
    if usage.computes_s > usage.queued_s and sources.host + sources.store:
        loaded: dict[str, AttributeValue] = {"stepwell.host_tokens": sources.host, "stepwell.store_tokens": sources.store}
        yield "load", usage.queued_s, usage.computes_s, loaded
    answered = bool(usage.completion_tokens)
    prefilled_s = usage.first_token_s if answered else end_s
    yield "prefill", usage.computes_s, prefilled_s, {"stepwell.computed_tokens": sources.computed}
    if answered:
        yield "decode", prefilled_s, end_s, {"gen_ai.usage.output_tokens": usage.completion_tokens}


class _Once(SpanExporter):
    """Logs once that spans cannot be sent, and once that they can be sent again."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result, why = self._inner.export(spans), "see the collector's log"
        except Exception as error:  # the worker boundary: only spans are lost
            result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._fails:
            log.warning("spans cannot be sent and are dropped: %s", why)
        elif self._fails and not failed:
            log.info("spans are sent again")
        self._fails = failed
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)
