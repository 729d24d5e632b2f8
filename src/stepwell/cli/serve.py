"""`stepwell serve`: a model behind an OpenAI-compatible server, with the cache below it.

Reads arguments and environment, prints a summary, and runs the server. Heavy imports happen on use.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import secrets
import signal
import sys
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from argparse import _ArgumentGroup as ArgumentGroup
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from typing import TYPE_CHECKING

from stepwell.base.config import MAX_PRIORITY
from stepwell.base.errors import ConfigError, StepwellError
from stepwell.base.units import parse_bytes
from stepwell.cli import answer_options, engine_options, handover, kv_events, otlp, serve_summary
from stepwell.cli.command import EXIT_USER_ERROR, Command, with_flags

if TYPE_CHECKING:
    from stepwell.cli.answer_options import AnswerOptions
    from stepwell.engine.building.settings import EngineConfig
    from stepwell.engine.engine import Engine
    from stepwell.server.access.tenants import Secrets, Tenant, TenantsFile

log = logging.getLogger(__name__)

_API_KEY, _ADMIN_TOKEN = "STEPWELL_API_KEY", "STEPWELL_ADMIN_TOKEN"
_OPEN_FILES = 65536
_NO_TEMPLATE = (
    "the model has no chat template: messages are written as 'user: ...' and 'assistant:', and an answer ends where the model "
    "begins another such line; give --chat-template FILE, or use /v1/completions"
)
_LOCAL = ("127.0.0.1", "::1", "localhost")


def configure(parser: ArgumentParser) -> None:
    parser.usage = "stepwell serve --model PATH_OR_NAME [OPTION ...]"
    model = parser.add_argument_group("model and answers")
    model.add_argument(
        "--model", required=True, metavar="PATH_OR_NAME", help="a Hugging Face directory, a .gguf file, or a known name"
    )
    answer_options.configure(model)
    model.add_argument(
        "--tool-parser", default="auto", metavar="NAME",
        help="format of tool calls: hermes, glm, llama3, mistral, deepseek, kimi, harmony, "
        "gemma, functiongemma, none (default: auto)",
    )  # fmt: skip
    model.add_argument(
        "--reasoning-parser", default="auto", metavar="NAME",
        help="format of reasoning: think, mistral, harmony, none (default: auto)",
    )  # fmt: skip
    engine_options.configure(parser)
    _configure_access(parser.add_argument_group("address and access"))
    kv_events.configure(parser.add_argument_group("events for routers"))
    handover.configure(parser.add_argument_group("prefill and decode servers"))
    monitoring = parser.add_argument_group("stopping and monitoring")
    monitoring.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time for running answers to finish after SIGTERM (default: 30)",
    )
    monitoring.add_argument("--open-metrics", action="store_true", help="serve /metrics and /v1/loads without a key")
    monitoring.add_argument("--vllm-metrics", action="store_true", help="also export the most used series under vLLM's names")
    otlp.configure(monitoring)
    monitoring.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="format of the log on stderr (default: text)"
    )


def _configure_access(group: ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    group.add_argument("--port", type=_port, default=8000, help="port to listen on, 0 for any (default: 8000)")
    group.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional Host name to accept on a loopback address; repeatable",
    )
    group.add_argument("--api-key", metavar="KEY", help=f"key that clients must send; safer in {_API_KEY}")
    group.add_argument(
        "--tenants",
        metavar="FILE",
        help="JSON file of tenants: keys, priorities, times to live and quotas",
    )
    group.add_argument(
        "--admin-token",
        metavar="TOKEN",
        help=f"token for routes that change the cache; safer in {_ADMIN_TOKEN} (default: generated)",
    )
    group.add_argument("--max-body", default="32MiB", metavar="SIZE", help="largest request body (default: 32MiB)")
    group.add_argument(
        "--max-priority", type=int, default=0, metavar="N", help="highest priority of requests, up to 10 (default: 0)"
    )
    group.add_argument(
        "--hide-version", action="store_true", help="do not serve /version: smg takes a server with that route for vLLM"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def run(args: Namespace) -> int:
    from stepwell.server.monitoring.log_lines import log_to

    with log_to(sys.stderr, args.log_format), _sighup_signal() as sighup_received:
        try:
            return _serve(args, sighup_received)
        except StepwellError as error:
            if args.log_format == "text":
                raise
            log.error("%s", with_flags(str(error)))
            return EXIT_USER_ERROR


@contextmanager
def _sighup_signal() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGHUP arrived since its last call. SIGHUP never ends the server."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGHUP, lambda number, frame: came.append(number))

    def asked() -> bool:
        known = len(came)
        del came[:known]
        return known > 0

    try:
        yield asked
    finally:
        signal.signal(signal.SIGHUP, before)


def _serve(args: Namespace, sighup_received: Callable[[], bool]) -> int:
    _allow_open_files()
    offered, keys, tenants = _check_arguments(args)
    began_s = time.monotonic()
    from stepwell.engine.building.build import open_and_build
    from stepwell.engine.ops.guarded import by_library
    from stepwell.server.access.tenants import Principals
    from stepwell.server.running import ModelServer, address_of, bind

    imported_s = time.monotonic() - began_s
    principals = Principals(keys, tenants.tenants, max_priority=args.max_priority)
    config = engine_options.read(args, os.environ, principals)
    roles = handover.read(args, os.environ)
    if roles is not None:
        config = roles.with_shared_memory(config)
    config = replace(config, compile_in_background=True)  # do not wait for compilers
    otlp.check(args)
    taken = bind(args.host, args.port)  # first: fail on a port in use before loading the model
    host: str = taken.getsockname()[0].partition("%")[0]  # in numeric form
    events = None
    try:
        events = kv_events.open_socket(args)
        log.info("start: importing libraries took %.1f s", imported_s)
        checkpoint, engine = open_and_build(args.model, config)
    except BaseException:
        taken.close()
        if events is not None:
            events.close()
        raise
    serving = offered.serving(checkpoint)
    offers = None if roles is None else roles.offers(config, taken.getsockname()[1])
    server = ModelServer(
        engine,
        **serving,
        tool_parser=None if args.tool_parser == "none" else args.tool_parser,
        reasoning_parser=None if args.reasoning_parser == "none" else args.reasoning_parser,
        principals=principals,
        defaults=checkpoint.defaults,
        max_body_bytes=parse_bytes(args.max_body),
        hosts=_host_names(args, host),
        open_metrics=args.open_metrics,
        vllm_metrics=args.vllm_metrics,
        hide_version=args.hide_version,
        drain_s=args.drain,
        store=config.store,
        store_config=config.store_config,
        events=events,
        offers=offers,
        ahead=None if roles is None else roles.ahead(offers),
        peers=None if roles is None else roles.peers_of(engine, config),
        traces=otlp.open_traces(args, os.environ, model=serving["name"], clock=engine.clock),
        read_tenants=None if args.tenants is None else lambda: _reread_tenants(args),
        sighup_received=sighup_received,
    )
    started = _start_pass(engine, config)
    made = not (args.admin_token or os.environ.get(_ADMIN_TOKEN))
    names = ", ".join(offered.names) or checkpoint.name
    summary = serve_summary.lines(engine, names, config, address_of(taken), keys, tenants, made=made)
    summary.insert(3, ("formats", serve_summary.formats(server.served)))
    summary.insert(3, ("kernels", kernels := by_library(engine.kernels)))
    summary[3:3] = started
    summary += _warnings(host, keys, tenants)
    if serving["chat"].is_plain:
        log.warning(_NO_TEMPLATE)
        summary.append(("warning", _NO_TEMPLATE))
    summary += offered.summary() + kv_events.summary(args) + otlp.summary(args, os.environ)
    summary += [] if roles is None else roles.summary()

    def ready() -> None:
        _tune_garbage_collector()
        print("\n".join(f"{label:<12}  {value}" for label, value in summary), flush=True)
        fields = {"model": names, "address": address_of(taken), "kernels": kernels}
        log.info("ready", extra={"fields": fields})

    server.run(taken, on_ready=ready)
    return 0


def _allow_open_files() -> None:
    """Raises the limit on open files: the usual 1,024 are fewer than a server's connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _start_pass(engine: Engine, config: EngineConfig) -> list[tuple[str, str]]:
    """Builds kernels and measures the speed of prefill before the first request. Returns lines for the summary."""
    from stepwell.engine.building.phases import phase
    from stepwell.engine.start_pass import measure_speed

    said = []
    if engine.on_cuda:
        log.info("first pass: building kernels")
        with phase("the first pass"):
            said.append(("first pass", f"took {engine.warm_up():.1f} s"))
    if engine.on_cuda or config.store is not None:
        with phase("measuring how fast prompts are computed"):
            measure_speed(engine)
        if (speed := engine.cache.compute_tokens_per_s) is not None:
            said.append(("speed", f"prompts are computed at {speed:,.0f} tokens/s"))
    return said


def _tune_garbage_collector() -> None:
    """Each connection leaves a reference cycle of a few KB, which only a full collection frees. Python runs one when new objects
    exceed a quarter of all objects: with 250,000 objects of libraries, that takes thousands of requests and then stops all
    threads. Therefore the present objects are frozen, and full collections run more often.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # updates the count, which then excludes frozen objects
    gc.set_threshold(*gc.get_threshold()[:2], 1)


def _check_arguments(args: Namespace) -> tuple[AnswerOptions, Secrets, TenantsFile]:
    """Checks everything that needs neither PyTorch nor a model. Raises ConfigError."""
    from stepwell.engine.loading.known import must_be_there

    must_be_there(args.model)
    _check_limits(args)
    engine_options.store_options(args, os.environ)
    engine_options.must_be_size("--max-body", args.max_body)
    return answer_options.read(args), _secrets(args, os.environ), _tenants(args)


def _check_limits(args: Namespace) -> None:
    from stepwell.server.api.parsing.formats import REASONING_NAMES, TOOL_NAMES

    if not 0 <= args.max_priority <= MAX_PRIORITY:
        raise ConfigError(f"--max-priority must be from 0 to {MAX_PRIORITY}, got {args.max_priority}")
    for option, name, names in (
        ("--tool-parser", args.tool_parser, TOOL_NAMES), ("--reasoning-parser", args.reasoning_parser, REASONING_NAMES),
    ):  # fmt: skip
        if name not in (*names, "auto", "none"):
            raise ConfigError(f"{option} must be auto, none, {', '.join(names)}; got {name!r}")
    if not args.drain >= 0:
        raise ConfigError(f"--drain must be 0 seconds or more, got {args.drain}")


def _tenants(args: Namespace) -> TenantsFile:
    from stepwell.server.access.tenants import TenantsFile, read_tenants

    return TenantsFile() if args.tenants is None else read_tenants(args.tenants, max_priority=args.max_priority)


def _reread_tenants(args: Namespace) -> Sequence[Tenant]:
    """Raises ConfigError."""
    read = _tenants(args)
    for each in read.warnings:
        log.warning("%s", each)
    return read.tenants


def _secrets(args: Namespace, environment: Mapping[str, str]) -> Secrets:
    from stepwell.server.access.tenants import Secrets

    # An empty variable counts as unset; an empty argument does not.
    admin_token = args.admin_token if args.admin_token is not None else environment.get(_ADMIN_TOKEN) or secrets.token_urlsafe(24)
    api_key = args.api_key if args.api_key is not None else environment.get(_API_KEY) or None
    if api_key is not None and args.tenants is not None:
        raise ConfigError(f"with --tenants each tenant has its own key: leave out --api-key, and unset {_API_KEY}")
    return Secrets(api_key=api_key, admin_token=admin_token)


def _host_names(args: Namespace, host: str) -> tuple[str, ...]:
    """Accepted Host names of a server on a loopback address; empty for other addresses."""
    return (*_LOCAL, host, args.host, *args.allow_host) if ip_address(host).is_loopback else ()


def _warnings(host: str, keys: Secrets, tenants: TenantsFile) -> list[tuple[str, str]]:
    """Warnings for the start-up summary. `host` is the address listened on."""
    found = list(tenants.warnings)
    if keys.api_key is None and not tenants.tenants and not ip_address(host).is_loopback:
        found.append(f"other machines may reach this address: set an API key in {_API_KEY}")
    return [("warning", each) for each in found]


COMMAND = Command(name="serve", summary="Serve a model over HTTP with OpenAI's API.", configure=configure, run=run, extra="serve")
