"""Clients of the soak: they ask at random, leave at random, and hold every word they hear against the known answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from serve.streaming import Refused, events, sources_of
from soaking.backend import PATIENCE_S, Backend
from soaking.known import Known

_KEPT = 20  # faults that are reported in full


@dataclass(kw_only=True)
class Tally:
    """What came of all requests so far."""

    outcomes: Counter[str] = field(default_factory=Counter)  # right, left (and right so far), cut (its server was ended), fault
    tokens: Counter[str] = field(default_factory=Counter)  # of prompts, by source
    faults: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def fault(self, says: str) -> None:
        self.outcomes["fault"] += 1
        if len(self.faults) < _KEPT:
            self.faults.append(says)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One request, as it was drawn."""

    known: Known
    salt: str | None
    leaves_after: int | None  # tokens; None to stay to the end
    leaves_within_s: float | None  # whatever came by then

    def body(self) -> dict[str, Any]:
        return {
            "model": "soak", "prompt": list(self.known.prompt), "max_tokens": len(self.known.words), "temperature": 0,
            "ignore_eos": True, "logprobs": 0, "stream": True, "stream_options": {"include_usage": True},
            **({} if self.salt is None else {"cache_salt": self.salt}),
        }  # fmt: skip


def wish(random: Random, known: Sequence[Known]) -> Wish:
    """Popular prompts more often. One in ten has a new salt, so that tiers have something to evict."""
    drawn, leaving = random.random(), random.random()
    salt = f"{random.getrandbits(64):x}" if drawn < 0.1 else f"salt {random.randrange(3)}" if drawn < 0.25 else None
    chosen = known[int(len(known) * random.random() ** 1.5)]
    return Wish(
        known=chosen,
        salt=salt,
        leaves_after=random.randrange(len(chosen.words)) if leaving < 0.2 else None,
        leaves_within_s=random.uniform(0, 0.5) if 0.2 <= leaving < 0.27 else None,
    )


class Client:
    """One of several that ask at once, each request right after the one before."""

    def __init__(self, backends: Sequence[Backend], known: Sequence[Known], tally: Tally, random: Random) -> None:
        self._backends, self._known, self._tally, self._random = backends, known, tally, random

    async def run(self, going: Callable[[], bool]) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)  # a connection each: a server may be another by then
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False) as http:
            while going():
                backend = self._random.choice(self._backends)
                drawn = wish(self._random, self._known)  # drawn even if the server is down: requests depend on the seed alone
                if backend.up:
                    await self.ask(http, backend, drawn)
                else:
                    await asyncio.sleep(0.05)

    async def ask(self, http: httpx.AsyncClient, backend: Backend, drawn: Wish) -> None:
        heard, life, address = _Heard(), backend.life, backend.address
        try:
            await asyncio.wait_for(_hear(http, address, drawn, heard), drawn.leaves_within_s or PATIENCE_S)
        except (httpx.HTTPError, Refused) as error:
            if backend.life == life:
                self._tally.fault(f"{backend.name}, prompt {drawn.known.number}: {type(error).__name__}: {error}")
                return
            heard.outcome = "cut"
        except TimeoutError:
            if drawn.leaves_within_s is None:
                self._tally.fault(f"{backend.name}, prompt {drawn.known.number}: no answer in {PATIENCE_S:g} s")
                return
            heard.outcome = "left"
        wrong = drawn.known.wrong(heard.words, heard.logprobs, whole=heard.outcome == "right")
        if wrong is not None:
            after_s, salt = time.monotonic() - self._tally.began_s, "no salt" if drawn.salt is None else drawn.salt
            asked = f"{backend.name} after {after_s:.0f} s, prompt {drawn.known.number}, {salt}, {heard.sources}"
            self._tally.fault(f"{asked}: {wrong}")
            return
        self._tally.outcomes[heard.outcome] += 1
        self._tally.tokens.update(heard.sources)


@dataclass(kw_only=True)
class _Heard:
    words: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    outcome: str = "right"


async def _hear(http: httpx.AsyncClient, address: str, drawn: Wish, heard: _Heard) -> None:
    """Fills `heard` as an answer comes; leaves in its middle where that was drawn."""
    async with aclosing(events(http, address, drawn.body())) as answer:
        async for event in answer:
            for choice in event["choices"]:
                chosen = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                heard.words += chosen["tokens"]
                heard.logprobs += chosen["token_logprobs"]
            if drawn.leaves_after is not None and len(heard.words) > drawn.leaves_after:
                heard.outcome = "left"
                return
            if event.get("usage"):
                heard.sources = sources_of(event["usage"])
    if not heard.sources:
        raise Refused("the answer ended early", status=200)
