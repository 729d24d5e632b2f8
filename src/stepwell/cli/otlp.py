"""Options of `stepwell serve` for tracing. Imports OpenTelemetry only if there is an endpoint."""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from argparse import _ArgumentGroup as ArgumentGroup
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stepwell.base.errors import ConfigError
from stepwell.base.extras import install
from stepwell.base.meters import Clock

if TYPE_CHECKING:
    from stepwell.server.monitoring.tracing import Traces

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MISSING = f"spans need OpenTelemetry, which is not installed: {install('otel')}"


def configure(group: ArgumentGroup) -> None:
    group.add_argument(
        "--otlp-endpoint", metavar="URL",
        help=f"OpenTelemetry collector for spans of requests, as in http://127.0.0.1:4318 (default: {_ENDPOINTS[1]})",
    )  # fmt: skip


def check(args: Namespace) -> None:
    """Raises ConfigError for an invalid endpoint or a missing package, before weights are read."""
    if args.otlp_endpoint is None:
        return
    if not _is_url(args.otlp_endpoint):
        raise ConfigError(f"--otlp-endpoint must be a URL as in http://127.0.0.1:4318, got {args.otlp_endpoint!r:.200}")
    if not _installed():
        raise ConfigError(_MISSING)


def open_traces(args: Namespace, environment: Mapping[str, str], *, model: str, clock: Clock) -> Traces | None:
    """None without an endpoint, or if only the environment names one and OpenTelemetry is not installed."""
    if _where(args, environment) is None:
        return None
    if not _installed():
        log.warning(_MISSING)
        return None
    from stepwell.server.monitoring.tracing import Traces, spans_to

    return Traces(spans_to(args.otlp_endpoint), model=model, clock=clock, environment=environment)


def summary(args: Namespace, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Lines for the start-up summary."""
    where = _where(args, environment)
    if where is None or not _installed():
        return []
    return [("spans", re.sub("//[^/]*@", "//", where))]  # hides a password


def _where(args: Namespace, environment: Mapping[str, str]) -> str | None:
    """The endpoint: the argument, else the standard variables; None without any."""
    if args.otlp_endpoint is not None:
        return str(args.otlp_endpoint)
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    return next((environment[name] for name in _ENDPOINTS if environment.get(name)), None)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a malformed IPv6 address or port
        return False


def _installed() -> bool:
    try:
        import stepwell.server.monitoring.tracing  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "opentelemetry":
            raise
        return False
    return True
