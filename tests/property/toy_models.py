"""Small models and small caches, drawn at random: every mix of shapes, windows around the page, alignments, policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias

from stepwell import (
    CacheConfig,
    ConfigError,
    ModelSpec,
    Namespace,
    Point,
    Prefix,
    Spill,
    StateSpec,
    Tier,
    Window,
    WritePolicy,
)
from stepwell.cache.build import CacheTuning
from stepwell.memory.arena import Arena
from stepwell.memory.layout import lay_out
from stepwell.policy.placement import PlacementRules
from stepwell.sim.policies import LeastRecent

ALIGNMENT_BYTES = 16
EVICTIONS = {"value": None, "lru": LeastRecent()}  # None: as it ships
ROOMY_OBJECTS = 500
NO_QUOTAS: tuple[tuple[str, float], ...] = ()
QUOTAS = (NO_QUOTAS, NO_QUOTAS, (("alice", 0.2), ("bob", 0.4)), (("alice", 0.5),), (("alice", 0.001), ("bob", 1.0)))
TRUNKS = ((0,) * 8, (0, 0, 0, 1, 0, 0, 0, 0), (0, 2, 0, 0, 0, 0, 0, 0))

Choose: TypeAlias = Callable[[Sequence[Any]], Any]  # one of several, by Hypothesis or by a seeded generator


class Regime(Enum):
    """How hard a run is on its cache, and so how much of it an oracle can foretell."""

    CALM = "space for everything, every copy succeeds: nothing may be lost"
    SPILL = "a small device over a large host that everything is written through to: nothing may be lost"
    PRESSED = "no space anywhere: whatever is claimed must exist, and what is pinned must stay"
    FAULTY = "no space, copies fail on some rank, paths expire: whatever is claimed must exist"

    @property
    def exact(self) -> bool:
        return self in (Regime.CALM, Regime.SPILL)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything in which one random cache differs from another."""

    spec: ModelSpec
    regime: Regime
    device_objects: int | None
    host_objects: int | None
    write: WritePolicy = WritePolicy.THROUGH
    durable: bool = False
    eviction: str = "value"  # of EVICTIONS
    interval_pages: int = 0
    decode_interval_pages: int = 0
    at_branch: bool = True
    at_prompt_end: bool = True
    ranks: int = 1
    node_pages: int = 256  # the length at which the tree cuts its nodes
    hot_rows: int = 0  # of a request, where rows may spill
    quotas: tuple[tuple[str, float], ...] = ()  # shares of memory, by tenant; with any, namespaces are those of tenants

    @property
    def placement(self) -> PlacementRules:
        page = self.spec.page_tokens
        return PlacementRules(
            interval_tokens=self.interval_pages * page,
            most_added=None,
            decode_interval_tokens=self.decode_interval_pages * page,
            at_branch=self.at_branch,
            at_prompt_end=self.at_prompt_end,
        )

    @cached_property
    def config(self) -> CacheConfig:
        return CacheConfig(
            device_bytes=self._bytes(self.device_objects, Tier.DEVICE),
            host_bytes=self._bytes(self.host_objects, Tier.HOST),
            write=self.write,
            durable=self.durable,
            hot_rows=self.hot_rows,
            memory_quotas=dict(self.quotas),
        )

    @cached_property
    def tuning(self) -> CacheTuning:
        return CacheTuning(
            eviction=EVICTIONS[self.eviction],
            placement=self.placement,
            page_alignment_bytes=ALIGNMENT_BYTES,
            copy_timeout_s=30.0 if self.regime is Regime.FAULTY else 1e9,
        )

    def _bytes(self, objects: int | None, tier: Tier) -> int | None:
        """Memory for about this many objects of the mean size, or more where the model's pages do not lie well side by side."""
        if objects is None:
            return None
        strides = lay_out(self.spec, budget_bytes=2**30, alignment=ALIGNMENT_BYTES, tier=tier).strides
        size = max(objects * sum(strides.values()) // len(strides), sum(strides.values()))
        while not _can_hold_each_kind(self.spec, size, tier):
            size += max(strides.values())
        return size

    @property
    def spaces(self) -> tuple[Namespace, ...]:
        """Namespaces that must never meet: they differ in one field each."""
        base = Namespace(model=self.spec.name, layout=self.spec.fingerprint)
        if self.quotas:
            alice, bob = replace(base, tenant="alice"), replace(base, tenant="bob")
            return (base, alice, replace(alice, salt="hers"), bob)
        return (
            base,
            Namespace(model=base.model, layout=base.layout, salt="tenant"),
            Namespace(model="tuned", layout=base.layout),
        )


def _can_hold_each_kind(spec: ModelSpec, size_bytes: int, tier: Tier) -> bool:
    try:
        Arena(tier, lay_out(spec, budget_bytes=size_bytes, alignment=ALIGNMENT_BYTES, tier=tier))
    except ConfigError:
        return False
    return True


def page_of(letter: int, page_tokens: int) -> list[int]:
    """One page of tokens. Letters 0 and 2 differ in their last token only, so paths also part in the middle of a page."""
    return [1] * page_tokens if letter == 1 else [0] * (page_tokens - 1) + [letter]


def make_spec(choose: Choose) -> ModelSpec:
    page = choose((4, 2, 8, 6, 16, 3))
    states = []
    ratios = [ratio for ratio in (1, 2, 4) if page % ratio == 0 or ratio % page == 0]
    for name in choose((("kv",), ("kv", "c4"), ("kv",), ())):
        ratio = 1 if name == "kv" else choose(ratios)
        layers, row_bytes = choose(((1, 4), (2, 3), (1, 9)))
        states.append(StateSpec(name=name, shape=Prefix(ratio=ratio), layers=layers, row_bytes=row_bytes, dtype="u8"))
    lengths = sorted({1, max(page // 2, 1), page - 1, page, page + 1, 2 * page + 1, 3 * page})
    for index in range(choose((1, 0, 1, 2))):
        shape = Window(tokens=choose(lengths))
        required, row_bytes = choose((True, True, True, False)), choose((4, 7))
        states.append(StateSpec(name=f"swa{index}", shape=shape, layers=1, row_bytes=row_bytes, dtype="u8", required=required))
    for index in range(choose((1, 0, 1, 2))):
        shape = Point(period=choose((None, None, 2, 3, 2 * page)))
        align, row_bytes = choose((1, 1, 1, 2 * page, 3 * page)), choose((16, 40, 200))
        states.append(StateSpec(name=f"ssm{index}", shape=shape, layers=1, row_bytes=row_bytes, dtype="u8", align=align))
    if not states:
        states.append(StateSpec(name="kv", shape=Prefix(), layers=1, row_bytes=4, dtype="u8", align=choose((1, 3))))
    return ModelSpec(name="toy", page_tokens=page, states=tuple(states))


def make_spilling_spec(choose: Choose) -> ModelSpec:
    """A model whose rows may be on the host alone, with or without other states next to them."""
    page = choose((4, 2, 8, 3))
    layers, row_bytes = choose(((1, 4), (2, 3), (3, 9)))
    states = [StateSpec(name="kv", shape=Prefix(), layers=layers, row_bytes=row_bytes, dtype="u8")]
    for name in choose((("index",), ("index", "draft"), ())):
        ratio = choose([ratio for ratio in (1, 1, 2) if page % ratio == 0])
        shape, required = Prefix(ratio=ratio), name == "index"
        states.append(StateSpec(name=name, shape=shape, layers=1, row_bytes=choose((3, 4)), dtype="u8", required=required))
    groups = choose((tuple(range(layers)), (0,) * layers))
    return ModelSpec(name="toy", page_tokens=page, states=tuple(states), spill=Spill(states=("kv",), group_of={"kv": groups}))


def make_spilling_setup(choose: Choose) -> Setup:
    """Such a model over a device and a host that everything is written through to."""
    regime = choose((Regime.PRESSED, Regime.FAULTY, Regime.CALM, Regime.SPILL))
    spec = make_spilling_spec(choose)
    return Setup(
        spec=spec,
        regime=regime,
        device_objects=ROOMY_OBJECTS if regime is Regime.CALM else choose((40, 24, 32, 56)),
        host_objects=ROOMY_OBJECTS if regime.exact else choose((48, 12, 24, 96)),
        eviction=choose(tuple(EVICTIONS)),
        ranks=choose((1, 2, 1, 3)),
        node_pages=choose((256, 3)),
        quotas=choose(QUOTAS),
        hot_rows=choose((spec.page_tokens, 2 * spec.page_tokens - 1, 0, 4 * spec.page_tokens)),
    )


def make_setup(choose: Choose) -> Setup:
    """A model with a device tier, alone or over a host."""
    if choose((False, False, True)):
        return make_spilling_setup(choose)
    regime = choose((Regime.PRESSED, Regime.FAULTY, Regime.CALM, Regime.SPILL))
    host = choose((48, 0, 12, 96)) or None
    if regime is Regime.SPILL or (regime is Regime.CALM and host):
        host = ROOMY_OBJECTS
    return Setup(
        spec=make_spec(choose),
        regime=regime,
        device_objects=ROOMY_OBJECTS if regime is Regime.CALM else choose((20, 12, 16, 28)),
        host_objects=host,
        write=WritePolicy.THROUGH if regime is Regime.SPILL else choose(tuple(WritePolicy)),
        eviction=choose(tuple(EVICTIONS)),
        interval_pages=choose((0, 2, 5)),
        decode_interval_pages=0 if regime is Regime.SPILL else choose((1, 0, 3)),
        at_branch=choose((True, False)),
        at_prompt_end=choose((True, True, False)),
        ranks=choose((1, 2, 1, 3)),
        node_pages=choose((256, 3)),
        quotas=choose(QUOTAS),
    )


def make_borrowed_setup(choose: Choose) -> Setup:
    """A model with a host tier alone, under an engine that owns its device memory."""
    regime = choose((Regime.CALM, Regime.PRESSED, Regime.FAULTY))
    return Setup(
        spec=make_spec(choose),
        regime=regime,
        device_objects=None,
        host_objects=ROOMY_OBJECTS if regime is Regime.CALM else choose((16, 12, 24)),
        eviction=choose(tuple(EVICTIONS)),
        interval_pages=choose((0, 2)),
        ranks=choose((1, 2)),
        node_pages=choose((256, 3)),
        quotas=choose(QUOTAS),
    )


def prompt(trunk: int, cut: int, own: tuple[int, ...], tail: int, page_tokens: int) -> list[int]:
    """The beginning of a shared trunk, pages of one's own, and a tail that fills no page. Never empty."""
    tokens = [token for letter in TRUNKS[trunk][:cut] + own for token in page_of(letter, page_tokens)]
    return tokens + [3] * (tail % page_tokens) or [3]
