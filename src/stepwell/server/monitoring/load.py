"""How busy an engine is, for routers: requests, memory that they hold, tokens a second, how much of prompts was cached.

Measured on the engine's thread after each step, read from any without waiting for a pass. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from stepwell.base.ids import Tier
from stepwell.engine.engine import Engine
from stepwell.server.monitoring.progress import Totals

THROUGHPUT_S = 5  # over which tokens a second are counted
HIT_RATE_S = 60  # over which cached tokens of prompts are
REFRESH_S = 0.05  # between looks at memory
MAX_COUNT = 2**31 - 1  # that routers read: a larger number would have them drop the whole answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`used_tokens` are those that device memory which requests hold would have room for; all of it has room for `max_tokens`.

    Both are 0 where a token takes no memory of its own. What is cached and held by nobody does not count as used.
    """

    max_running: int
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    max_tokens: int = 0
    used_share: float = 0.0  # of device memory
    tokens_per_s: float = 0.0  # of answers
    hit_rate: float = 0.0  # of the tokens of prompts that were restored or computed


class _Recent:
    """Sums of two amounts over the last seconds, to the second."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._by_second: deque[tuple[int, int, int]] = deque()

    def add(self, now_s: float, first: int, second: int = 0) -> None:
        at = int(now_s)
        if self._by_second and self._by_second[-1][0] == at:
            _, *before = self._by_second.pop()
            first, second = first + before[0], second + before[1]
        self._by_second.append((at, first, second))

    def sums(self, now_s: float) -> tuple[int, int]:
        while self._by_second and self._by_second[0][0] <= int(now_s) - self._seconds:
            self._by_second.popleft()
        return sum(each[1] for each in self._by_second), sum(each[2] for each in self._by_second)


class LoadMeter:
    """One engine's. `after_step` belongs to the engine's thread."""

    def __init__(self, engine: Engine, totals: Totals) -> None:
        self._engine = engine
        self._totals, self._before = totals, totals.copy()
        self._generated = _Recent(THROUGHPUT_S)
        self._prompts = _Recent(HIT_RATE_S)  # cached tokens, and all
        self._looked_s = float("-inf")
        self._measured = Load(max_running=engine.limits.max_running)  # all but the requests

    def after_step(self) -> None:
        """Counts what a step added to prompts and answers, and looks at memory now and then."""
        now_s = self._engine.clock.now()
        new = self._totals.since(self._before)
        if new.output or new.prompts:
            self._generated.add(now_s, new.output)
            self._prompts.add(now_s, new.cached, new.prompts)
            self._before = self._totals.copy()
        if now_s - self._looked_s >= REFRESH_S:
            self._looked_s = now_s
            self._measured = self._look(now_s)

    def read(self, *, arriving: int) -> Load:
        """The load now, as far as the last step knows. `arriving` requests were handed in since. Any thread."""
        scheduler = self._engine.scheduler
        return replace(self._measured, running=len(scheduler.active), waiting=len(scheduler.waiting) + arriving)

    def _look(self, now_s: float) -> Load:
        device = self._engine.cache.stats().tier(Tier.DEVICE)
        held_bytes, per_token = device.size_bytes - device.available_bytes, self._engine.footprint.bytes_per_token
        cached, asked = self._prompts.sums(now_s)
        return Load(
            max_running=self._engine.limits.max_running,
            used_tokens=int(held_bytes / per_token) if per_token else 0,
            max_tokens=int(device.size_bytes / per_token) if per_token else 0,
            used_share=held_bytes / device.size_bytes if device.size_bytes else 0.0,
            tokens_per_s=self._generated.sums(now_s)[0] / THROUGHPUT_S,
            hit_rate=cached / asked if asked else 0.0,
        )
