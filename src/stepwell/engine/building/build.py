"""Builds a running engine from a checkpoint and settings. The only place that names concrete classes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from stepwell.base.config import HOT_ROWS, CacheConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.inherited_block import InheritedBlock
from stepwell.base.meters import Counters, SystemClock
from stepwell.base.spec import ModelSpec
from stepwell.cache.build import CacheTuning, build_cache, layouts_for
from stepwell.cache.facade import Cache
from stepwell.engine.building.build_ranked import build_ranked
from stepwell.engine.building.phases import phase
from stepwell.engine.building.settings import (
    EngineConfig,
    attach_store,
    check_fits,
    check_settings,
    device_bytes_of,
    device_of,
    dtype_of,
    host_bytes_of,
    identity_of,
    limits_for,
    most_context,
    must_hold,
    write_for,
)  # fmt: skip
from stepwell.engine.drafts.base import LoadedDraft, check_target
from stepwell.engine.drafts.own_layer import MTP, load_own_layer
from stepwell.engine.drafts.separate import load_separate
from stepwell.engine.engine import Engine
from stepwell.engine.loading.checkpoint import Checkpoint, open_checkpoint
from stepwell.engine.loading.progress import WatchedSource
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.registry import build_model
from stepwell.engine.ops.kernels import Kernels, choose_kernels
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.rows import TORCH_DTYPES
from stepwell.engine.passes.spilling import Sizes, Spilling
from stepwell.engine.running.runner import Runner
from stepwell.engine.running.speculation import Speculation
from stepwell.engine.scheduling.footprint import footprint, longest_request
from stepwell.store.api import Store
from stepwell.store.registry import open_store
from stepwell.transfer.copy_engine import CopyEngine, NumpyCopyEngine, PageMemory, must_fit
from stepwell.transfer.narrow_copies import NarrowCopyEngine, as_tensor
from stepwell.transfer.store_worker import HostPages
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import PinnedAhead, TorchMemory

log = logging.getLogger(__name__)

_WITHOUT_BUFFERS = (
    "log",
    "shared-log",
    "memory",
)  # stores that do not use the host tier's memory, and are opened before it exists


def load_engine(model: str, **settings: Any) -> Engine:
    """An engine for a checkpoint by path or name. Raises ConfigError for settings that are unknown or cannot work."""
    known = [each.name for each in fields(EngineConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise ConfigError(f"unknown setting(s) {', '.join(unknown)}; known: {', '.join(known)}")
    return open_and_build(model, EngineConfig(**settings))[1]


def open_and_build(model: str, config: EngineConfig) -> tuple[Checkpoint, Engine]:
    """A checkpoint by path or name, and an engine for it. Settings are checked before weights are read.

    Raises ConfigError or StoreError, and then holds nothing.
    """
    check_settings(config)
    store = None
    if config.store is not None and config.store.partition(":")[0] in _WITHOUT_BUFFERS:
        with phase("opening the store"):
            store = open_store(config.store, options=config.store_options)  # it may be locked, or too small
    try:
        checkpoint = open_checkpoint(model)
        ranks = f" on {config.tensor_parallel} ranks" if config.tensor_parallel > 1 else ""
        log.info("loading the weights of %s%s", checkpoint.name, ranks)
        if config.tensor_parallel > 1:
            return checkpoint, build_ranked(model, checkpoint, config, store)
        watched = replace(checkpoint, source=WatchedSource(checkpoint.source, SystemClock()))
        return checkpoint, build_engine(watched, config, store=store)
    except BaseException:
        if store is not None:
            store.close()
        raise


def build_engine(
    checkpoint: Checkpoint, config: EngineConfig, *, draft: Checkpoint | None = None, store: Store | None = None,
    tuning: CacheTuning | None = None, kernels: Kernels | None = None,
) -> Engine:  # fmt: skip
    """Loads the weights, allocates memory, opens the store. The engine closes what it opened or was given.

    `draft` and `store`: those that `config.draft` and `config.store` name, if already open. `tuning` is for tests. `kernels`
    is for benchmarks, and replaces what `config.kernels` names. If this raises, the caller still owns the store.
    """
    device, dtype, most = device_of(config), dtype_of(config), most_context(config, checkpoint)
    host_bytes = host_bytes_of(config)
    ahead = _host_ahead(config, device, host_bytes)
    with phase("reading the weights"):
        model = build_model(
            checkpoint.config,
            checkpoint.source,
            dtype=dtype,
            device=device,
            page_tokens=config.page_tokens,
            kv_dtype=config.kv_dtype,
            kernels=kernels
            or choose_kernels(config.kernels, device, TORCH_DTYPES[dtype], background=config.compile_in_background),
            sparse=config.picks,
        )
        loaded = _load_draft(config, model, checkpoint, draft)
    spec = model.spec if loaded is None else replace(model.spec, states=(*model.spec.states, *loaded.states))
    spec = spec.with_checkpoint_dtype(config.checkpoint_dtype)  # concerns the cache only: passes use the device's pages
    device_bytes = device_bytes_of(config, device)
    chosen = write_for(config, device_bytes, store)
    cache_config = CacheConfig(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        write=chosen.write,
        durable=config.durable,
        placement=config.placement,
        memory_quotas=config.memory_quotas,
        vocab_size=model.vocab_size,
        hot_rows=min(HOT_ROWS if config.hot_rows is None else config.hot_rows, most),  # no request has more
    )
    if spec.spill is not None and ahead is not None:
        ahead.take()
        ahead = None  # rows that spill need other sizes: releases this before computing them
    check_fits(cache_config if ahead is None else replace(cache_config, host_bytes=None), [device])
    limits, sizes = limits_for(config), None
    if spec.spill is not None:
        sizes = Sizes.of(spec, cache_config, requests=limits.max_running, selected=model.selected, max_context=most)
        cache_config = sizes.less(cache_config, spec)
    tuning = tuning or CacheTuning()
    with phase("waiting for the memory of the tiers"):
        memories = _memories(spec, cache_config, device, tuning, config.host_block, ahead)
    picks = None if config.picks is None else config.picks.identity
    identity = identity_of(checkpoint, dtype, device, None if loaded is None else loaded.identity, picks)
    cache = _cache(spec, cache_config, memories, identity, tuning, name=checkpoint.name, layerwise=config.layerwise)
    rows = {kind: as_tensor(memories[Tier.DEVICE], kind) for kind in Kind if spec.device_parts(kind)}
    try:
        spilling = None if sizes is None else _spilling(spec, rows, memories, cache, sizes, model.kernels)
        context, max_alone = (longest_request(cache, limits.chunk_tokens, spills_upto=upto, most=most) for upto in (None, 0))
        must_hold(config, context)
        with phase("attaching the store"):
            attached = attach_store(cache, config, store)
    except BaseException:
        cache.close()
        raise
    cache.hand_over()  # the thread that runs the engine may be another
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


def _spilling(
    spec: ModelSpec, rows: Mapping[Kind, torch.Tensor], memories: Mapping[Tier, PageMemory | TorchMemory], cache: Cache,
    sizes: Sizes, kernels: Kernels,
) -> Spilling:  # fmt: skip
    assert cache.row_pages is not None, "a cache whose rows may spill must have row pages"
    host = as_tensor(memories[Tier.HOST], Kind.PREFIX)
    return Spilling(
        spec, rows, host, cache.row_pages, sizes, resolve=kernels.resolve, fetch=kernels.fetch, read=kernels.read_spilled,
        send=kernels.send, asks_host=lambda: not kernels.spilled_stay_on_device,
    )  # fmt: skip


def _load_draft(config: EngineConfig, model: Decoder, checkpoint: Checkpoint, opened: Checkpoint | None) -> LoadedDraft | None:
    """The draft that `config` names for a model. Raises ConfigError if it cannot work."""
    if config.draft is None and opened is None:
        return None
    check_target(model.spec)
    chunk = limits_for(config).chunk_tokens
    if not 1 <= config.draft_tokens < chunk:
        raise ConfigError(f"draft_tokens must be at least 1 and less than the {chunk} of a pass, got {config.draft_tokens}")
    if config.draft == MTP:
        return load_own_layer(checkpoint.config, checkpoint.source, model, dtype=dtype_of(config), kv_dtype=config.kv_dtype)
    draft = opened or open_checkpoint(str(config.draft))
    built = build_model(
        draft.config, draft.source, dtype=dtype_of(config), device=device_of(config), page_tokens=model.spec.page_tokens,
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
    *, name: str, layerwise: bool,
) -> Cache:  # fmt: skip
    copy_engine: CopyEngine
    by_layers: TorchCopyEngine | None = None
    counters = Counters()
    host: Sequence[HostPages] = [memories[Tier.HOST]] if Tier.HOST in memories else []
    if all(isinstance(memory, PageMemory) for memory in memories.values()):
        copy_engine = NumpyCopyEngine({tier: memory for tier, memory in memories.items() if isinstance(memory, PageMemory)})
    else:
        by_torch = {tier: memory for tier, memory in memories.items() if isinstance(memory, TorchMemory)}
        copy_engine = by_layers = TorchCopyEngine(by_torch, counters=counters, layerwise=spec if layerwise else None)
    if spec.narrow is not None:
        copy_engine = NarrowCopyEngine(copy_engine, spec, memories)
    cache = build_cache(
        spec, config, copy_engines=[copy_engine], model=identity, name=name, host_pages=host, tuning=tuning, counters=counters,
        arrivals=None if by_layers is None else by_layers.events_for,
    )  # fmt: skip
    if by_layers is not None:
        by_layers.on_arriving = cache.wake  # then a pass may begin
    return cache


def _memories(
    spec: ModelSpec, config: CacheConfig, device: str, tuning: CacheTuning, host_block: Callable[[int], InheritedBlock] | None,
    ahead: PinnedAhead | None,
) -> dict[Tier, PageMemory | TorchMemory]:  # fmt: skip
    layouts = layouts_for(spec, config, alignment=tuning.page_alignment_bytes)
    given: dict[Tier, memoryview] = {}
    if host_block is not None and Tier.HOST in layouts:
        given[Tier.HOST] = host_block(layouts[Tier.HOST].size_bytes).view
    if device == "cpu":
        return {tier: PageMemory(spec, layout, given.get(tier)) for tier, layout in layouts.items()}
    return {
        tier: TorchMemory(spec, layout, device)
        if tier is Tier.DEVICE
        else TorchMemory(spec, layout, given=given.get(tier), ahead=ahead)
        for tier, layout in layouts.items()
    }


def _host_ahead(config: EngineConfig, device: str, size_bytes: int | None) -> PinnedAhead | None:
    """The host tier of an engine on a GPU, allocated while weights are read. Raises ConfigError if it does not fit."""
    if device == "cpu" or config.host_block is not None or size_bytes is None:
        return None
    must_fit(size_bytes, settings="host_memory")
    return PinnedAhead(size_bytes)
