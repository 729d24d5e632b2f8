"""The last hour of a server in samples: where prompts' tokens came from, how full memory was, how many requests there were.

A page that is opened late sees a curve all the same. A sample is taken every few seconds and the oldest is dropped; what a step
adds to the present one is a few sums. For the engine's thread. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepwell.base.ids import Tier
from stepwell.engine.engine import Engine
from stepwell.server.monitoring.metrics import SOURCES
from stepwell.server.monitoring.progress import Totals

EVERY_S = 5.0
KEPT = 720  # an hour of them


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """What happened since the sample before; how things stood at its end."""

    at_s: float = 0.0
    tokens: Totals = field(default_factory=Totals)
    used_bytes: Mapping[Tier, int] = field(default_factory=dict)
    active: int = 0
    waiting: int = 0


class History:
    """One engine's."""

    def __init__(self, engine: Engine, totals: Totals) -> None:
        self._engine = engine
        self._totals, self._before = totals, totals.copy()  # now, and at the end of the last sample
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._now = Sample()
        self._due_s = engine.clock.now() + EVERY_S

    def after_step(self) -> None:
        now_s = self._engine.clock.now()
        if now_s >= self._due_s:
            self._look(now_s)
            self._samples.append(self._now)
            self._now, self._due_s = Sample(), now_s + EVERY_S
            self._before = self._totals.copy()

    def read(self) -> dict[str, object]:
        """The samples as columns, the oldest first; the last one is still growing."""
        now_s = self._engine.clock.now()
        self._look(now_s)
        samples = [*self._samples, self._now]
        return {
            "every_s": EVERY_S,
            "ago_s": [round(now_s - each.at_s, 1) for each in samples],
            "prompt_tokens": {source: [each.tokens.prompt[source] for each in samples] for source in SOURCES},
            "output_tokens": [each.tokens.output for each in samples],
            "used_bytes": {tier.label: [each.used_bytes[tier] for each in samples] for tier in self._now.used_bytes},
            "active": [each.active for each in samples],
            "waiting": [each.waiting for each in samples],
        }

    def _look(self, now_s: float) -> None:
        """Brings the present sample up to date."""
        scheduler, tiers = self._engine.scheduler, self._engine.cache.stats().tiers
        self._now.at_s, self._now.tokens = now_s, self._totals.since(self._before)
        self._now.used_bytes = {tier: sizes.used_bytes for tier, sizes in tiers.items()}
        self._now.active, self._now.waiting = len(scheduler.active), len(scheduler.waiting)
