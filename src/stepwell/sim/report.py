"""The figures of a replay, which add up, as one flat record. Prints nothing."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from stepwell.base.ids import Tier
from stepwell.sim.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """One tier's size and traffic. What the model itself writes while it computes is not traffic."""

    size_bytes: int
    used_bytes: int  # at the end
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures over the counted requests of one replay; device + host + store + computed = prompt tokens."""

    trace: str
    spec: str
    policy: str
    write: str
    page_tokens: int
    hardware: Hardware  # that times are estimated for
    requests: int
    prompt_tokens: int
    output_tokens: int
    device_tokens: int
    host_tokens: int
    store_tokens: int
    computed_tokens: int
    reusable_tokens: int  # with endless memory
    too_large: int  # requests that no empty device could hold; computed, never cached
    checkpoints_made: int
    checkpoints_used: int
    checkpoints_evicted: int  # from a tier
    tiers: Mapping[Tier, TierReport]
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    prefill_s: float  # estimated for all prompts together: computing, loading and fetching
    uncached_prefill_s: float  # to compute them all
    wall_s: float

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens that were not computed again."""
        return (self.prompt_tokens - self.computed_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ceiling(self) -> float:
        """The hit rate with endless memory, and a checkpoint wherever one is wanted."""
        return self.reusable_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, object]:
        """Every figure, unrounded, under one name each."""
        fields = asdict(self)
        del fields["tiers"]
        for tier, figures in self.tiers.items():
            fields |= {f"{tier.label}_{name}": value for name, value in asdict(figures).items()}
        return fields | {"hit_rate": self.hit_rate, "ceiling": self.ceiling}


def percentiles_s(seconds: array[float]) -> tuple[float, float, float]:
    """The 50th, 95th and 99th percentile; zeros for no measurements."""
    if not seconds:
        return 0.0, 0.0, 0.0
    p50, p95, p99 = np.percentile(np.frombuffer(seconds), (50, 95, 99)).tolist()
    return p50, p95, p99
