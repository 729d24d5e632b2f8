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
from stepwell.cache.backup_checkpoints import put_resting_first
from stepwell.cache.core import Core
from stepwell.cache.executor import Executor, ThreadExecutor
from stepwell.cache.expiry import note_split
from stepwell.cache.facade import Cache
from stepwell.cache.mover import Mover
from stepwell.cache.saving import write_back
from stepwell.cache.stores import Stores
from stepwell.memory.arena import Arena
from stepwell.memory.layout import ArenaLayout, lay_out
from stepwell.metrics.counters import Counters
from stepwell.policy.habits import Habits
from stepwell.policy.value import Expected, LeastRecent
from stepwell.policy.write import save_on_eviction
from stepwell.transfer.hands import Hands, NumpyHands
from stepwell.transfer.memory import PageMemory, must_fit
from stepwell.transfer.store_hands import HostPages
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
    hands: Sequence[Hands] | None = None,
    executor: Executor | None = None,
    model: str | None = None,
    clock: Clock | None = None,
    on_free: Callable[[Tier, Kind, PageIds], None] | None = None,
    host_pages: Sequence[HostPages] = (),
) -> Cache:
    """A cache for `spec` (one rank's share of the model), with one pair of hands for each rank.

    `model` is the identity of the weights, a digest where there is one. Give `executor` to run copies in
    your own way; else worker threads run `hands`, and without those the tiers are plain host memory. Give
    `host_pages`, each rank's host memory, to be able to attach a store below your own hands. Raises ConfigError, also for
    memory that cannot be had.
    """
    clock = clock or SystemClock()
    layouts = layouts_for(spec, config)
    if executor is None and hands is None:
        must_fit(sum(layout.size_bytes for layout in layouts.values()))
        memories = numpy_memories(spec, layouts)
        hands, host_pages = [NumpyHands(memories)], [memories[Tier.HOST]] if Tier.HOST in memories else []
    executor = executor or ThreadExecutor(hands or [], clock)
    arenas = {tier: Arena(tier, layout, on_free=on_free) for tier, layout in layouts.items()}
    habits = Habits(spec.page_tokens) if config.eviction is EvictionPolicy.VALUE else None
    tree = Tree(spec, arenas, Expected(habits) if habits is not None else LeastRecent())
    counters = Counters()
    core = Core(
        spec=spec,
        config=config,
        tree=tree,
        mover=Mover(tree, executor, counters, clock),
        counters=counters,
        clock=clock,
        habits=habits,
        save_first=write_back if save_on_eviction(config.write) else put_resting_first,
        saves_on_eviction=save_on_eviction(config.write),
    )
    tree.on_split = partial(note_split, core)
    namespace = Namespace(model=model or spec.name, layout=spec.fingerprint)
    stores = Stores(core, host_pages, ranks=executor.num_ranks, names_weights=model is not None)
    return Cache(core, executor, namespace, stores)
