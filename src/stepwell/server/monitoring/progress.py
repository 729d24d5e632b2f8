"""Counts the progress of requests as it happens: prompt tokens as they are restored or computed, answer tokens as they are
sampled.

    begins          its bytes are there          chunks of its prompt are computed         tokens of its answer       ends
    |- queue time   |- device, host, store       |- computed, computed, ...                |- first token, tokens     |- the rest

Tokens that a preempted request computes again are not counted again. For a request that ends before its first token, the part of
its prompt that was computed stays counted. Runs on the engine's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import Delta, GenerateRequest, Request
from stepwell.server.monitoring.metrics import SOURCES, Metrics
from stepwell.tiers.lease import Sources

CACHED = SOURCES[:-1]


@dataclass(slots=True, kw_only=True)
class Totals:
    """Tokens since the start."""

    prompt: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))  # by source
    output: int = 0

    def copy(self) -> Totals:
        return Totals(prompt=dict(self.prompt), output=self.output)

    def since(self, before: Totals) -> Totals:
        prompt = {source: count - before.prompt[source] for source, count in self.prompt.items()}
        return Totals(prompt=prompt, output=self.output - before.output)

    @property
    def prompts(self) -> int:
        return sum(self.prompt.values())

    @property
    def cached(self) -> int:
        return self.prompts - self.prompt["computed"]


@dataclass(slots=True, kw_only=True, eq=False)
class _Seen:
    """What has been counted for one request."""

    tenant: str | None
    prompt: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    begun: bool = False
    whole: bool = False  # its whole prompt was counted
    answers: bool = False  # its first token was counted


class Progress:
    """Counts for one engine. `added` is called with each delta of a step, then `after_step`."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.totals = Totals()
        self._scheduler = engine.scheduler
        self._metrics = metrics
        self._seen: dict[int, _Seen] = {}  # by number, of requests that have begun
        self._output: Counter[str | None] = Counter()  # tokens of this step, by tenant

    def added(self, request: GenerateRequest, delta: Delta) -> None:
        seen = self._known(delta.request, request.tenant)
        self._output[request.tenant] += len(delta.tokens)
        if delta.tokens and not seen.answers:
            self._count_first_token(seen, delta.request)
        if delta.finish is not None:
            self._ended(seen, delta)
            del self._seen[delta.request]

    def after_step(self) -> None:
        for number, request in self._scheduler.active.items():
            seen = self._seen.get(number)
            if seen is None or not seen.whole:
                self._look(self._known(number, request.submitted.tenant), request)
        for tenant, count in self._output.items():
            self.totals.output += count
            self._metrics.generated(count, tenant)
        self._output.clear()

    # ---- inside -----------------------------------------------------------------------------------

    def _known(self, number: int, tenant: str | None) -> _Seen:
        return self._seen.setdefault(number, _Seen(tenant=tenant))

    def _look(self, seen: _Seen, request: Request) -> None:
        sources = request.sources
        if sources is None or request.began_s is None:
            return
        if not seen.begun:
            seen.begun = True
            self._metrics.began(request.began_s - request.arrived_s)
        if not request.runs:
            return  # still loading
        cached = sources.total - sources.computed
        computed = max(min(request.position, sources.total) - cached, 0)
        self._count(seen, sources, computed=computed)
        seen.whole = request.position >= sources.total

    def _ended(self, seen: _Seen, delta: Delta) -> None:
        usage = delta.usage
        if usage is not None and usage.completion_tokens:  # otherwise the prompt was not computed to its end
            self._count(seen, usage.sources, computed=usage.sources.computed)
            if not seen.begun:
                self._metrics.began(usage.queued_s)
            if not seen.answers:
                self._metrics.first_token(usage.first_token_s)
        self._metrics.ended(delta, seen.tenant)

    def _count(self, seen: _Seen, sources: Sources, *, computed: int) -> None:
        """Counts the new part of a prompt: all cached tokens, and the first `computed` tokens of the rest."""
        now: Mapping[str, int] = {**{source: getattr(sources, source) for source in CACHED}, "computed": computed}
        for source, count in now.items():
            new = count - seen.prompt[source]
            if new > 0:
                seen.prompt[source] = count
                self.totals.prompt[source] += new
                self._metrics.prompt(new, source, seen.tenant)

    def _count_first_token(self, seen: _Seen, number: int) -> None:
        """A request that ended in this step is counted with its last delta."""
        request = self._scheduler.active.get(number) or self._scheduler.waiting.get(number)  # waiting if it was preempted
        if request is not None and request.first_token_s is not None:
            seen.answers = True
            self._metrics.first_token(request.first_token_s - request.arrived_s)
