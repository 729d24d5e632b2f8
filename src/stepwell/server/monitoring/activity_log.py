"""What the log says of a server at work: a line for each answer that ended, and one every ten seconds while there are requests.

Numbers and names alone: never what a prompt or an answer says. Decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import Ask, Delta, Finish
from stepwell.tiers.lease import Sources

EVERY_S = 10.0

log = logging.getLogger(__name__)


def log_ended(request: str, choice: int | None, ask: Ask, delta: Delta, origin: Mapping[str, str]) -> None:
    """`delta` is an answer's last. `choice` is for requests with several answers, each of which has a line. `origin` says where
    the request came from.
    """
    usage = delta.usage
    fields: dict[str, object] = {"id": request, **origin}
    if choice is not None:
        fields["choice"] = choice
    if ask.tenant is not None:
        fields["tenant"] = ask.tenant
    fields["prompt_tokens"] = len(ask.tokens)
    if usage is not None and usage.completion_tokens:  # else its prompt never had sources
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

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._since_s: float | None = None  # None while there is nothing to do
        self._begun: set[int] = set()  # requests whose prompts were counted
        self._prompt = self._cached = self._output = 0  # tokens since then

    def after_step(self, deltas: Sequence[Delta]) -> None:
        """Counts what a step added; says how fast it goes once ten seconds are over that had requests in them."""
        now_s, scheduler = self._engine.clock.now(), self._engine.scheduler
        busy = bool(scheduler.active or scheduler.waiting)
        if self._since_s is None:
            if not busy and not deltas:
                return
            self._since_s = now_s
        for delta in deltas:
            self._count(delta)
        took_s = now_s - self._since_s
        if took_s < EVERY_S:
            return
        self._say(took_s, running=len(scheduler.active), waiting=len(scheduler.waiting))
        self._since_s = now_s if busy else None
        self._prompt = self._cached = self._output = 0

    def _count(self, delta: Delta) -> None:
        """A prompt counts with its first token: it has been computed then, however long the answer will be."""
        self._output += len(delta.tokens)
        sources = self._sources(delta) if delta.request not in self._begun and delta.tokens else None
        if sources is not None:
            self._begun.add(delta.request)
            self._prompt += sources.total
            self._cached += sources.total - sources.computed
        if delta.finish is not None:
            self._begun.discard(delta.request)

    def _sources(self, delta: Delta) -> Sources | None:
        """None where a request was put back since: its next token has them."""
        if delta.usage is not None:
            return delta.usage.sources
        request = self._engine.scheduler.active.get(delta.request)
        return None if request is None else request.sources

    def _say(self, took_s: float, *, running: int, waiting: int) -> None:
        fields: dict[str, object] = {
            "prompt_tokens_per_s": round(self._prompt / took_s, 1),
            "output_tokens_per_s": round(self._output / took_s, 1),
            "running": running,
            "waiting": waiting,
        }
        if self._prompt:
            fields["hit_share"] = round(self._cached / self._prompt, 3)
        log.info("throughput", extra={"fields": fields})
