"""Builds an engine whose model is in worker processes, one for each rank. The only place that names its concrete classes."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from stepwell.base.config import CacheConfig
from stepwell.base.ids import Kind, Tier
from stepwell.base.inherited_block import InheritedBlock
from stepwell.base.spec import ModelSpec
from stepwell.cache.build import CacheTuning, build_cache, layouts_for
from stepwell.engine.building.settings import (
    EngineConfig,
    attach_store,
    backend_for,
    device_bytes_of,
    device_of,
    dtype_of,
    host_bytes_of,
    identity_of,
    limits_for,
    most_context,
    must_hold,
    rank_devices,
    write_for,
)  # fmt: skip
from stepwell.engine.engine import Engine
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.models.registry import share_of, spec_of
from stepwell.engine.running.runner import Facts
from stepwell.engine.scheduling.footprint import footprint_of, longest_request
from stepwell.engine.workers.rank_workers import RankWorkers
from stepwell.engine.workers.ranked_runner import RankedRunner
from stepwell.engine.workers.worker_setup import WorkerSetup
from stepwell.store.api import Store
from stepwell.transfer.copy_engine import PageMemory


def build_ranked(model: str, checkpoint: Checkpoint, config: EngineConfig, store: Store | None) -> Engine:
    """Starts the workers, and waits until they have loaded. All share one host tier, which holds unsplit rows.

    If this raises, it leaves nothing running, and the caller still owns the store.
    """
    count, device, dtype, devices = config.tensor_parallel, device_of(config), dtype_of(config), rank_devices(config)
    most = most_context(config, checkpoint)
    spec = spec_of(checkpoint.config, dtype=dtype, page_tokens=config.page_tokens, kv_dtype=config.kv_dtype)
    share = share_of(spec, count)
    host_bytes, tuning = host_bytes_of(config), CacheTuning()
    host = None if host_bytes is None else (config.host_block or InheritedBlock)(host_bytes)
    setup = WorkerSetup(
        model=model, digest=checkpoint.digest, dtype=dtype, kv_dtype=config.kv_dtype, kernels=config.kernels,
        page_tokens=spec.page_tokens, devices=devices, backend=backend_for(devices),
        host=host, alignment=tuning.page_alignment_bytes,
        device_bytes=lambda free: device_bytes_of(config, device, free=free if device != "cpu" else None),
        threads=max(torch.get_num_threads() // count, 1) if device == "cpu" else None,
    )  # fmt: skip
    workers = RankWorkers(setup, config.worker_limits, restart=config.restart_workers)
    workers.start()
    with ExitStack() as undo:
        undo.callback(workers.close)
        chosen = write_for(config, held_by_all(workers.device_bytes, spec, share), store)
        sizes = CacheConfig(
            device_bytes=workers.device_bytes, host_bytes=host_bytes, write=chosen.write, durable=config.durable,
            placement=config.placement, memory_quotas=config.memory_quotas, vocab_size=workers.vocab_size,
        )  # fmt: skip
        layouts = layouts_for(spec, sizes, alignment=tuning.page_alignment_bytes, shared_by=count)
        cache = build_cache(
            spec, sizes, executor=workers.copies, model=identity_of(checkpoint, dtype, device), name=checkpoint.name,
            shared_by=count, tuning=tuning,
            host_pages=[] if host is None else [PageMemory(spec, layouts[Tier.HOST], host.view)],
        )  # fmt: skip
        opened = undo.enter_context(ExitStack())  # closed after the cache, which may still write to it
        undo.callback(cache.close)
        attached = attach_store(cache, config, store)
        if attached is not None and attached is not store:
            opened.callback(attached.close)
        limits = limits_for(config)
        context = longest_request(cache, limits.chunk_tokens, most=most)
        must_hold(config, context)
        cache.hand_over()
        facts = Facts(vocab_size=workers.vocab_size, on_cuda=device != "cpu")
        engine = Engine(
            RankedRunner(workers=workers, spec=spec, facts=facts), cache, checkpoint.text, limits=limits, max_context=context,
            footprint=footprint_of(share), eos_ids=checkpoint.eos_ids, store=attached,
        )  # fmt: skip
        opened.pop_all()
        undo.pop_all()
    return engine


def held_by_all(device_bytes: int, spec: ModelSpec, share: ModelSpec) -> int:
    """The host memory for everything that ranks hold in `device_bytes` each: the host has whole rows, a rank its share of them.

    Computed from the sizes of prefix pages, which take most of the memory, if the model has any.
    """
    kinds = (Kind.PREFIX,) if share.object_bytes(Kind.PREFIX) else tuple(Kind)
    whole_bytes, share_bytes = (sum(each.object_bytes(kind) for kind in kinds) for each in (spec, share))
    return device_bytes * whole_bytes // share_bytes
