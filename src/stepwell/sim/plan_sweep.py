"""Which sizes to replay: the sizes given, and each tier smaller and larger with the others as given. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.units import at_least, format_bytes
from stepwell.cache.build import layouts_for
from stepwell.memory.arena import Arena
from stepwell.sim.case import TIERS, Case, Sizes

FACTORS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))  # of the size given


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The cases to replay, each once, and which of them make up the curve of each tier, smallest first."""

    base: Case
    cases: tuple[Case, ...]
    curves: Mapping[Tier, tuple[int, ...]]  # places in `cases`
    too_small: Mapping[Tier, tuple[int, ...]]  # sizes that cannot hold one page, and are left out


def sweep(base: Case) -> Sweep:
    """Raises ConfigError and SpecError when not even the sizes given can be replayed."""
    _check(base)
    cases = {_key(base.sizes): base}
    curves: dict[Tier, list[Case]] = {}
    too_small: dict[Tier, list[int]] = {}
    for tier in (tier for tier in TIERS if tier in base.sizes):
        for factor in FACTORS:
            case = replace(base, sizes={**base.sizes, tier: int(base.sizes[tier] * factor)})
            try:
                _check(case)
            except ConfigError:
                too_small.setdefault(tier, []).append(case.sizes[tier])
                continue
            curves.setdefault(tier, []).append(cases.setdefault(_key(case.sizes), case))
    places = {key: at for at, key in enumerate(cases)}
    return Sweep(
        base=base,
        cases=tuple(cases.values()),
        curves={tier: tuple(places[_key(case.sizes)] for case in curve) for tier, curve in curves.items()},
        too_small={tier: tuple(sizes) for tier, sizes in too_small.items()},
    )


def _check(case: Case) -> None:
    """Raises what a replay of the case would raise before its first request; a store too small for one page is refused too."""
    setup = case.setup()
    for tier, layout in layouts_for(setup.spec, setup.config, alignment=setup.tuning.page_alignment_bytes).items():
        Arena(tier, layout)
    least_bytes = max(setup.spec.object_bytes(kind) for kind in Kind)
    if setup.store_bytes is not None and setup.store_bytes < least_bytes:
        raise ConfigError(
            f"store_budget of {format_bytes(setup.store_bytes)} cannot hold one page: it must be at least {at_least(least_bytes)}"
        )


def _key(sizes: Sizes) -> tuple[tuple[Tier, int], ...]:
    return tuple(sorted(sizes.items()))
