"""Puts a cache together: the one place that names concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stepwell.base.config import CacheConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import Clock, Counters, SystemClock
from stepwell.base.prompt import Namespace
from stepwell.base.spec import ModelSpec
from stepwell.base.tasks import PageIds
from stepwell.cache.facade import Cache
from stepwell.jobs.executors import Arrivals, CopyExecutor, ThreadCopyExecutor
from stepwell.jobs.wakeup import Wakeup
from stepwell.memory.arena import Arena
from stepwell.memory.layout import PAGE_ALIGNMENT_BYTES, ArenaLayout, lay_out
from stepwell.memory.row_pages import RowPages
from stepwell.policy.placement import PlacementRules, rules_for
from stepwell.policy.value import Expected, ReuseModel, ValuePolicy
from stepwell.store_tier.tier import StoreTier
from stepwell.tiers.copies import CopyJobs
from stepwell.tiers.lifetime import note_split
from stepwell.tiers.saving import write_back
from stepwell.tiers.state import CacheState
from stepwell.transfer.copy_engine import CopyEngine, NumpyCopyEngine, PageMemory, must_fit
from stepwell.transfer.store_worker import HostPages
from stepwell.tree.tree import Tree

COPY_TIMEOUT_S = (
    30.0  # without progress for so long, a copy has failed: one takes milliseconds, and waiting in line is not counted
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTuning:
    """What no operator has a reason to change. The defaults are what ships; the simulator and tests make others."""

    page_alignment_bytes: int = PAGE_ALIGNMENT_BYTES
    copy_timeout_s: float = COPY_TIMEOUT_S
    eviction: ValuePolicy | None = None  # another order of eviction than the one that is learned
    placement: PlacementRules | None = None  # other rules than those that the settings make

    def __post_init__(self) -> None:
        if self.copy_timeout_s <= 0:
            raise ConfigError(f"copy_timeout_s must be positive, got {self.copy_timeout_s}")
        alignment = self.page_alignment_bytes
        if alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"page_alignment_bytes must be a power of two, got {alignment}")


def layouts_for(
    spec: ModelSpec, config: CacheConfig, *, alignment: int = PAGE_ALIGNMENT_BYTES, shared_by: int = 1
) -> dict[Tier, ArenaLayout]:
    """How each tier's bytes are divided, for one rank. Raises ConfigError if a tier is too small.

    `shared_by` is the number of ranks that share one host memory; each has its share of a row on its device.
    """
    budgets = {Tier.DEVICE: config.device_bytes, Tier.HOST: config.host_bytes}
    specs = {Tier.DEVICE: spec if shared_by == 1 else spec.for_ranks(shared_by), Tier.HOST: spec}
    return {
        tier: lay_out(specs[tier], tier=tier, budget_bytes=budget, alignment=alignment)
        for tier, budget in budgets.items()
        if budget is not None
    }


def numpy_memories(spec: ModelSpec, layouts: Mapping[Tier, ArenaLayout]) -> dict[Tier, PageMemory]:
    """Host memory for every tier: what a machine without a GPU has."""
    return {tier: PageMemory(spec, layout) for tier, layout in layouts.items()}


def _check_spill(config: CacheConfig) -> None:
    if config.device_bytes is None or config.host_bytes is None:
        raise ConfigError("rows can spill from a device tier to a host tier: give both device_bytes and host_bytes")
    if not config.write.saves_on_commit:
        raise ConfigError(
            f"rows can spill once the host has them: that needs the write policy 'through', not {config.write.value!r}"
        )


def _check_narrow(config: CacheConfig, shared_by: int) -> None:
    if config.device_bytes is None or config.host_bytes is None:
        raise ConfigError(
            "checkpoints in eight bits are made between a device tier and a host tier of the cache: give both device_bytes and "
            "host_bytes, or leave the checkpoint dtype out"
        )
    if shared_by > 1:
        raise ConfigError("checkpoints in eight bits need one rank that has whole rows, so far: leave the checkpoint dtype out")


def _plain_copies(spec: ModelSpec, memories: Mapping[Tier, PageMemory]) -> CopyEngine:
    engine = NumpyCopyEngine(memories)
    if spec.narrow is None:
        return engine
    from stepwell.transfer.narrow_copies import NarrowCopyEngine  # needs torch

    return NarrowCopyEngine(engine, spec, memories)


def build_cache(
    spec: ModelSpec,
    config: CacheConfig,
    *,
    copy_engines: Sequence[CopyEngine] | None = None,
    executor: CopyExecutor | None = None,
    model: str | None = None,
    name: str = "",
    clock: Clock | None = None,
    on_free: Callable[[Tier, Kind, PageIds], None] | None = None,
    host_pages: Sequence[HostPages] = (),
    tuning: CacheTuning | None = None,
    counters: Counters | None = None,
    arrivals: Arrivals | None = None,
    shared_by: int = 1,
) -> Cache:
    """A cache for `spec` (one rank's share of the model), with one copy engine for each rank.

    `model` is the identity of the weights, a digest where there is one, `name` what people call them. Give `executor` to run
    copies in your own way; else worker threads run `copy_engines`, and without those the tiers are plain host memory. Give
    `host_pages`, each rank's host memory, to be able to attach a store below your own copy engines. `tuning` is for
    simulators and tests. Give `counters` where your copy engines count too, and `arrivals` where a pass may begin on loads of the
    only rank before they have ended. With `shared_by`, that number of ranks share one host memory of whole rows: `spec` is
    then that of the whole model, and the device's bytes are each rank's. If `spec.narrow` is set, `copy_engines` must be
    `transfer.narrow_copies` or equivalent. Raises ConfigError, also if memory is not available.
    """
    clock, tuning = clock or SystemClock(), tuning or CacheTuning()
    if spec.narrow is not None:
        _check_narrow(config, shared_by)
    layouts = layouts_for(spec, config, alignment=tuning.page_alignment_bytes, shared_by=shared_by)
    if executor is None and copy_engines is None:
        must_fit(sum(layout.size_bytes for layout in layouts.values()))
        memories = numpy_memories(spec, layouts)
        copy_engines, host_pages = [_plain_copies(spec, memories)], [memories[Tier.HOST]] if Tier.HOST in memories else []
    executor = executor or ThreadCopyExecutor(copy_engines or [], clock)
    arenas = {tier: Arena(tier, layout, on_free=on_free) for tier, layout in layouts.items()}
    row_pages = None
    if spec.spill is not None:
        _check_spill(config)
        row_pages = RowPages(arenas[Tier.DEVICE])
    reuse = ReuseModel(spec.page_tokens)
    value = tuning.eviction or Expected(reuse)
    tree = Tree(spec, arenas, value, config.memory_quotas, row_pages=row_pages, evict_duplicates_first=config.write.is_exclusive)
    counters, wakeup = counters or Counters(), Wakeup()
    state = CacheState(
        spec=spec,
        config=config,
        tree=tree,
        copies=CopyJobs(tree, executor, counters, clock, wakeup, arrivals=arrivals),
        wakeup=wakeup,
        counters=counters,
        clock=clock,
        placement=tuning.placement or rules_for(config.placement),
        copy_timeout_s=tuning.copy_timeout_s,
        reuse=reuse if tuning.eviction is None else None,
        write_back=write_back if config.write.is_exclusive and len(arenas) == 2 else None,
    )
    tree.on_split.append(partial(note_split, state))
    namespace = Namespace(model=model or spec.name, layout=spec.fingerprint, name=name)
    store_tier = StoreTier(state, host_pages, ranks=executor.num_ranks, names_weights=model is not None)
    state.below = store_tier
    return Cache(state, namespace, store_tier)
