"""What the log says of a server at work: a line for each answer that ended, and one every ten seconds while there are requests.

Numbers and names alone: never what a prompt or an answer says. Decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict

from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import Ask, Delta, Finish
from stepwell.server.monitoring.progress import Totals

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

    def __init__(self, engine: Engine, totals: Totals) -> None:
        self._engine = engine
        self._totals, self._before = totals, totals.copy()  # now, and at the last line
        self._since_s: float | None = None  # None while there is nothing to do

    def after_step(self) -> None:
        """Writes how fast it goes once ten seconds are over that had requests in them."""
        now_s, scheduler = self._engine.clock.now(), self._engine.scheduler
        busy = bool(scheduler.active or scheduler.waiting)
        if self._since_s is None:
            if not busy and self._totals == self._before:
                return
            self._since_s = now_s
        took_s = now_s - self._since_s
        if took_s < EVERY_S:
            return
        self._say(self._totals.since(self._before), took_s, running=len(scheduler.active), waiting=len(scheduler.waiting))
        self._since_s = now_s if busy else None
        self._before = self._totals.copy()

    def _say(self, new: Totals, took_s: float, *, running: int, waiting: int) -> None:
        fields: dict[str, object] = {
            "prompt_tokens_per_s": round(new.prompts / took_s, 1),
            "output_tokens_per_s": round(new.output / took_s, 1),
            "running": running,
            "waiting": waiting,
        }
        if new.prompts:
            fields["hit_share"] = round(new.cached / new.prompts, 3)
        log.info("throughput", extra={"fields": fields})
