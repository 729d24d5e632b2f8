"""From a checkpoint and sizes to a running engine: the one place that names concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from stepwell.base.config import HOT_ROWS, CacheConfig, PlacementConfig, StoreConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.inherited_block import InheritedBlock
from stepwell.base.meters import Counters
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families import KV_DTYPES
from stepwell.base.spec.families.summaries import DSA
from stepwell.base.units import format_bytes, parse_bytes
from stepwell.cache.build import CacheTuning, build_cache, layouts_for
from stepwell.cache.facade import Cache
from stepwell.engine.drafts.base import LoadedDraft, check_target
from stepwell.engine.drafts.own_layer import MTP, load_own_layer
from stepwell.engine.drafts.separate import load_separate
from stepwell.engine.engine import Engine
from stepwell.engine.footprint import footprint, footprint_of, longest_request
from stepwell.engine.loading.checkpoint import Checkpoint, open_checkpoint
from stepwell.engine.loading.known import known_names
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.registry import build_model, share_of, spec_of
from stepwell.engine.models.selectors import Sparse
from stepwell.engine.ops.kernels import Kernels, Report, check_kernels
from stepwell.engine.passes.pages import TORCH_DTYPES, DevicePages
from stepwell.engine.passes.spilling import Sizes, Spilling
from stepwell.engine.runner import Facts, Runner
from stepwell.engine.scheduler import Limits
from stepwell.engine.speculation import Speculation
from stepwell.engine.workers.rank_workers import RankWorkers, WorkerLimits, WorkerSetup
from stepwell.engine.workers.ranked_runner import RankedRunner
from stepwell.jobs.executors import Arrivals
from stepwell.store.api import Store
from stepwell.store.registry import find_opener, open_store
from stepwell.transfer.copy_engine import CopyEngine, NumpyCopyEngine, PageMemory, free_bytes, must_fit
from stepwell.transfer.store_worker import HostPages
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import TorchMemory

CUDA_SHARE = 0.88  # of what is free on a GPU once the weights are there; passes need room of their own
CUDA_LIMITS = Limits(max_running=64, chunk_tokens=8192)  # a GPU is busy with so many tokens, and waits for fewer
CPU_DEVICE_BYTES = 2 * 2**30
REPLACE_HOT = ("score", "age")
_WITHOUT_BUFFERS = ("log", "shared-log", "memory")  # need not know the host tier's memory: opened before there is one
_NEEDS_HOST = "a store needs a host tier above it: give host_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and choices of an engine. Memory in bytes or as people write it (`8GiB`, and for `device_memory` also `70%` of what
    the weights leave); None for a sensible default.

    A `host_memory` of 0 does without a host tier.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str | None = None  # what attention rows are kept in: as `dtype`, or fp8 where the model has such rows
    kernels: str = "auto"  # or torch, or flashinfer: what runs the operations of a pass
    page_tokens: int | None = None
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    store: str | None = None  # as in `log:DIR` or `mooncake:FILE`
    store_options: Mapping[str, str] = field(default_factory=dict)
    store_config: StoreConfig = field(default_factory=StoreConfig)
    write: WritePolicy = WritePolicy.THROUGH
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    memory_quotas: Mapping[str, float] = field(default_factory=dict)  # shares of each memory tier, by tenant
    limits: Limits | None = None  # None for what suits the device
    layerwise: bool = True  # on CUDA: a pass may begin while its pages are copied to the device, and waits for each layer
    compute_while_loading: bool = False  # where it is sooner, by measured speeds, the end of a cached prefix is computed again
    draft: str | None = None  # a checkpoint that guesses tokens ahead, or `mtp` for the model's own layers that do
    draft_tokens: int = 4  # guessed in one pass
    draft_max_running: int = 16  # requests that decode at once, above which nothing is guessed
    sparse: str | None = None  # what picks the tokens that answers look at: quest or clusterkv, or dsa for a model's own index
    sparse_budget: int | None = None  # how many tokens are picked; None: 2,048
    # Rows of each layer that a request keeps on the device once others are on the host alone. None: 4,096 with dsa; with another
    # selector rows stay on the device.
    hot_rows: int | None = None
    replace_hot: str = "score"  # which hot row is replaced first: that of the lowest score in a step, or by age the oldest
    fetch_beside: bool = False  # steps over rows on the host fetch what is missing while they go on, until they need it
    tensor_parallel: int = (
        1  # ranks that compute the model together, each in a process of its own; memory of a device is each one's
    )
    restart_workers: bool = False  # ranks that are lost are started anew; else the engine then computes nothing any more
    worker_limits: WorkerLimits = field(default_factory=WorkerLimits)
    stage_ahead: bool = False  # prompts over rows on the host copy the next layer's while one is computed
    host_block: Callable[[int], memoryview] | None = None  # makes the host tier's memory, where others are to have it mapped too

    @property
    def picks(self) -> Sparse | None:
        """What picks, checked. Raises ConfigError."""
        if self.sparse is None and self.sparse_budget is not None:
            raise ConfigError("sparse_budget says how many tokens a selector picks: name one with sparse")
        if self.sparse is None and self.hot_rows is not None:
            raise ConfigError("hot_rows are for rows that are picked: name what picks them with sparse, or leave hot_rows out")
        if self.sparse is None:
            return None
        return Sparse(selector=self.sparse, budget=self.sparse_budget, hot_rows=self.hot_rows is not None)


def load_engine(model: str, **settings: Any) -> Engine:
    """An engine for a checkpoint by path or name. Raises ConfigError for settings that are not known or cannot work."""
    known = [each.name for each in fields(EngineConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise ConfigError(f"unknown setting(s) {', '.join(unknown)}; known: {', '.join(known)}")
    return open_and_build(model, EngineConfig(**settings))[1]


def open_and_build(model: str, config: EngineConfig) -> tuple[Checkpoint, Engine]:
    """A checkpoint by path or name, and an engine for it. What is wrong with the settings is said before weights are read.

    Raises ConfigError or StoreError, and then holds nothing.
    """
    check_settings(config)
    store = None
    if config.store is not None and config.store.partition(":")[0] in _WITHOUT_BUFFERS:
        store = open_store(config.store, options=config.store_options)  # it may be locked, or too small
    try:
        checkpoint = open_checkpoint(model)
        if config.tensor_parallel > 1:
            return checkpoint, _build_ranked(model, checkpoint, config, store)
        return checkpoint, build_engine(checkpoint, config, store=store)
    except BaseException:
        if store is not None:
            store.close()
        raise


def check_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings that can work with no model on this machine. Takes nothing."""
    device, dtype = _device(config), _dtype(config)
    if dtype not in TORCH_DTYPES or (config.kv_dtype is not None and config.kv_dtype not in KV_DTYPES):
        raise ConfigError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, and kv_dtype of {', '.join(KV_DTYPES)}")
    check_kernels(config.kernels, device, TORCH_DTYPES[dtype])
    _check_sparse(config)
    _check_ranks(config)
    if config.page_tokens is not None and config.page_tokens < 1:
        raise ConfigError(f"page_tokens must be at least 1, got {config.page_tokens}")
    sizes = CacheConfig(device_bytes=_device_bytes(config, device), host_bytes=_host_bytes(config))
    _must_fit(sizes, device, config.tensor_parallel)
    if config.store is not None:
        find_opener(config.store)
        if sizes.host_bytes is None:
            raise ConfigError(_NEEDS_HOST)
    if config.draft not in (None, MTP, *known_names()) and not Path(str(config.draft)).exists():
        raise ConfigError(
            f"there is no draft model at {config.draft!r}: give a path, {MTP}, or one of {', '.join(known_names())}"
        )


def build_engine(
    checkpoint: Checkpoint, config: EngineConfig, *, draft: Checkpoint | None = None, store: Store | None = None,
    tuning: CacheTuning | None = None, kernels: Kernels | None = None,
) -> Engine:  # fmt: skip
    """Loads the weights, takes the memory, opens the store. The engine closes what it opened or was given.

    `draft` is the checkpoint that `config.draft` names, and `store` the store that `config.store` does, where they are open
    already. `tuning` is for tests, and `kernels` for benchmarks: those of the model, in place of what `config.kernels` names.
    Should it raise, the store is still the caller's.
    """
    device, dtype = _device(config), _dtype(config)
    model = build_model(
        checkpoint.config,
        checkpoint.source,
        dtype=dtype,
        device=device,
        page_tokens=config.page_tokens,
        kv_dtype=config.kv_dtype,
        kernels=kernels or config.kernels,
        sparse=config.picks,
    )
    loaded = _load_draft(config, model, checkpoint, draft)
    spec = model.spec if loaded is None else replace(model.spec, states=(*model.spec.states, *loaded.states))
    cache_config = CacheConfig(
        device_bytes=_device_bytes(config, device),
        host_bytes=_host_bytes(config),
        write=config.write,
        placement=config.placement,
        memory_quotas=config.memory_quotas,
        vocab_size=model.vocab_size,
        hot_rows=HOT_ROWS if config.hot_rows is None else config.hot_rows,
    )
    _must_fit(cache_config, device)
    limits, sizes = limits_for(config), None
    if spec.spill is not None:
        sizes = Sizes.of(
            spec, cache_config, requests=limits.max_running, selected=model.selected, max_context=checkpoint.max_context,
            stage_ahead=config.stage_ahead, fetch_beside=config.fetch_beside, by_score=config.replace_hot == "score",
        )  # fmt: skip
        cache_config = sizes.less(cache_config, spec)
    tuning = replace(tuning or CacheTuning(), compute_while_loading=config.compute_while_loading)
    memories = _memories(spec, cache_config, device, tuning, config.host_block)
    picks = None if config.picks is None else config.picks.identity
    identity = _identity(checkpoint, dtype, device, None if loaded is None else loaded.identity, picks)
    cache = _cache(spec, cache_config, memories, identity, tuning, layerwise=config.layerwise)
    rows = {kind: _tensor(memories[Tier.DEVICE], kind) for kind in Kind if spec.device_parts(kind)}
    try:
        spilling = None if sizes is None else _spilling(spec, rows, memories, cache, sizes, model.kernels)
        attached = _attach(cache, config, store)
    except BaseException:
        cache.close()
        raise
    context, max_alone = (
        longest_request(cache, limits.chunk_tokens, spills_upto=upto, most=checkpoint.max_context) for upto in (None, 0)
    )  # fmt: skip
    cache.hand_over()  # to whoever will run the engine, on whatever thread
    return Engine(
        Runner(model, DevicePages(model.spec, rows, inside=None if loaded is None else spec, spilling=spilling)),
        cache,
        checkpoint.text,
        limits=limits,
        max_context=context,
        max_alone=max_alone,
        footprint=footprint(DevicePages(spec, rows)),
        eos_ids=checkpoint.eos_ids,
        store=attached,
        speculation=None if loaded is None else _speculation(loaded, cache, spec, rows, config),
    )


def _check_ranks(config: EngineConfig) -> None:
    """Raises ConfigError for what ranks in several processes cannot do."""
    if config.tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel must be at least 1, got {config.tensor_parallel}")
    if config.tensor_parallel == 1:
        if config.restart_workers:
            raise ConfigError("restart_workers is for ranks in processes of their own: give tensor_parallel too")
        return
    for name, given in (("a draft", config.draft), ("sparse", config.sparse)):
        if given is not None:
            raise ConfigError(f"{name} runs on one rank only, so far: leave it out, or use tensor_parallel 1")
    _rank_devices(config)


def _rank_devices(config: EngineConfig) -> tuple[str, ...]:
    """The device of each rank. Raises ConfigError where there are too few."""
    device, count = _device(config), config.tensor_parallel
    if device == "cpu":
        return ("cpu",) * count
    if ":" in device:
        raise ConfigError(f"{count} ranks need a GPU each: give --device cuda, and choose which with CUDA_VISIBLE_DEVICES")
    if torch.cuda.device_count() < count:
        raise ConfigError(f"--tensor-parallel {count} needs as many GPUs, and torch sees {torch.cuda.device_count()}")
    return tuple(f"cuda:{rank}" for rank in range(count))


def _build_ranked(model: str, checkpoint: Checkpoint, config: EngineConfig, store: Store | None) -> Engine:
    """An engine whose model is in worker processes. Their host memory is one, of whole rows, whatever their number."""
    count, device, dtype = config.tensor_parallel, _device(config), _dtype(config)
    spec = spec_of(checkpoint.config, dtype=dtype, page_tokens=config.page_tokens, kv_dtype=config.kv_dtype)
    share = share_of(spec, count)
    host_bytes, tuning = _host_bytes(config), CacheTuning()
    host = None if host_bytes is None else InheritedBlock(host_bytes)
    devices = _rank_devices(config)
    workers = RankWorkers(
        WorkerSetup(
            model=model, digest=checkpoint.digest, dtype=dtype, kv_dtype=config.kv_dtype, kernels=config.kernels,
            page_tokens=spec.page_tokens, devices=devices, backend="gloo" if device == "cpu" else "nccl",
            host=host, alignment=tuning.page_alignment_bytes,
            device_bytes=lambda free: _device_bytes(config, device, free=free if device != "cpu" else None),
            threads=max(torch.get_num_threads() // count, 1) if device == "cpu" else None,
        ),
        config.worker_limits,
        restart=config.restart_workers,
    )  # fmt: skip
    workers.start()
    try:
        sizes = CacheConfig(
            device_bytes=workers.device_bytes, host_bytes=host_bytes, write=config.write, placement=config.placement,
            memory_quotas=config.memory_quotas, vocab_size=int(workers.facts["vocab_size"]),
        )  # fmt: skip
        layouts = layouts_for(spec, sizes, alignment=tuning.page_alignment_bytes, shared_by=count)
        cache = build_cache(
            spec, sizes, executor=workers.copies, model=_identity(checkpoint, dtype, device), shared_by=count, tuning=tuning,
            host_pages=[] if host is None else [PageMemory(spec, layouts[Tier.HOST], host.view)],
        )  # fmt: skip
        try:
            attached = _attach(cache, config, store)
        except BaseException:
            cache.close()
            raise
    except BaseException:
        workers.close()
        raise
    limits = limits_for(config)
    context = longest_request(cache, limits.chunk_tokens, most=checkpoint.max_context)
    cache.hand_over()
    facts = Facts(vocab_size=int(workers.facts["vocab_size"]), on_cuda=device != "cpu")
    return Engine(
        RankedRunner(workers=workers, spec=spec, facts=facts, kernels=Report(chosen=dict(workers.facts["kernels"]))),
        cache, checkpoint.text, limits=limits, max_context=context, footprint=footprint_of(share), eos_ids=checkpoint.eos_ids,
        store=attached,
    )  # fmt: skip


def _identity(checkpoint: Checkpoint, dtype: str, device: str, *named: str | None) -> str:
    return "/".join([checkpoint.digest, dtype, device.split(":")[0], *(each for each in named if each is not None)])


def _check_sparse(config: EngineConfig) -> None:
    """Raises ConfigError for a selector that is not known, and where rows could spill to nowhere."""
    picks = config.picks
    if picks is None or not picks.spills:
        return
    how = f"sparse {picks.selector}" + ("" if picks.selector == DSA else " with hot_rows")
    instead = "sparse" if picks.selector == DSA else "hot_rows"
    if config.replace_hot not in REPLACE_HOT:
        raise ConfigError(f"replace_hot must be one of {', '.join(REPLACE_HOT)}, got {config.replace_hot!r}")
    if (config.hot_rows or 0) < 0:
        raise ConfigError(f"hot_rows must be 0 or more, got {config.hot_rows}")
    if _host_bytes(config) is None:
        raise ConfigError(f"{how} keeps attention rows in a host tier: give host_memory, or leave {instead} out")
    if not config.write.saves_on_commit:
        raise ConfigError(f"{how} needs the write policy through, for rows leave the device once the host has them; "
                          f"got {config.write.value}")  # fmt: skip


def _spilling(
    spec: ModelSpec, rows: Mapping[Kind, torch.Tensor], memories: Mapping[Tier, PageMemory | TorchMemory], cache: Cache,
    sizes: Sizes, kernels: Kernels,
) -> Spilling:  # fmt: skip
    assert cache.row_pages is not None, "a cache whose rows may spill says where they are"
    host = _tensor(memories[Tier.HOST], Kind.PREFIX)
    return Spilling(
        spec, rows, host, cache.row_pages, sizes, resolve=kernels.resolve, fetch=kernels.fetch, read=kernels.read_spilled,
        asks_host=lambda: not kernels.spilled_stay_on_device,
    )  # fmt: skip


def _load_draft(config: EngineConfig, model: Decoder, checkpoint: Checkpoint, opened: Checkpoint | None) -> LoadedDraft | None:
    """What `config` says is to guess tokens for a model. Raises ConfigError for what cannot."""
    if config.draft is None and opened is None:
        return None
    check_target(model.spec)
    chunk = limits_for(config).chunk_tokens
    if not 1 <= config.draft_tokens < chunk:
        raise ConfigError(f"draft_tokens must be at least 1 and less than the {chunk} of a pass, got {config.draft_tokens}")
    if config.draft == MTP:
        return load_own_layer(checkpoint.config, checkpoint.source, model, dtype=_dtype(config), kv_dtype=config.kv_dtype)
    draft = opened or open_checkpoint(str(config.draft))
    built = build_model(
        draft.config, draft.source, dtype=_dtype(config), device=_device(config), page_tokens=model.spec.page_tokens,
        kernels=config.kernels, ranks=model.ranks,
    )  # fmt: skip
    return load_separate(built, model, draft.digest)


def _speculation(
    loaded: LoadedDraft, cache: Cache, spec: ModelSpec, rows: Mapping[Kind, torch.Tensor], config: EngineConfig
) -> Speculation:
    return Speculation(
        loaded.over(spec, rows),
        cache,
        DevicePages(spec, rows),
        loaded.states,
        tokens=config.draft_tokens,
        max_running=config.draft_max_running,
    )


def _cache(
    spec: ModelSpec, config: CacheConfig, memories: Mapping[Tier, PageMemory | TorchMemory], identity: str, tuning: CacheTuning,
    *, layerwise: bool,
) -> Cache:  # fmt: skip
    copy_engine: CopyEngine
    arrivals: Arrivals | None = None
    counters = Counters()
    host: Sequence[HostPages] = [memories[Tier.HOST]] if Tier.HOST in memories else []
    if all(isinstance(memory, PageMemory) for memory in memories.values()):
        copy_engine = NumpyCopyEngine({tier: memory for tier, memory in memories.items() if isinstance(memory, PageMemory)})
    else:
        by_torch = {tier: memory for tier, memory in memories.items() if isinstance(memory, TorchMemory)}
        copy_engine = by_layers = TorchCopyEngine(by_torch, counters=counters, layerwise=spec if layerwise else None)
        arrivals = by_layers.events_for
    return build_cache(
        spec, config, copy_engines=[copy_engine], model=identity, host_pages=host, tuning=tuning, counters=counters,
        arrivals=arrivals,
    )  # fmt: skip


def _attach(cache: Cache, config: EngineConfig, opened: Store | None) -> Store | None:
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


def _memories(
    spec: ModelSpec, config: CacheConfig, device: str, tuning: CacheTuning, host_block: Callable[[int], memoryview] | None
) -> dict[Tier, PageMemory | TorchMemory]:
    layouts = layouts_for(spec, config, alignment=tuning.page_alignment_bytes)
    given: dict[Tier, memoryview] = {}
    if host_block is not None and Tier.HOST in layouts:
        given[Tier.HOST] = host_block(layouts[Tier.HOST].size_bytes)
    if device == "cpu":
        return {tier: PageMemory(spec, layout, given.get(tier)) for tier, layout in layouts.items()}
    return {
        tier: TorchMemory(spec, layout, device if tier is Tier.DEVICE else "cpu", given.get(tier))
        for tier, layout in layouts.items()
    }


def _tensor(memory: PageMemory | TorchMemory, kind: Kind) -> torch.Tensor:
    rows = memory.rows(kind)
    return rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)


# ---- defaults, and whether they fit ---------------------------------------------------------------


def _device(config: EngineConfig) -> str:
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {config.device!r} was asked for, but torch sees no CUDA here; use --device cpu")
    kind, _, number = config.device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:NUMBER, got {config.device!r}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {config.device!r} was asked for, but torch sees {torch.cuda.device_count()}, from cuda:0 on")
    return config.device


def _dtype(config: EngineConfig) -> str:
    return ("fp32" if _device(config) == "cpu" else "bf16") if config.dtype == "auto" else config.dtype


def _device_bytes(config: EngineConfig, device: str, *, free: int | None = None) -> int:
    """`free` is what whoever has the device says is free there."""
    if free is None:
        free = free_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    if isinstance(config.device_memory, str) and config.device_memory.endswith("%"):
        return int(free * _share(config.device_memory))
    if config.device_memory is not None:
        return parse_bytes(config.device_memory)
    return min(CPU_DEVICE_BYTES, free // 4) if device == "cpu" else int(free * CUDA_SHARE)


def _share(text: str) -> float:
    """`70%` as 0.7. Raises ConfigError."""
    number = text.removesuffix("%").strip()
    if not number.isdecimal() or not 1 <= int(number) <= 99:
        raise ConfigError(f"a share of device memory must be from 1% to 99%, got {text!r}")
    return int(number) / 100


def limits_for(config: EngineConfig) -> Limits:
    """Those that were given, or what suits the device."""
    return config.limits or (Limits() if _device(config) == "cpu" else CUDA_LIMITS)


def _host_bytes(config: EngineConfig) -> int | None:
    if config.host_memory is None:
        return min(8 * 2**30, free_bytes() // 4)
    return parse_bytes(config.host_memory) or None


def _must_fit(config: CacheConfig, device: str, ranks: int = 1) -> None:
    """Raises ConfigError, saying what would fit, before memory is taken that is not there."""
    needed = config.host_bytes or 0
    if device == "cpu":
        needed += (config.device_bytes or 0) * ranks
    else:
        free = torch.cuda.mem_get_info(device)[0]
        if (config.device_bytes or 0) > free:
            asked = format_bytes(config.device_bytes or 0)
            raise ConfigError(f"device memory of {asked} does not fit: {format_bytes(free)} are free on {device}")
    must_fit(needed, settings="device_memory or host_memory")
