"""Puts a cache together: the one place that names concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from stepwell.base.clock import Clock, SystemClock
from stepwell.base.config import CacheConfig, EvictionPolicy
from stepwell.base.ids import Kind, Tier
from stepwell.base.keys import Namespace
from stepwell.base.plan import PageIds
from stepwell.base.spec import ModelSpec
from stepwell.cache.facade import Cache
from stepwell.jobs.copy_executor import CopyExecutor, ThreadCopyExecutor
from stepwell.memory.arena import Arena
from stepwell.memory.layout import ArenaLayout, lay_out
from stepwell.metrics.counters import Counters
from stepwell.policy.reuse_model import ReuseModel
from stepwell.policy.value import Expected, LeastRecent
from stepwell.policy.write import save_on_eviction
from stepwell.store_tier.tier import StoreTier
from stepwell.tiers.copies import CopyJobs
from stepwell.tiers.expiry import note_split
from stepwell.tiers.saving import write_back
from stepwell.tiers.state import CacheState
from stepwell.transfer.copy_engine import CopyEngine, NumpyCopyEngine
from stepwell.transfer.memory import PageMemory, must_fit
from stepwell.transfer.store_worker import HostPages
from stepwell.tree.references import References
from stepwell.tree.tree import Tree


def layouts_for(spec: ModelSpec, config: CacheConfig) -> dict[Tier, ArenaLayout]:
    """How each tier's bytes are cut, for one rank. Raises ConfigError when a tier is too small."""
    budgets = {Tier.DEVICE: config.device_bytes, Tier.HOST: config.host_bytes}
    return {
        tier: lay_out(spec, budget_bytes=budget, alignment=config.page_alignment_bytes)
        for tier, budget in budgets.items()
        if budget is not None
    }


def numpy_memories(spec: ModelSpec, layouts: Mapping[Tier, ArenaLayout]) -> dict[Tier, PageMemory]:
    """Host memory for every tier: what a machine without a GPU has."""
    return {tier: PageMemory(spec, layout) for tier, layout in layouts.items()}


def build_cache(
    spec: ModelSpec,
    config: CacheConfig,
    *,
    copy_engines: Sequence[CopyEngine] | None = None,
    executor: CopyExecutor | None = None,
    model: str | None = None,
    clock: Clock | None = None,
    on_free: Callable[[Tier, Kind, PageIds], None] | None = None,
    host_pages: Sequence[HostPages] = (),
) -> Cache:
    """A cache for `spec` (one rank's share of the model), with one copy engine for each rank.

    `model` is the identity of the weights, a digest where there is one. Give `executor` to run copies in
    your own way; else worker threads run `copy_engines`, and without those the tiers are plain host memory. Give
    `host_pages`, each rank's host memory, to be able to attach a store below your own copy engines. Raises ConfigError, also for
    memory that cannot be had.
    """
    clock = clock or SystemClock()
    layouts = layouts_for(spec, config)
    if executor is None and copy_engines is None:
        must_fit(sum(layout.size_bytes for layout in layouts.values()))
        memories = numpy_memories(spec, layouts)
        copy_engines, host_pages = [NumpyCopyEngine(memories)], [memories[Tier.HOST]] if Tier.HOST in memories else []
    executor = executor or ThreadCopyExecutor(copy_engines or [], clock)
    arenas = {tier: Arena(tier, layout, on_free=on_free) for tier, layout in layouts.items()}
    reuse = ReuseModel(spec.page_tokens) if config.eviction is EvictionPolicy.VALUE else None
    tree = Tree(spec, arenas, Expected(reuse) if reuse is not None else LeastRecent())
    counters, refs = Counters(), References(tree)
    core = CacheState(
        spec=spec,
        config=config,
        tree=tree,
        refs=refs,
        copies=CopyJobs(tree, refs, executor, counters, clock),
        counters=counters,
        clock=clock,
        reuse=reuse,
        write_back=write_back if save_on_eviction(config.write) else None,
    )
    tree.on_split.append(partial(note_split, core))
    namespace = Namespace(model=model or spec.name, layout=spec.fingerprint)
    stores = StoreTier(core, host_pages, ranks=executor.num_ranks, names_weights=model is not None)
    core.below = stores
    return Cache(core, namespace, stores)
