"""`stepwell serve`: a model behind an OpenAI-compatible server, with the cache under it.

Reads arguments and environment, prints what was made of them, and hands over. Everything heavy is imported when it runs.
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
from stepwell.cli.command import EXIT_USER_ERROR, Command
from stepwell.cli.flags import with_flags

if TYPE_CHECKING:
    from stepwell.cli.answer_options import Offered
    from stepwell.engine.building.settings import EngineConfig
    from stepwell.engine.engine import Engine
    from stepwell.server.access.principals import Secrets, Tenant
    from stepwell.server.access.tenants import TenantsFile

log = logging.getLogger(__name__)

_API_KEY, _ADMIN_TOKEN = "STEPWELL_API_KEY", "STEPWELL_ADMIN_TOKEN"
_OPEN_FILES = 65536
_NO_TEMPLATE = (
    "the model has no chat template: chats are written as 'user: ...' and 'assistant:', and end where the model begins another "
    "such line; give --chat-template FILE, or ask /v1/completions"
)
_LOCAL = ("127.0.0.1", "::1", "localhost")


def configure(parser: ArgumentParser) -> None:
    parser.usage = "stepwell serve --model PATH_OR_NAME [OPTION ...]"
    model = parser.add_argument_group("model and answers")
    model.add_argument("--model", required=True, metavar="PATH_OR_NAME", help="a Hugging Face directory, a .gguf file, or a name")
    answer_options.configure(model)
    model.add_argument(
        "--tool-parser", default="auto", metavar="NAME",
        help="how the model writes calls of tools: hermes, glm, llama3, mistral, deepseek, kimi, harmony, "
        "gemma, functiongemma, none (default: auto)",
    )  # fmt: skip
    model.add_argument(
        "--reasoning-parser", default="auto", metavar="NAME",
        help="how the model sets its reasoning apart: think, mistral, harmony, none (default: auto)",
    )  # fmt: skip
    engine_options.configure(parser)
    _configure_access(parser.add_argument_group("address and access"))
    kv_events.configure(parser.add_argument_group("events for routers"))
    handover.configure(parser.add_argument_group("prefill and decode servers"))
    monitoring = parser.add_argument_group("stopping and monitoring")
    monitoring.add_argument(
        "--drain", type=float, default=30.0, metavar="SECONDS", help="that answers have to finish at SIGTERM (default: 30)"
    )
    monitoring.add_argument("--open-metrics", action="store_true", help="show /metrics and /v1/loads without the API key")
    monitoring.add_argument("--vllm-metrics", action="store_true", help="/metrics has the most used series in vLLM's names too")
    otlp.configure(monitoring)
    monitoring.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="of the log, on stderr (default: text)"
    )


def _configure_access(group: ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    group.add_argument("--port", type=_port, default=8000, help="port to listen on, 0 for any (default: 8000)")
    group.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name by which clients may call 127.0.0.1",
    )
    group.add_argument("--api-key", metavar="KEY", help=f"that clients must send; better in {_API_KEY}")
    group.add_argument(
        "--tenants",
        metavar="FILE",
        help="JSON: who may ask, with which key, priority, time to live and quota",
    )
    group.add_argument("--admin-token", metavar="TOKEN", help=f"that changes need; better in {_ADMIN_TOKEN}; made if not given")
    group.add_argument("--max-body", default="32MiB", metavar="SIZE", help="largest request body (default: 32MiB)")
    group.add_argument(
        "--max-priority", type=int, default=0, metavar="N", help="highest priority that requests may ask for, to 10 (default: 0)"
    )
    group.add_argument("--hide-version", action="store_true", help="no /version: smg takes a server that has one for vLLM")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def run(args: Namespace) -> int:
    from stepwell.server.monitoring.log_lines import log_to

    with log_to(sys.stderr, args.log_format), _hang_ups() as hung_up:
        try:
            return _serve(args, hung_up)
        except StepwellError as error:
            if args.log_format == "text":
                raise
            log.error("%s", with_flags(str(error)))
            return EXIT_USER_ERROR


@contextmanager
def _hang_ups() -> Iterator[Callable[[], bool]]:
    """Whether SIGHUP came since the last call. SIGHUP never ends the server, also while a model loads."""
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


def _serve(args: Namespace, hung_up: Callable[[], bool]) -> int:
    _allow_open_files()
    offered, keys, tenants = _check_arguments(args)
    began_s = time.monotonic()
    from stepwell.engine.building.build import open_and_build
    from stepwell.engine.ops.guarded import by_library
    from stepwell.server.access.principals import Principals
    from stepwell.server.running import ModelServer, address_of, bind

    imported_s = time.monotonic() - began_s
    principals = Principals(keys, tenants.tenants, max_priority=args.max_priority)
    config = engine_options.read(args, os.environ, principals)
    roles = handover.read(args, os.environ)
    if roles is not None:
        config = roles.with_shared_memory(config)
    config = replace(config, compile_in_background=True)  # the first requests need not wait for a compiler
    otlp.check(args)
    taken = bind(args.host, args.port)  # first: a port that is taken should not cost the loading of a model
    host: str = taken.getsockname()[0].partition("%")[0]  # however it was spelled
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
        hosts=_names(args, host),
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
        read_tenants=None if args.tenants is None else lambda: _tenants_again(args),
        hung_up=hung_up,
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
        _collect_often()
        print("\n".join(f"{label:<12}  {value}" for label, value in summary), flush=True)
        fields = {"model": names, "address": address_of(taken), "kernels": kernels}
        log.info("ready", extra={"fields": fields})

    server.run(taken, on_ready=ready)
    return 0


def _allow_open_files() -> None:
    """Raises the limit on open files to what the system allows: the usual 1,024 are fewer than the connections of a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _start_pass(engine: Engine, config: EngineConfig) -> list[tuple[str, str]]:
    """Builds kernels and measures how fast prompts are computed, before the first request; says what came of it."""
    from stepwell.engine.building.phases import phase
    from stepwell.engine.start_pass import measure_speed

    said = []
    if engine.on_cuda:
        log.info("a first pass: kernels are built")
        with phase("the first pass"):
            said.append(("first pass", f"took {engine.warm_up():.1f} s"))
    if engine.on_cuda or config.store is not None:
        with phase("measuring how fast prompts are computed"):
            measure_speed(engine)
        if (speed := engine.cache.compute_tokens_per_s) is not None:
            said.append(("speed", f"prompts are computed at {speed:,.0f} tokens/s"))
    return said


def _collect_often() -> None:
    """Each connection leaves a ring of a few KB, which only a full collection frees. Python waits with one until what is new is
    a quarter of all: beside 250,000 objects of libraries that is thousands of requests, and all threads stop while it looks at
    them. So it looks at none of what is there by now, and more often at the rest.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts what is left: what is frozen counts no more
    gc.set_threshold(*gc.get_threshold()[:2], 1)


def _check_arguments(args: Namespace) -> tuple[Offered, Secrets, TenantsFile]:
    """What needs neither PyTorch nor a model is checked before these are loaded. Raises ConfigError."""
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


def _tenants_again(args: Namespace) -> Sequence[Tenant]:
    """Raises ConfigError."""
    read = _tenants(args)
    for each in read.warnings:
        log.warning("%s", each)
    return read.tenants


def _secrets(args: Namespace, environment: Mapping[str, str]) -> Secrets:
    from stepwell.server.access.principals import Secrets

    # Only a variable that is empty is one that is not set: an argument is there because somebody meant it.
    admin_token = args.admin_token if args.admin_token is not None else environment.get(_ADMIN_TOKEN) or secrets.token_urlsafe(24)
    api_key = args.api_key if args.api_key is not None else environment.get(_API_KEY) or None
    if api_key is not None and args.tenants is not None:
        raise ConfigError(f"with --tenants each tenant has a key of its own: leave out --api-key, and unset {_API_KEY}")
    return Secrets(api_key=api_key, admin_token=admin_token)


def _names(args: Namespace, host: str) -> tuple[str, ...]:
    """By which clients of this machine may call a server that listens on `host`; none where others may, by names of theirs."""
    return (*_LOCAL, host, args.host, *args.allow_host) if ip_address(host).is_loopback else ()


def _warnings(host: str, keys: Secrets, tenants: TenantsFile) -> list[tuple[str, str]]:
    """`host` is an address that is listened on."""
    found = list(tenants.warnings)
    if keys.api_key is None and not tenants.tenants and not ip_address(host).is_loopback:
        found.append(f"other machines may reach this address: set an API key, with {_API_KEY}")
    return [("warning", each) for each in found]


COMMAND = Command(
    name="serve", summary="Serve a model over HTTP, with OpenAI's API.", configure=configure, run=run, extra="serve"
)
