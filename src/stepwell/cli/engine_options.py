"""Options of `stepwell serve` for the engine: what computes, with how much memory, over which store.

Read and checked before weights are. Starts nothing.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from stepwell.base.config import PlacementConfig, PrefetchPolicy, StoreConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.spec.narrow import CHECKPOINT_DTYPES
from stepwell.base.units import parse_bytes
from stepwell.cli.mooncake_config import mooncake_options
from stepwell.policy.write_choice import AUTO
from stepwell.store.key_file import read_store_key

if TYPE_CHECKING:
    from stepwell.engine.building.settings import EngineConfig
    from stepwell.engine.scheduling.scheduler import Limits
    from stepwell.server.access.principals import Principals


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto",
        help="auto, cpu, cuda or cuda:NUMBER, or with --tensor-parallel one for each rank, as in cuda:2,cuda:3 (default: auto)",
    )  # fmt: skip
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
        "--prefetch-near", type=int, default=0, metavar="N",
        help="with hot rows: a step also fetches up to N rows a layer that it nearly picked, for the next step (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N",
        help="ranks that compute the model together, each in a process of its own, and on a GPU of its own unless --device says "
        "otherwise (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--restart-workers", action="store_true",
        help="with --tensor-parallel: when a rank is lost, start all anew; host memory and store stay warm",
    )  # fmt: skip
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page (default: the model's own)")
    parser.add_argument("--max-running", type=int, metavar="N", help="requests computed at once (default: 32; on a GPU 64)")
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="tokens computed in one pass (default: 512; on a GPU 8192)")
    _configure_cache(parser)


def _configure_cache(parser: ArgumentParser) -> None:
    prefetch, write = [each.value for each in PrefetchPolicy], [each.value for each in WritePolicy]
    parser.add_argument(
        "--device-memory", metavar="SIZE",
        help="for the device tier, as in 8GiB, or 70%% of what the weights leave free (default on a GPU: 88%%)",
    )  # fmt: skip
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
    parser.add_argument(
        "--write-policy", choices=[AUTO, *write], default=AUTO,
        help="when pages go to the host (default: auto, through or adaptive by the sizes of the tiers)",
    )  # fmt: skip
    parser.add_argument(
        "--no-durable", dest="durable", action="store_false",
        help="with adaptive or back, the store gets what leaves memory, and not sooner: it holds more, and a kill loses what is "
        "only in memory (default: what is cached goes soon to a store that outlives the process)",
    )  # fmt: skip
    parser.add_argument(
        "--prefetch-policy", choices=prefetch, default="timeout", help="how long requests wait for the store (default: timeout)"
    )
    parser.add_argument(
        "--compute-while-loading", action="store_true",
        help="compute the end of a prefix while the rest comes from the host, where that is 10%% sooner by measured speeds",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint-interval", type=int, metavar="TOKENS",
        help="a checkpoint in a prompt every so many tokens, for models that need them (default: 8192, or what suits the model)",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint-dtype", choices=CHECKPOINT_DTYPES,
        help="checkpoints in eight bits on the host and in the store: not exact any more (docs/operations.md; default: exact)",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint-delay",
        type=float,
        metavar="SECONDS",
        help="before a checkpoint is stored; what the next turn supersedes by then is not (default: 30; 0 for a shared store)",
    )


def read(args: Namespace, environment: Mapping[str, str], principals: Principals | None = None) -> EngineConfig:
    from stepwell.engine.building.settings import EngineConfig

    options = store_options(args, environment)
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
        checkpoint_dtype=args.checkpoint_dtype,
        kernels=args.kernels,
        draft=args.draft,
        draft_tokens=args.draft_tokens,
        sparse=args.sparse,
        sparse_budget=args.sparse_budget,
        hot_rows=args.hot_rows,
        prefetch_near=args.prefetch_near,
        tensor_parallel=args.tensor_parallel,
        restart_workers=args.restart_workers,
        compute_while_loading=args.compute_while_loading,
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        store=args.store,
        store_options=options,
        store_config=StoreConfig(prefetch=prefetch, checkpoint_delay_s=args.checkpoint_delay, key=key),
        write=None if args.write_policy == AUTO else WritePolicy(args.write_policy),
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
