"""Options of `stepwell serve` for the engine: what computes, with how much memory, over which store.

Read and checked before weights are. Starts nothing.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from argparse import _ArgumentGroup as ArgumentGroup
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from stepwell.base.config import WRITE_NAMES, PlacementConfig, PrefetchPolicy, StoreConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.spec.families import KV_DTYPES
from stepwell.base.spec.narrow import CHECKPOINT_DTYPES
from stepwell.base.units import is_none, parse_bytes
from stepwell.cli.mooncake_config import mooncake_options
from stepwell.policy.write_choice import AUTO
from stepwell.store.key_file import read_store_key

if TYPE_CHECKING:
    from stepwell.engine.building.settings import EngineConfig
    from stepwell.engine.scheduling.scheduler import Limits
    from stepwell.server.access.principals import Principals


def configure(parser: ArgumentParser) -> None:
    _configure_engine(parser.add_argument_group("engine"))
    _configure_batches(parser.add_argument_group("batches"))
    _configure_cache(parser.add_argument_group("tiers and store"))
    _configure_checkpoints(parser.add_argument_group("checkpoints and loading"))


def _configure_engine(group: ArgumentGroup) -> None:
    group.add_argument(
        "--device", default="auto",
        help="auto, cpu, cuda or cuda:NUMBER, or with --tensor-parallel one for each rank, as in cuda:2,cuda:3 (default: auto)",
    )  # fmt: skip
    group.add_argument("--dtype", default="auto", help="fp32, bf16 or fp16 (default: by device)")
    group.add_argument(
        "--kernels", default="auto", metavar="NAME",
        help="what runs attention and the like: auto, torch or flashinfer (default: the fastest there is)",
    )  # fmt: skip
    group.add_argument("--kv-dtype", metavar="DTYPE", help=f"what attention rows are kept in: {', '.join(KV_DTYPES)}")
    group.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page (default: the model's own)")
    group.add_argument(
        "--draft", metavar="PATH|mtp", help="a smaller model that guesses tokens ahead, or mtp: the model's own layer"
    )
    group.add_argument("--draft-tokens", type=int, default=4, metavar="N", help="tokens guessed at once (default: 4)")
    group.add_argument(
        "--sparse", choices=("dsa", "quest", "clusterkv"),
        help="what picks the tokens that answers look at: quest or clusterkv, or dsa: the model's own index",
    )  # fmt: skip
    group.add_argument("--sparse-budget", type=int, metavar="N", help="tokens that are picked (default: 2048)")
    group.add_argument(
        "--hot-rows", type=int, metavar="N",
        help="with --sparse: attention rows may be on the host alone, and a request keeps N of each layer on the device "
        "(default: 4096 with dsa; else rows stay on the device)",
    )  # fmt: skip


def _configure_batches(group: ArgumentGroup) -> None:
    group.add_argument("--max-running", type=int, metavar="N", help="requests computed at once (default: 32; on a GPU 64)")
    group.add_argument("--chunk-tokens", type=int, metavar="N", help="tokens computed in one pass (default: 512; on a GPU 8192)")
    group.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N",
        help="ranks that compute the model together, each in a process of its own, and on a GPU of its own unless --device says "
        "otherwise (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--restart-workers", action="store_true",
        help="with --tensor-parallel: when a rank is lost, start all anew; host memory and store stay warm",
    )  # fmt: skip


def _configure_cache(group: ArgumentGroup) -> None:
    group.add_argument(
        "--device-memory", metavar="SIZE",
        help="of the device tier, as in 8GiB, or 70%% of what the weights leave free (default on a GPU: 88%%)",
    )  # fmt: skip
    group.add_argument("--host-memory", metavar="SIZE", help="of the host tier; 0 or none for no such tier (default: up to 8GiB)")
    group.add_argument(
        "--store", metavar="STORE",
        help="log:DIR, shared-log:DIR, mooncake:[FILE], memory:, or one of another package; none for no store (default: none)",
    )  # fmt: skip
    group.add_argument("--store-budget", metavar="SIZE", help="of a log or memory store, as in 50GiB")
    group.add_argument("--store-option", action="append", default=[], metavar="NAME=VALUE", help="any other option of the store")
    group.add_argument(
        "--store-key-file",
        metavar="FILE",
        help="stamp values with the key in it, and use only those stamped so; `stepwell store new-key` makes one",
    )
    add_write_policy(group)


def add_write_policy(group: ArgumentGroup) -> None:
    """When pages go down: the same options where a cache serves and where it is simulated."""
    group.add_argument(
        "--write-policy", choices=[AUTO, *WRITE_NAMES], default=AUTO, metavar="POLICY",
        help="when pages go to the host: through, selective or exclusive; SGLang's names are accepted too "
        "(default: auto, through or exclusive by the sizes of the tiers)",
    )  # fmt: skip
    group.add_argument(
        "--no-durable", dest="durable", action="store_false",
        help="with exclusive, the store gets what leaves memory, and not sooner: it holds more, and a kill loses what is "
        "only in memory (default: what is cached goes soon to a store that outlives the process)",
    )  # fmt: skip


def write_policy(args: Namespace) -> WritePolicy | None:
    """None where the sizes of the tiers decide."""
    return None if args.write_policy == AUTO else WritePolicy(args.write_policy)


def _configure_checkpoints(group: ArgumentGroup) -> None:
    group.add_argument(
        "--prefetch-policy", choices=[each.value for each in PrefetchPolicy], default="timeout",
        help="how long requests wait for the store (default: timeout)",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-interval", type=int, metavar="TOKENS",
        help="distance of checkpoints in a prompt, for models that need them (default: 8192, or what suits the model)",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-dtype", choices=CHECKPOINT_DTYPES,
        help="checkpoints in eight bits on the host and in the store: smaller, and not exact any more (default: exact)",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-delay",
        type=float,
        metavar="SECONDS",
        help="before a checkpoint is stored; what the next turn supersedes by then is not (default: 30; 0 for a shared store)",
    )


def read(args: Namespace, environment: Mapping[str, str], principals: Principals | None = None) -> EngineConfig:
    from stepwell.engine.building.settings import EngineConfig

    options = store_options(args, environment)
    if principals is not None and not is_none(args.store):
        options = principals.with_quotas(args.store, options)
    key = read_store_key(args.store_key_file) if args.store_key_file is not None else None
    prefetch = PrefetchPolicy(args.prefetch_policy)
    return EngineConfig(
        device=args.device,
        dtype=args.dtype,
        page_tokens=args.page_tokens,
        max_context=args.max_model_len,
        kv_dtype=args.kv_dtype,
        checkpoint_dtype=args.checkpoint_dtype,
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
        write=write_policy(args),
        durable=args.durable,
        placement=PlacementConfig(interval_tokens=args.checkpoint_interval),
        memory_quotas={} if principals is None else principals.memory_quotas,
        limits=_limits(args),
    )


def _limits(args: Namespace) -> Limits | None:
    """What was asked for, and otherwise what suits the device."""
    from stepwell.engine.building.settings import EngineConfig, limits_for

    asked = {"max_running": args.max_running, "chunk_tokens": args.chunk_tokens}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(limits_for(EngineConfig(device=args.device, tensor_parallel=args.tensor_parallel)), **given) if given else None


def store_options(args: Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment's for Mooncake, then what the arguments say. Raises ConfigError."""
    if is_none(args.store):
        if args.store_budget is not None or args.store_option:
            raise ConfigError("--store-budget and --store-option need a --store, as in --store log:DIR")
        return {}
    name, _, location = args.store.partition(":")
    options = mooncake_options(environment) if name == "mooncake" else {}
    if location:
        options.pop("config_path", None)  # the file that the argument names stands before the environment's
    if args.store_budget is not None:
        must_be_size("--store-budget", args.store_budget)
        options["budget"] = args.store_budget
    for each in args.store_option:
        option, equals, value = each.partition("=")
        if not equals:
            raise ConfigError(f"--store-option must be NAME=VALUE, got {each!r}")
        options[option] = value
    return options


def must_be_size(flag: str, amount: str) -> None:
    """Raises ConfigError that names the flag."""
    try:
        size_bytes = parse_bytes(amount)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if not size_bytes:
        raise ConfigError(f"{flag} must be more than 0, got {amount}")
