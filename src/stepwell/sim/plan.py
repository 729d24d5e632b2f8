"""What memory of each tier buys, from replays at many sizes: curves, their knees, and where the next gigabyte should go.

    speed-up   time to compute all prompts / time to compute, load and fetch what the cache left to do, one request at a time
    step       from the sizes given to a larger size of one tier: seconds of prefill saved for each GiB added
    knee       the size after which a byte begins to give less than the average byte did

value  |          o----o      The knee is the point farthest above the straight line from the first point to the last, with
       |      o .             both axes scaled to 1. Sizes are on a straight axis, not a logarithmic one, because bytes are
       |    .                 what is paid for. A flat curve has no knee, nor has one without a point above that line.
       | o
       +----------------

Pure: reports in, figures out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from stepwell.base.ids import Tier
from stepwell.sim.case import TIERS
from stepwell.sim.plan_sessions import Sessions
from stepwell.sim.plan_sweep import Sweep
from stepwell.sim.report import Report

GIB = 2**30
LEAST_HIT_GAIN = 0.005  # half a point
LEAST_SPEED_UP_GAIN = 0.05
LEAST_SAVING = 0.001  # of the prefill that is left: less is noise, and no reason to buy

LEAST_HEIGHT = 0.05  # of a knee above the line, as a share of the whole gain: less is noise

Prices = Mapping[Tier, float]  # of a GiB


class Bend(Enum):
    KNEE = "knee"
    RISING = "no knee: still rising at the largest size"
    FLAT = "no knee: size makes no difference in this range"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """How a curve bends; `size_bytes` is where, or the end of the range that it rises or is flat over."""

    bend: Bend
    size_bytes: int

    def as_json(self) -> dict[str, object]:
        return {"bend": self.bend.name.lower(), "size_bytes": self.size_bytes}


def knee(sizes: Sequence[int], values: Sequence[float], *, least_gain: float) -> Knee:
    """The knee of `values` over growing `sizes`; a curve that gains less than `least_gain` is flat."""
    assert list(sizes) == sorted(set(sizes)) and len(sizes) == len(values) > 0, f"not a curve: {sizes=} {values=}"
    best = [max(values[: at + 1]) for at in range(len(values))]  # more memory can be left unused
    gain = best[-1] - best[0]
    if gain < least_gain or gain <= 0:
        return Knee(bend=Bend.FLAT, size_bytes=sizes[0])
    span = sizes[-1] - sizes[0]
    above = [(value - best[0]) / gain - (size - sizes[0]) / span for size, value in zip(sizes, best, strict=True)]
    highest = max(range(len(above)), key=above.__getitem__)
    if above[highest] < LEAST_HEIGHT:
        return Knee(bend=Bend.RISING, size_bytes=sizes[-1])
    return Knee(bend=Bend.KNEE, size_bytes=sizes[highest])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Growing one tier by `added_bytes`, the others as they are."""

    tier: Tier
    added_bytes: int
    saved_s: float  # of prefill, over the whole trace; negative when it made things worse
    price_per_gib: float | None = None

    @property
    def per_gib_s(self) -> float:
        return self.saved_s / (self.added_bytes / GIB)

    @property
    def per_money_s(self) -> float | None:
        return None if self.price_per_gib is None else self.per_gib_s / self.price_per_gib

    def as_json(self) -> dict[str, object]:
        named = {"tier": self.tier.label, "saved_s_per_gib": self.per_gib_s, "saved_s_per_money": self.per_money_s}
        return named | {"added_bytes": self.added_bytes, "saved_s": self.saved_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Replays of one trace around one choice of sizes."""

    base: Report
    curves: Mapping[Tier, Sequence[Report]]  # smallest first
    sessions: Sessions
    prices: Prices

    def knees(self, tier: Tier) -> dict[str, Knee]:
        """The knees of the hit rate and of the speed-up, over the sizes of one tier."""
        return {
            "hit_rate": self._knee(tier, lambda report: report.hit_rate, LEAST_HIT_GAIN),
            "speed_up": self._knee(tier, speed_up, LEAST_SPEED_UP_GAIN),
        }

    def steps(self) -> list[Step]:
        """For each tier the larger size that saves most for each GiB it adds; the best tier first."""
        best = (max(steps, key=lambda step: step.per_gib_s) for tier in self.curves if (steps := self._steps_of(tier)))
        return sorted(best, key=_worth, reverse=True)

    def next_tier(self) -> Tier | None:
        """Where the next gigabyte should go: by money where prices are known. None when no tier's would save anything."""
        least_s = LEAST_SAVING * self.base.prefill_s
        return next((step.tier for step in self.steps() if step.saved_s > least_s), None)

    def as_json(self) -> dict[str, object]:
        chosen = self.next_tier()
        return {
            "trace": self.base.trace,
            "spec": self.base.spec,
            "policy": self.base.policy,
            "page_tokens": self.base.page_tokens,
            "hardware": asdict(self.base.hardware),
            "requests": self.base.requests,
            "prompt_tokens": self.base.prompt_tokens,
            "ceiling": self.base.ceiling,
            "uncached_prefill_s": self.base.uncached_prefill_s,
            "base": point_json(self.base),
            "curves": {tier.label: [point_json(report) for report in curve] for tier, curve in self.curves.items()},
            "knees": {tier.label: {name: each.as_json() for name, each in self.knees(tier).items()} for tier in self.curves},
            "next_gigabyte": {
                "tier": None if chosen is None else chosen.label,
                "by": "money" if self.prices else "bytes",
                "steps": [step.as_json() for step in self.steps()],
            },
            "prices_per_gib": {tier.label: price for tier, price in self.prices.items()},
            "sessions": self.sessions.as_json() | {"fitting": self._fitting()},
        }

    def _fitting(self) -> dict[str, dict[str, int]]:
        fitting = {tier: self.sessions.fitting(tier, size_of(self.base, tier)) for tier in self.curves}
        return {tier.label: {"median": median, "p95": p95} for tier, (median, p95) in fitting.items()}

    def _knee(self, tier: Tier, value: Callable[[Report], float], least_gain: float) -> Knee:
        curve = self.curves[tier]
        return knee([size_of(report, tier) for report in curve], [value(report) for report in curve], least_gain=least_gain)

    def _steps_of(self, tier: Tier) -> list[Step]:
        here = size_of(self.base, tier)
        return [
            Step(
                tier=tier,
                added_bytes=size_of(report, tier) - here,
                saved_s=self.base.prefill_s - report.prefill_s,
                price_per_gib=self.prices.get(tier),
            )
            for report in self.curves[tier]
            if size_of(report, tier) > here
        ]


def plan_of(sweep: Sweep, reports: Sequence[Report], sessions: Sessions, prices: Prices) -> Plan:
    """Puts the reports of a sweep's cases into their curves."""
    curves = {tier: [reports[at] for at in places] for tier, places in sweep.curves.items()}
    return Plan(base=reports[sweep.cases.index(sweep.base)], curves=curves, sessions=sessions, prices=prices)


def speed_up(report: Report) -> float:
    """How many times as long all prompts would take without a cache."""
    return report.uncached_prefill_s / report.prefill_s if report.prefill_s else 1.0


def size_of(report: Report, tier: Tier) -> int:
    return report.tiers[tier].size_bytes


def point_json(report: Report) -> dict[str, object]:
    """One replay's figures, with what only a plan asks for."""
    sizes = {f"{tier.label}_size_bytes": size_of(report, tier) for tier in TIERS}
    names = ("device_tokens", "host_tokens", "store_tokens", "computed_tokens", "hit_rate", "prefill_s", "ttft_p50_s",
             "ttft_p95_s", "too_large", "wall_s")  # fmt: skip
    return sizes | {name: getattr(report, name) for name in names} | {"speed_up": speed_up(report)}


def _worth(step: Step) -> float:
    return step.per_gib_s if step.per_money_s is None else step.per_money_s
