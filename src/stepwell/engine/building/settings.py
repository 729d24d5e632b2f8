"""The settings of an engine, and their values on this machine: device, dtypes, sizes of memory.

Reads no weights and allocates no memory. Refuses settings that cannot work with any model before either happens.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stepwell.base.config import CacheConfig, PlacementConfig, StoreConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.inherited_block import InheritedBlock
from stepwell.base.spec.families import KV_DTYPES
from stepwell.base.spec.families.summaries import DSA
from stepwell.base.spec.narrow import Narrow
from stepwell.base.units import counted, format_bytes, is_none, parse_tier
from stepwell.cache.facade import Cache
from stepwell.engine.approximate.selectors import Sparse
from stepwell.engine.drafts.own_layer import MTP
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.known import known_names
from stepwell.engine.ops.kernels import check_kernels
from stepwell.engine.passes.rows import TORCH_DTYPES
from stepwell.engine.scheduling.scheduler import Limits
from stepwell.engine.workers.worker_setup import WorkerLimits
from stepwell.policy.write_choice import WriteChoice, choose_write
from stepwell.store.api import Store, size_of
from stepwell.store.registry import find_opener, open_store
from stepwell.transfer.copy_engine import free_bytes, must_fit

log = logging.getLogger(__name__)

CUDA_SHARE = 0.88  # of the GPU memory that is free after loading weights; passes need the rest
CUDA_LIMITS = Limits(max_running=64, chunk_tokens=8192)  # enough tokens in a pass to keep a GPU busy
CPU_DEVICE_BYTES = 2 * 2**30
_ONE_RANK_ONLY = ("checkpoint_dtype", "draft", "sparse")
_DEVICE = re.compile("cpu|cuda(?::(0|[1-9][0-9]*))?")  # one spelling per device, so equal strings mean the same GPU
_NEEDS_HOST = "a store needs a host tier above it: give host_memory, or leave `store` out"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine. Memory is in bytes or as `8GiB`; for `device_memory` also as `70%` of the memory that weights
    leave. None means a sensible default.

    `0` and `none` for `host_memory` or `store` mean no such tier.
    """

    device: str = "auto"  # or cpu, cuda, cuda:NUMBER; with several ranks also one device for each, as in cuda:2,cuda:3
    dtype: str = "auto"
    kv_dtype: str | None = None  # the dtype of attention rows: as `dtype`, or fp8 if the model supports it
    checkpoint_dtype: str | None = (
        None  # int8 or fp8 for checkpoints on the host and in the store, which are then inexact; None: exact
    )
    kernels: str = "auto"  # or torch, or flashinfer
    compile_in_background: bool = False  # compiles missing kernels while plain torch runs in their place
    page_tokens: int | None = None
    max_context: int | None = None  # tokens of a prompt and its answer; None: as the model and the memory allow
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    store: str | None = None  # such as `log:DIR` or `mooncake:FILE`
    store_options: Mapping[str, str] = field(default_factory=dict)
    store_config: StoreConfig = field(default_factory=StoreConfig)
    write: WritePolicy | None = None  # None: chosen by the sizes of the tiers (`write_for`)
    durable: bool = (
        True  # writes committed pages soon to a store that outlives the process; False: fewer duplicates between tiers
    )
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    memory_quotas: Mapping[str, float] = field(default_factory=dict)  # shares of each memory tier, by tenant
    limits: Limits | None = None  # None: by device
    layerwise: bool = True  # on CUDA, on one rank: a pass may begin while its pages load, and waits layer by layer
    draft: str | None = None  # a checkpoint that drafts tokens, or `mtp` for the model's own draft layers
    draft_tokens: int = 4  # per pass
    draft_max_running: int = 16  # no drafts with more decoding requests than this
    sparse: str | None = None  # selects the tokens that answers attend to: quest or clusterkv, or dsa for a model's own index
    sparse_budget: int | None = None  # tokens selected; None: 2,048
    # Rows of each layer that a request keeps on the device while others are on the host only. None: 4,096 with dsa; with other
    # selectors all rows stay on the device.
    hot_rows: int | None = None
    tensor_parallel: int = 1  # ranks, each a process with its own device memory
    restart_workers: bool = False  # restarts all ranks when one is lost; otherwise the engine stops computing
    worker_limits: WorkerLimits = field(default_factory=WorkerLimits)
    host_block: Callable[[int], InheritedBlock] | None = None  # makes the host tier's memory, so that other processes can map it

    def __post_init__(self) -> None:
        if is_none(self.store):
            object.__setattr__(self, "store", None)

    @property
    def picks(self) -> Sparse | None:
        """The checked settings of the selector. Raises ConfigError."""
        if self.sparse is None and self.sparse_budget is not None:
            raise ConfigError("sparse_budget is the number of tokens that a selector picks: name one with `sparse`")
        if self.sparse is None and self.hot_rows is not None:
            raise ConfigError("hot_rows needs sparse attention: name a selector with `sparse`, or leave hot_rows out")
        if self.sparse is None:
            return None
        return Sparse(selector=self.sparse, budget=self.sparse_budget, hot_rows=self.hot_rows is not None)


def check_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings that cannot work with any model on this machine. Allocates nothing."""
    device, dtype = device_of(config), dtype_of(config)
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"`dtype` must be one of auto, {', '.join(TORCH_DTYPES)}; got {dtype!r}")
    if config.kv_dtype is not None and config.kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}; got {config.kv_dtype!r}")
    check_kernels(config.kernels, device, TORCH_DTYPES[dtype])
    _check_ranks(config)
    _check_sparse(config)
    _check_checkpoints(config)
    if config.page_tokens is not None and config.page_tokens < 1:
        raise ConfigError(f"page_tokens must be at least 1, got {config.page_tokens}")
    if config.max_context is not None and config.max_context < 2:
        raise ConfigError(f"max_context must be at least 2, a token and its answer; got {config.max_context}")
    devices = rank_devices(config)
    # All ranks allocate as much as the one with the least memory.
    least_bytes = min(device_bytes_of(config, each) for each in set(devices))
    sizes = CacheConfig(device_bytes=least_bytes, host_bytes=host_bytes_of(config))
    check_fits(sizes, devices)
    if config.store is not None:
        find_opener(config.store)
        if sizes.host_bytes is None:
            raise ConfigError(_NEEDS_HOST)
    if config.draft not in (None, MTP, *known_names()) and not Path(str(config.draft)).exists():
        raise ConfigError(
            f"there is no draft model at {config.draft!r}: give a path, {MTP}, or one of {', '.join(known_names())}"
        )


def _check_sparse(config: EngineConfig) -> None:
    """Raises ConfigError for an unknown selector, and if rows would have no tier to spill to."""
    picks = config.picks
    if picks is None or not picks.spills:
        return
    how = f"`sparse={picks.selector}`" + ("" if picks.selector == DSA else " with hot_rows")
    instead = "`sparse`" if picks.selector == DSA else "hot_rows"
    if (config.hot_rows or 0) < 0:
        raise ConfigError(f"hot_rows must be 0 or more, got {config.hot_rows}")
    if host_bytes_of(config) is None:
        raise ConfigError(f"{how} keeps attention rows in a host tier: give host_memory, or leave {instead} out")
    if config.write is not None and not config.write.saves_on_commit:
        raise ConfigError(f"{how} needs `write=through`, since rows leave the device once the host has them; "
                          f"got {config.write.value}")  # fmt: skip


def _check_checkpoints(config: EngineConfig) -> None:
    """Raises ConfigError for an unknown format, and if no tier would use it."""
    if config.checkpoint_dtype is None:
        return
    Narrow(dtype=config.checkpoint_dtype)
    if host_bytes_of(config) is None:
        raise ConfigError(
            "checkpoint_dtype is the format of checkpoints in the host tier and below: give host_memory, or leave it out"
        )


def _check_ranks(config: EngineConfig) -> None:
    """Raises ConfigError for settings that ranks in several processes do not support."""
    if config.tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel must be at least 1, got {config.tensor_parallel}")
    plain = EngineConfig()
    if config.tensor_parallel == 1:
        for name in ("restart_workers", "worker_limits"):
            if getattr(config, name) != getattr(plain, name):
                raise ConfigError(f"{name} is for ranks in processes of their own: give tensor_parallel too")
        return
    for name in _ONE_RANK_ONLY:
        if getattr(config, name) != getattr(plain, name):
            raise ConfigError(f"{name} works on one rank only, so far: leave it out, or use tensor_parallel 1")


def rank_devices(config: EngineConfig) -> tuple[str, ...]:
    """The device of each rank. Raises ConfigError if there are too few."""
    device, count, named = device_of(config), config.tensor_parallel, config.device.split(",")
    if device == "cpu" or count == 1:
        return (device,) * count
    if len(named) == count:
        return tuple(named)
    if ":" in device:
        raise ConfigError(
            f"{count} ranks need a device each: give --device cuda, or one for each, as in "
            f"{','.join(f'cuda:{rank}' for rank in range(count))}; got {config.device}"
        )
    if torch.cuda.device_count() < count:
        raise ConfigError(
            f"--tensor-parallel {count} needs as many GPUs, and torch sees {torch.cuda.device_count()}; ranks that are to share "
            f"one are named with it, as in --device {','.join([f'{device}:0'] * count)}"
        )
    return tuple(f"cuda:{rank}" for rank in range(count))


def ranks_on_one(devices: Sequence[str]) -> int:
    """How many ranks share the memory of the device that most of them are on."""
    return max(Counter(devices).values())


def backend_for(devices: Sequence[str]) -> str:
    """The backend that connects ranks. NCCL refuses two ranks on one GPU."""
    return "gloo" if "cpu" in devices or ranks_on_one(devices) > 1 else "nccl"


# ---- defaults, and whether they fit ---------------------------------------------------------------


def device_of(config: EngineConfig) -> str:
    """The device; with one for each rank, that of rank 0. Raises ConfigError for a device that does not exist."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    named = config.device.split(",")
    for each in named:
        _check_device(each)
    if len(named) > 1 and (len(named) != config.tensor_parallel or not all(each.startswith("cuda:") for each in named)):
        raise ConfigError(
            f"several devices are one for each rank, as in cuda:0,cuda:1 with tensor_parallel 2; got {config.device} with "
            f"tensor_parallel {config.tensor_parallel}"
        )
    return named[0]


def _check_device(device: str) -> None:
    known = _DEVICE.fullmatch(device)
    if known is None:
        raise ConfigError(f"`device` must be auto, cpu, cuda or cuda:NUMBER, got {device!r}")
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"`device` is {device!r}, and torch sees no CUDA here; use `device=cpu`")
    if int(known[1] or 0) >= torch.cuda.device_count():
        raise ConfigError(f"`device` is {device!r}, and torch sees {counted(torch.cuda.device_count(), 'GPU')}, from cuda:0 on")


def dtype_of(config: EngineConfig) -> str:
    return ("fp32" if device_of(config) == "cpu" else "bf16") if config.dtype == "auto" else config.dtype


def device_bytes_of(config: EngineConfig, device: str, *, free: int | None = None) -> int:
    """The device memory of each rank. `free`: free bytes as reported by the device's process; ranks on one device share them."""
    if free is None:
        free = free_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    free //= ranks_on_one(rank_devices(config))
    if isinstance(config.device_memory, str) and config.device_memory.endswith("%"):
        return int(free * _share(config.device_memory))
    if config.device_memory is not None:
        given = parse_tier(config.device_memory, "device_memory")
        if given is None:
            raise ConfigError("device_memory must be more than 0: the engine computes into the device tier")
        return given
    return min(CPU_DEVICE_BYTES, free // 4) if device == "cpu" else int(free * CUDA_SHARE)


def _share(text: str) -> float:
    """`70%` as 0.7. Raises ConfigError."""
    number = text.removesuffix("%").strip()
    if not number.isdecimal() or not 1 <= int(number) <= 99:
        raise ConfigError(f"a share in device_memory must be from 1% to 99%, got {text!r}")
    return int(number) / 100


def limits_for(config: EngineConfig) -> Limits:
    """The configured limits, or defaults for the device."""
    return config.limits or (Limits() if device_of(config) == "cpu" else CUDA_LIMITS)


def host_bytes_of(config: EngineConfig) -> int | None:
    if config.host_memory is None:
        return min(8 * 2**30, free_bytes() // 4)
    return parse_tier(config.host_memory, "host_memory")


def check_fits(config: CacheConfig, devices: Sequence[str]) -> None:
    """Raises ConfigError, with the sizes that would fit, before any memory is allocated. `devices` has one for each rank."""
    needed, each_bytes = config.host_bytes or 0, config.device_bytes or 0
    for device, ranks in Counter(devices).items():
        if device == "cpu":
            needed += each_bytes * ranks
        elif each_bytes * ranks > (free := torch.cuda.mem_get_info(device)[0]):
            asked = f"{format_bytes(each_bytes)}{f' for each of {ranks} ranks' if ranks > 1 else ''}"
            raise ConfigError(f"device_memory of {asked} does not fit: {format_bytes(free)} are free on {device}")
    must_fit(needed, settings="device_memory or host_memory")


# ---- what every engine over a checkpoint has ------------------------------------------------------


def most_context(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """The most tokens of a request if memory holds them. Raises ConfigError for more than the model's positions allow."""
    if config.max_context is None:
        return checkpoint.max_context
    if config.max_context > checkpoint.max_context:
        raise ConfigError(f"max_context is {config.max_context}, and this model was made for {checkpoint.max_context} at most")
    return config.max_context


def must_hold(config: EngineConfig, held: int) -> None:
    """Raises ConfigError if memory cannot hold a request of the configured length."""
    if config.max_context is not None and held < config.max_context:
        raise ConfigError(
            f"max_context is {config.max_context}, and device memory holds a request of {held} tokens at most: "
            f"raise device_memory, or lower max_context"
        )


def identity_of(checkpoint: Checkpoint, dtype: str, device: str, *named: str | None) -> str:
    return "/".join([checkpoint.digest, dtype, device.split(":")[0], *(each for each in named if each is not None)])


def write_for(config: EngineConfig, device_bytes: int, store: Store | None) -> WriteChoice:
    """The write policy: as configured, or by the sizes of the tiers. Rows may spill once the host has them.

    `device_bytes` is the host memory that everything in the device tier would need, over all ranks.
    """
    picks, size = config.picks, None if store is None else size_of(store)
    chosen = choose_write(
        config.write, device_bytes=device_bytes, host_bytes=host_bytes_of(config),
        has_store=config.store is not None, store_bytes=None if size is None else size.budget_bytes,
    )  # fmt: skip
    if config.write is None and picks is not None and picks.spills:
        chosen = WriteChoice(WritePolicy.THROUGH, "rows may spill once the host has them")
    log.info("write policy: %s (%s)", chosen.write.value, chosen.why)
    return chosen


def attach_store(cache: Cache, config: EngineConfig, opened: Store | None) -> Store | None:
    if config.store is None:
        return None
    if not cache.store.host_memory:
        raise ConfigError(_NEEDS_HOST)
    store = opened or open_store(config.store, options=config.store_options)
    try:
        cache.store.attach(store, config.store_config)
    except BaseException:
        if opened is None:
            store.close()
        raise
    return store
