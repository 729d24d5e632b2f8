"""What one engine has done recently: its load for routers, an hour of samples for `/ui`, and lines for the log.

`LoadMeter` counts requests, memory, tokens per second and hit rate over the last seconds. `History` keeps a sample every few
seconds and drops the oldest, so that a page that is opened late still shows a curve. `log_ended` writes one line for each answer
that ended, `ThroughputLog` one line every ten seconds while there are requests. Lines contain numbers and names, never text of a
prompt or an answer. Everything runs on the engine's thread after each step; only `LoadMeter.read` may be called from any thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from stepwell.base.ids import Tier
from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import Delta, Finish, GenerateRequest
from stepwell.server.monitoring.metrics import SOURCES
from stepwell.server.monitoring.progress import Totals

THROUGHPUT_S = 5  # window of tokens per second
HIT_RATE_S = 60  # window of the hit rate
REFRESH_S = 0.05  # between readings of memory
MAX_COUNT = 2**31 - 1  # routers reject a response with a larger number


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`used_tokens`: how many tokens fit into the device memory that requests hold; `max_tokens`: into all of it.

    Both are 0 for a model whose tokens take no memory of their own. Cached pages without references do not count as used.
    """

    max_running: int
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    max_tokens: int = 0
    used_share: float = 0.0  # of device memory
    tokens_per_s: float = 0.0  # generated
    hit_rate: float = 0.0  # share of prompt tokens that were cached


class _Recent:
    """Sums of two amounts over the last seconds, with a resolution of one second."""

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
        """Counts the tokens of a step, and reads memory every REFRESH_S."""
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
        """The load as of the last step. `arriving` requests were submitted since. Any thread."""
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


SAMPLE_EVERY_S = 5.0
MOST_SAMPLES = 720  # one hour


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """Tokens since the sample before, and the state at its end."""

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
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._now = Sample()
        self._due_s = engine.clock.now() + SAMPLE_EVERY_S

    def after_step(self) -> None:
        now_s = self._engine.clock.now()
        if now_s >= self._due_s:
            self._look(now_s)
            self._samples.append(self._now)
            self._now, self._due_s = Sample(), now_s + SAMPLE_EVERY_S
            self._before = self._totals.copy()

    def read(self) -> dict[str, object]:
        """The samples as columns, oldest first; the last one is incomplete."""
        now_s = self._engine.clock.now()
        self._look(now_s)
        samples = [*self._samples, self._now]
        return {
            "every_s": SAMPLE_EVERY_S,
            "ago_s": [round(now_s - each.at_s, 1) for each in samples],
            "prompt_tokens": {source: [each.tokens.prompt[source] for each in samples] for source in SOURCES},
            "output_tokens": [each.tokens.output for each in samples],
            "used_bytes": {tier.label: [each.used_bytes[tier] for each in samples] for tier in self._now.used_bytes},
            "active": [each.active for each in samples],
            "waiting": [each.waiting for each in samples],
        }

    def _look(self, now_s: float) -> None:
        """Updates the current sample."""
        scheduler, tiers = self._engine.scheduler, self._engine.cache.stats().tiers
        self._now.at_s, self._now.tokens = now_s, self._totals.since(self._before)
        self._now.used_bytes = {tier: sizes.used_bytes for tier, sizes in tiers.items()}
        self._now.active, self._now.waiting = len(scheduler.active), len(scheduler.waiting)


LOG_EVERY_S = 10.0

log = logging.getLogger(__name__)


def log_ended(request: str, choice: int | None, ask: GenerateRequest, delta: Delta, origin: Mapping[str, str]) -> None:
    """Logs an answer with its last `delta`. `choice` numbers the answers of a request that has several; `origin` holds the fields
    of `origin_of`.
    """
    usage = delta.usage
    fields: dict[str, object] = {"id": request, **origin}
    if choice is not None:
        fields["choice"] = choice
    if ask.tenant is not None:
        fields["tenant"] = ask.tenant
    fields["prompt_tokens"] = len(ask.tokens)
    if usage is not None and usage.completion_tokens:  # otherwise the prompt has no sources
        fields |= {f"{source}_tokens": count for source, count in asdict(usage.sources).items()}
        fields |= {"output_tokens": usage.completion_tokens, "first_token_s": round(usage.first_token_s, 4)}
    else:
        fields["output_tokens"] = 0
    if usage is not None:
        fields["total_s"] = round(usage.total_s, 4)
    finish = delta.finish or Finish.FAILED
    log.info("request ended", extra={"fields": {**fields, "finish": finish.value}})


class ThroughputLog:
    """One engine's. For the engine's thread."""

    def __init__(self, engine: Engine, totals: Totals) -> None:
        self._engine = engine
        self._totals, self._before = totals, totals.copy()  # now, and at the last line
        self._since_s: float | None = None  # None while idle

    def after_step(self) -> None:
        """Writes a line after each ten seconds with requests."""
        now_s, scheduler = self._engine.clock.now(), self._engine.scheduler
        busy = bool(scheduler.active or scheduler.waiting)
        if self._since_s is None:
            if not busy and self._totals == self._before:
                return
            self._since_s = now_s
        took_s = now_s - self._since_s
        if took_s < LOG_EVERY_S:
            return
        self._write_line(self._totals.since(self._before), took_s, running=len(scheduler.active), waiting=len(scheduler.waiting))
        self._since_s = now_s if busy else None
        self._before = self._totals.copy()

    def _write_line(self, new: Totals, took_s: float, *, running: int, waiting: int) -> None:
        fields: dict[str, object] = {
            "prompt_tokens_per_s": round(new.prompts / took_s, 1),
            "output_tokens_per_s": round(new.output / took_s, 1),
            "running": running,
            "waiting": waiting,
        }
        if new.prompts:
            fields["hit_share"] = round(new.cached / new.prompts, 3)
        log.info("throughput", extra={"fields": fields})
