"""`stepwell serve`: a model behind an OpenAI-compatible server, with the cache under it.

Reads arguments and environment, prints what was made of them, and hands over. Everything heavy is imported when it runs.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from stepwell.base.config import HOT_ROWS, MAX_PRIORITY, PlacementConfig, PrefetchPolicy, StoreConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.units import format_bytes, parse_bytes
from stepwell.cli import answer_options, handover, kv_events, otlp
from stepwell.cli.command import Command
from stepwell.cli.mooncake_config import mooncake_options
from stepwell.store.key_file import read_store_key

if TYPE_CHECKING:
    from stepwell.engine.engine import Engine
    from stepwell.engine.models.selectors import Sparse
    from stepwell.engine.scheduler import Limits
    from stepwell.engine.settings import EngineConfig
    from stepwell.server.principals import Principals, Secrets
    from stepwell.server.tenants import TenantsFile

log = logging.getLogger(__name__)

_API_KEY, _ADMIN_TOKEN = "STEPWELL_API_KEY", "STEPWELL_ADMIN_TOKEN"
_LOCAL = ("127.0.0.1", "::1", "localhost")


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="PATH_OR_NAME", help="a Hugging Face directory, a .gguf file, or a name"
    )
    answer_options.configure(parser)
    parser.add_argument(
        "--tool-parser", default="auto", metavar="NAME",
        help="how the model writes calls of tools: hermes, llama3, mistral, deepseek, kimi, harmony, gemma, none (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--reasoning-parser", default="auto", metavar="NAME",
        help="how the model sets its reasoning apart: think, mistral, harmony, none (default: auto, by its chat template)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--dtype", default="auto", help="fp32 or bf16 (default: by device)")
    parser.add_argument(
        "--kernels", default="auto", metavar="NAME",
        help="what runs attention and the like: auto, torch or flashinfer (default: the fastest there is)",
    )  # fmt: skip
    parser.add_argument(
        "--draft", metavar="PATH|mtp", help="a smaller model that guesses tokens ahead, or mtp: the model's own layer"
    )
    parser.add_argument("--draft-tokens", type=int, default=4, metavar="N", help="tokens guessed at once (default: 4)")
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", help="what attention rows are kept in: fp32, bf16, or fp8 where a model can"
    )
    parser.add_argument(
        "--sparse", choices=("dsa", "quest", "clusterkv"),
        help="what picks the tokens that answers look at: quest or clusterkv, or dsa: the model's own index (docs/sparse.md)",
    )  # fmt: skip
    parser.add_argument("--sparse-budget", type=int, metavar="N", help="tokens that are picked (default: 2048)")
    parser.add_argument(
        "--hot-rows", type=int, metavar="N",
        help="with --sparse: attention rows may be on the host alone, and a request keeps so many of a layer on the device "
        "(default: 4096 with dsa; else rows stay on the device)",
    )  # fmt: skip
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N",
        help="ranks that compute the model together, each in a process and on a GPU of its own (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--restart-workers", action="store_true",
        help="with --tensor-parallel: when a rank is lost, start all anew; host memory and store stay warm",
    )  # fmt: skip
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page (default: the model's own)")
    _configure_cache(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default: 8000)")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name by which clients may call 127.0.0.1",
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"that clients must send; better in {_API_KEY}")
    parser.add_argument(
        "--tenants",
        metavar="FILE",
        help="JSON: who may ask, with which key, priority, time to live and quota (docs/tenants.md)",
    )
    parser.add_argument("--admin-token", metavar="TOKEN", help=f"that changes need; better in {_ADMIN_TOKEN}; made if not given")
    parser.add_argument("--max-body", default="32MiB", metavar="SIZE", help="largest request body (default: 32MiB)")
    parser.add_argument(
        "--max-priority", type=int, default=0, metavar="N", help="highest priority that requests may ask for, to 10 (default: 0)"
    )
    parser.add_argument("--open-metrics", action="store_true", help="show /metrics and /v1/loads without the API key")
    kv_events.configure(parser)
    handover.configure(parser)
    parser.add_argument(
        "--drain", type=float, default=30.0, metavar="SECONDS", help="that answers have to finish at SIGTERM (default: 30)"
    )
    otlp.configure(parser)
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="of the log, on stderr (default: text)")
    parser.add_argument("--max-running", type=int, metavar="N", help="requests computed at once (default: 32; on a GPU 64)")
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="tokens computed in one pass (default: 512; on a GPU 8192)")


def _configure_cache(parser: ArgumentParser) -> None:
    prefetch, write = [each.value for each in PrefetchPolicy], [each.value for each in WritePolicy]
    parser.add_argument("--device-memory", metavar="SIZE", help="for the device tier, as in 8GiB (default: what is free)")
    parser.add_argument("--host-memory", metavar="SIZE", help="for the host tier; 0 for none (default: up to 8GiB)")
    parser.add_argument(
        "--store", metavar="STORE", help="log:DIR, shared-log:DIR, mooncake:[FILE], memory:, or one of another package"
    )
    parser.add_argument("--store-budget", metavar="SIZE", help="of a log or memory store, as in 50GiB")
    parser.add_argument("--store-option", action="append", default=[], metavar="NAME=VALUE", help="any other option of the store")
    parser.add_argument(
        "--store-key-file",
        metavar="FILE",
        help="stamp values with the key in it, and use only those stamped so; `stepwell store new-key` makes one",
    )
    parser.add_argument("--write-policy", choices=write, default="through", help="when pages go to the host (default: through)")
    parser.add_argument(
        "--prefetch-policy", choices=prefetch, default="timeout", help="how long requests wait for the store (default: timeout)"
    )
    parser.add_argument(
        "--checkpoint-interval", type=int, metavar="TOKENS",
        help="a checkpoint in a prompt every so many tokens, for models that need them (default: 8192, or what suits the model)",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint-delay",
        type=float,
        metavar="SECONDS",
        help="before a checkpoint is stored; what the next turn supersedes by then is not (default: 30; 0 for a shared store)",
    )


def run(args: Namespace) -> int:
    from stepwell.server.log_lines import log_to

    with log_to(sys.stderr, args.log_format):
        return _serve(args)


def _serve(args: Namespace) -> int:
    try:
        from stepwell.engine.build import open_and_build
        from stepwell.server.principals import Principals
        from stepwell.server.running import ModelServer, address_of, bind
    except ModuleNotFoundError as error:
        if (error.name or "stepwell").split(".")[0] == "stepwell":
            raise
        raise ConfigError(f"serving needs {error.name}, which is not installed: pip install 'stepwell[serve]'") from None
    _check_limits(args)
    offered = answer_options.read(args)
    keys, tenants = _secrets(args, os.environ), _tenants(args)
    principals = Principals(keys, tenants.tenants, max_priority=args.max_priority)
    config, max_body_bytes = _engine_config(args, os.environ, principals), parse_bytes(args.max_body)
    roles = handover.read(args, os.environ)
    if roles is not None:
        config = roles.with_shared_memory(config)
    otlp.check(args)
    taken = bind(args.host, args.port)  # first: a port that is taken should not cost the loading of a model
    events = None
    try:
        events = kv_events.open_socket(args)
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
        max_body_bytes=max_body_bytes,
        hosts=(*_LOCAL, *args.allow_host) if args.host in _LOCAL else (),
        open_metrics=args.open_metrics,
        drain_s=args.drain,
        store=config.store,
        store_config=config.store_config,
        events=events,
        offers=offers,
        ahead=None if roles is None else roles.ahead(offers),
        peers=None if roles is None else roles.peers_of(engine, config),
        traces=otlp.open_traces(args, os.environ, model=serving["name"], clock=engine.clock),
    )
    started_s = None
    if engine.on_cuda:
        log.info("a first pass: kernels are built")
        started_s = engine.warm_up()
    made = not (args.admin_token or os.environ.get(_ADMIN_TOKEN))
    names = ", ".join(offered.names) or checkpoint.name
    summary = _summary(engine, names, config, address_of(taken), keys, tenants, made=made)
    if started_s is not None:
        summary.insert(3, ("first pass", f"took {started_s:.1f} s: kernels are built once"))
    summary += offered.summary() + kv_events.summary(args) + otlp.summary(args, os.environ)
    summary += [] if roles is None else roles.summary()

    def ready() -> None:
        print("\n".join(f"{label:<12}  {value}" for label, value in summary), flush=True)
        log.info("ready", extra={"fields": {"model": names, "address": address_of(taken)}})

    server.run(taken, on_ready=ready)
    return 0


def _check_limits(args: Namespace) -> None:
    from stepwell.server.parsing.formats import REASONING_NAMES, TOOL_NAMES

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
    from stepwell.server.tenants import TenantsFile, read_tenants

    return TenantsFile() if args.tenants is None else read_tenants(args.tenants, max_priority=args.max_priority)


def _engine_config(args: Namespace, environment: Mapping[str, str], principals: Principals | None = None) -> EngineConfig:
    from stepwell.engine.settings import EngineConfig

    options = _store_options(args, environment)
    if principals is not None and args.store is not None:
        options = principals.with_quotas(args.store, options)
    key = read_store_key(args.store_key_file) if args.store_key_file is not None else None
    prefetch = PrefetchPolicy(args.prefetch_policy)
    return EngineConfig(
        device=args.device,
        dtype=args.dtype,
        page_tokens=args.page_tokens,
        max_context=args.max_model_len,
        kv_dtype=args.kv_dtype,
        kernels=args.kernels,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
        sparse=args.sparse,
        sparse_budget=args.sparse_budget,
        hot_rows=args.hot_rows,
        tensor_parallel=args.tensor_parallel,
        restart_workers=args.restart_workers,
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        store=args.store,
        store_options=options,
        store_config=StoreConfig(prefetch=prefetch, checkpoint_delay_s=args.checkpoint_delay, key=key),
        write=WritePolicy(args.write_policy),
        placement=PlacementConfig(interval_tokens=args.checkpoint_interval),
        memory_quotas={} if principals is None else principals.memory_quotas,
        limits=_limits(args),
    )


def _limits(args: Namespace) -> Limits | None:
    """What was asked for, and otherwise what suits the device."""
    from stepwell.engine.settings import EngineConfig, limits_for

    asked = {"max_running": args.max_running, "chunk_tokens": args.chunk_tokens}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(limits_for(EngineConfig(device=args.device)), **given) if given else None


def _store_options(args: Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment's for Mooncake, then what the arguments say. Raises ConfigError."""
    if args.store is None:
        if args.store_budget is not None or args.store_option:
            raise ConfigError("--store-budget and --store-option need a --store, as in --store log:DIR")
        return {}
    name, _, location = args.store.partition(":")
    options = mooncake_options(environment) if name == "mooncake" else {}
    if location:
        options.pop("config_path", None)  # the file that the argument names stands before the environment's
    if args.store_budget is not None:
        parse_bytes(args.store_budget)
        options["budget"] = args.store_budget
    for each in args.store_option:
        option, equals, value = each.partition("=")
        if not equals:
            raise ConfigError(f"--store-option must be NAME=VALUE, got {each!r}")
        options[option] = value
    return options


def _secrets(args: Namespace, environment: Mapping[str, str]) -> Secrets:
    from stepwell.server.principals import Secrets

    admin_token = args.admin_token or environment.get(_ADMIN_TOKEN) or secrets.token_urlsafe(24)
    api_key = args.api_key or environment.get(_API_KEY) or None
    if api_key is not None and args.tenants is not None:
        raise ConfigError(f"with --tenants each tenant has a key of its own: leave out --api-key, and unset {_API_KEY}")
    return Secrets(api_key=api_key, admin_token=admin_token)


def _summary(
    engine: Engine, name: str, config: EngineConfig, address: str, keys: Secrets, tenants: TenantsFile, *, made: bool
) -> list[tuple[str, str]]:
    """What people should know before the first request, line by line."""
    cache, spec = engine.cache, engine.cache.spec
    sizes = {tier: stats.available_bytes for tier, stats in cache.stats().tiers.items()}  # nothing is in them yet
    measured, key = engine.footprint, config.store_config.key
    per_token = {Tier.DEVICE: measured.bytes_per_token, Tier.HOST: spec.bytes_per_token}  # ranks have shares of rows on devices
    checkpoint = f", {format_bytes(measured.checkpoint_bytes)} per checkpoint" if measured.checkpoint_bytes else ""
    lines = [
        ("model", f"{name}, up to {engine.max_context:,} tokens a request"),
        ("passes", f"{engine.limits.chunk_tokens:,} tokens, {engine.limits.max_running} requests at once"),
        ("memory", f"{round(measured.bytes_per_token):,} bytes per token{checkpoint}, pages of {spec.page_tokens} tokens"),
        *([] if config.tensor_parallel == 1 else [("ranks", _ranks(engine, config))]),
        *([] if config.draft is None else [("draft", f"{config.draft}, up to {config.draft_tokens} tokens ahead")]),
        *([] if config.picks is None else [("sparse", _sparse(config.picks, config.hot_rows))]),
        ("kernels", ", ".join(f"{what} {by}" for what, by in engine.kernels.items())),
        ("tiers", ", ".join(_tier(tier.label, size, per_token[tier]) for tier, size in sizes.items() if size)),
        ("store", config.store or "none"),
        *([] if key is None else [("store key", f"{key.id.hex()}: only what was written with it is used")]),
        ("admin token", f"{keys.admin_token} (for this run)" if made else "as given"),
        ("API key", _who_may_ask(keys, tenants)),
        ("page", f"{address}/ui"),
        ("address", address),
    ]
    lines += [("warning", each) for each in tenants.warnings]
    local = any(address.startswith((f"http://{host}:", f"http://[{host}]:")) for host in _LOCAL)
    if keys.api_key is None and not tenants.tenants and not local:
        lines.append(("warning", f"other machines may reach this address: set an API key, with {_API_KEY}"))
    return lines


def _sparse(picks: Sparse, hot_rows: int | None) -> str:
    hot = f", {HOT_ROWS if hot_rows is None else hot_rows:,} hot rows a request" if picks.spills else ""
    return (picks.identity or picks.selector) + hot


def _ranks(engine: Engine, config: EngineConfig) -> str:
    pids = "" if engine.ranks is None else f", processes {', '.join(map(str, engine.ranks.pids))}"
    return f"{config.tensor_parallel}{pids}{'; started anew when one is lost' if config.restart_workers else ''}"


def _tier(label: str, size: int, bytes_per_token: Fraction) -> str:
    """Its size, and how many tokens that are where each token takes some."""
    tokens = f" ({int(size / bytes_per_token):,} tokens)" if bytes_per_token else ""
    return f"{label} {format_bytes(size)}{tokens}"


def _who_may_ask(keys: Secrets, tenants: TenantsFile) -> str:
    if tenants.tenants:
        return f"one for each of {len(tenants.tenants)} tenants"
    return "wanted" if keys.api_key is not None else "none: whoever can connect may ask"


COMMAND = Command(name="serve", summary="Serve a model over HTTP, as OpenAI's clients speak it.", configure=configure, run=run)
