"""Options of `stepwell serve` for the engine: device, memory, tiers and store.

Parsed and checked before weights are read. Also translates the `MOONCAKE_*` variables of Mooncake's own clients to options of
`open_store("mooncake:", options=...)`; `stepwell.store.mooncake.config` defines their values.
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
from stepwell.policy.write_choice import AUTO
from stepwell.store.key_file import read_store_key

if TYPE_CHECKING:
    from stepwell.engine.building.settings import EngineConfig
    from stepwell.engine.scheduling.scheduler import Limits
    from stepwell.server.access.tenants import Principals


def configure(parser: ArgumentParser) -> None:
    _configure_engine(parser.add_argument_group("engine"))
    _configure_batches(parser.add_argument_group("batches"))
    _configure_cache(parser.add_argument_group("tiers and store"))
    _configure_checkpoints(parser.add_argument_group("checkpoints and loading"))


def _configure_engine(group: ArgumentGroup) -> None:
    group.add_argument(
        "--device", default="auto",
        help="auto, cpu, cuda or cuda:NUMBER; with --tensor-parallel one per rank, as in cuda:2,cuda:3 (default: auto)",
    )  # fmt: skip
    group.add_argument("--dtype", default="auto", help="fp32, bf16 or fp16 (default: by device)")
    group.add_argument(
        "--kernels", default="auto", metavar="NAME",
        help="kernels for attention and other operations: auto, torch or flashinfer (default: the fastest available)",
    )  # fmt: skip
    group.add_argument(
        "--kv-dtype", metavar="DTYPE", help=f"dtype of keys and values: {', '.join(KV_DTYPES)} (default: the model's own)"
    )
    group.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page (default: the model's own)")
    group.add_argument(
        "--draft",
        metavar="PATH|mtp",
        help="a smaller model that proposes tokens for speculative decoding; mtp for the model's own layer",
    )
    group.add_argument("--draft-tokens", type=int, default=4, metavar="N", help="tokens proposed at once (default: 4)")
    group.add_argument(
        "--sparse", choices=("dsa", "quest", "clusterkv"),
        help="select the tokens that decode steps attend to: quest or clusterkv (approximate), or dsa, the model's own index",
    )  # fmt: skip
    group.add_argument("--sparse-budget", type=int, metavar="N", help="tokens selected by --sparse (default: 2048)")
    group.add_argument(
        "--hot-rows", type=int, metavar="N",
        help="with --sparse: keep rows on the host, and up to N of each layer per request on the device "
        "(default: 4096 with dsa; otherwise all rows stay on the device)",
    )  # fmt: skip


def _configure_batches(group: ArgumentGroup) -> None:
    group.add_argument("--max-running", type=int, metavar="N", help="most requests in a batch (default: 32; on a GPU 64)")
    group.add_argument("--chunk-tokens", type=int, metavar="N", help="most tokens in a pass (default: 512; on a GPU 8192)")
    group.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N",
        help="number of ranks, each in a process and on a GPU of its own unless --device names others (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--restart-workers", action="store_true",
        help="with --tensor-parallel: restart all ranks when one dies; host memory and store stay warm",
    )  # fmt: skip


def _configure_cache(group: ArgumentGroup) -> None:
    group.add_argument(
        "--device-memory", metavar="SIZE",
        help="size of the device tier, as in 8GiB, or 70%% of what the weights leave free (default on a GPU: 88%%)",
    )  # fmt: skip
    group.add_argument(
        "--host-memory", metavar="SIZE", help="size of the host tier; 0 or none for no host tier (default: up to 8GiB)"
    )
    group.add_argument(
        "--store", metavar="STORE",
        help="store below the host tier: log:DIR, shared-log:DIR, mooncake:[FILE], memory: or one of a plugin (default: none)",
    )  # fmt: skip
    group.add_argument("--store-budget", metavar="SIZE", help="size of a log or memory store, as in 50GiB")
    group.add_argument(
        "--store-option", action="append", default=[], metavar="NAME=VALUE", help="another option of the store; repeatable"
    )
    group.add_argument(
        "--store-key-file",
        metavar="FILE",
        help="stamp values with the key in FILE, and use only values with that stamp; create one with `stepwell store new-key`",
    )
    add_write_policy(group)


def add_write_policy(group: ArgumentGroup) -> None:
    """Adds the options for writing to lower tiers, which `serve` and the replays share."""
    group.add_argument(
        "--write-policy", choices=[AUTO, *WRITE_NAMES], default=AUTO, metavar="POLICY",
        help="when pages go to the host: through, selective or exclusive; SGLang's names are accepted too "
        "(default: auto, through or exclusive by the sizes of the tiers)",
    )  # fmt: skip
    group.add_argument(
        "--no-durable", dest="durable", action="store_false",
        help="with exclusive, store pages only when they leave memory: more fits, and a kill loses what is in memory "
        "(default: store them soon)",
    )  # fmt: skip


def write_policy(args: Namespace) -> WritePolicy | None:
    """None if the sizes of the tiers decide."""
    return None if args.write_policy == AUTO else WritePolicy(args.write_policy)


def _configure_checkpoints(group: ArgumentGroup) -> None:
    group.add_argument(
        "--prefetch-policy", choices=[each.value for each in PrefetchPolicy], default="timeout",
        help="whether requests wait for the store (default: timeout)",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-interval", type=int, metavar="TOKENS",
        help="distance of checkpoints within a prompt (default: 8192, or what suits the model)",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-dtype", choices=CHECKPOINT_DTYPES,
        help="store checkpoints in eight bits on the host and below: smaller, but no longer exact (default: exact)",
    )  # fmt: skip
    group.add_argument(
        "--checkpoint-delay",
        type=float,
        metavar="SECONDS",
        help="delay before a checkpoint is stored, unless the next turn supersedes it (default: 30; 0 for a shared store)",
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
    """The given limits, and the device's defaults for the others; None without any."""
    from stepwell.engine.building.settings import EngineConfig, limits_for

    asked = {"max_running": args.max_running, "chunk_tokens": args.chunk_tokens}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(limits_for(EngineConfig(device=args.device, tensor_parallel=args.tensor_parallel)), **given) if given else None


def store_options(args: Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Options of the store from the environment (Mooncake), then from the arguments. Raises ConfigError."""
    if is_none(args.store):
        if args.store_budget is not None or args.store_option:
            raise ConfigError("--store-budget and --store-option need --store, as in --store log:DIR")
        return {}
    name, _, location = args.store.partition(":")
    options = mooncake_options(environment) if name == "mooncake" else {}
    if location:
        options.pop("config_path", None)  # the argument's file overrides the environment's
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


_MOONCAKE_OPTIONS = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_LOCAL_HOSTNAME": "local_hostname",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
    "MOONCAKE_LOCAL_BUFFER_SIZE": "local_buffer_size",
    "MOONCAKE_TENANT_ID": "tenant_id",
    "MOONCAKE_OFFLOAD_ENABLED": "enable_ssd_offload",
    "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "ssd_offload_path",
    "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "enable_client_http_server",
    "MOONCAKE_CLIENT_HTTP_PORT": "client_http_port",
}


def mooncake_options(environment: Mapping[str, str]) -> dict[str, str]:
    """The options set in the environment. As with Mooncake itself, MOONCAKE_CONFIG_PATH overrides all others."""
    path = environment.get("MOONCAKE_CONFIG_PATH")
    if path:
        return {"config_path": path}
    return {option: environment[name] for name, option in _MOONCAKE_OPTIONS.items() if environment.get(name)}
