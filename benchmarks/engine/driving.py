"""Runs requests through an engine as a caller would, and moves what is cached to the tier to measure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from stepwell.base.ids import Kind, Tier
from stepwell.engine import Delta, Engine, GenerateRequest
from stepwell.engine.engine import IDLE_S
from stepwell.tiers.eviction import make_room
from stepwell.tiers.lease import Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """How long an answer took to begin, its tokens, and where its prompt came from."""

    seconds: float
    waited_s: float  # of it, before the first pass with the prompt was planned
    tokens: tuple[int, ...]
    sources: Sources


def first_token(engine: Engine, prompt: Sequence[int], *, max_tokens: int = 4) -> First:
    tokens: list[int] = []
    started, first, waited_s, sources = time.perf_counter(), 0.0, 0.0, Sources()
    for delta in engine.stream(prompt, max_tokens=max_tokens, ignore_eos=True):
        first = first or time.perf_counter() - started
        tokens += delta.tokens
        if delta.usage is not None:
            sources, waited_s = delta.usage.sources, delta.usage.computes_s or 0.0
    return First(seconds=first, waited_s=waited_s, tokens=tuple(tokens), sources=sources)


def run(engine: Engine, asks: Sequence[GenerateRequest]) -> None:
    """Answers all of them. Raises RuntimeError when one fails."""
    for ask in asks:
        engine.submit(ask)
    while engine.num_open:
        step(engine)


def step(engine: Engine) -> list[Delta]:
    """One step; a pause after one that only waited."""
    deltas = engine.step()
    for delta in deltas:
        if delta.error is not None:
            raise RuntimeError(f"request {delta.request} failed: {delta.error}")
    if not deltas and engine.idle:
        time.sleep(IDLE_S)
    return deltas


def settle(engine: Engine) -> None:
    """Waits until nothing is copied or stored."""
    while (report := engine.cache.step()).running or report.storing:
        time.sleep(0.001)


def leave_in(engine: Engine, tier: str) -> None:
    """Leaves what is cached in this tier (device, host or disk) and those below."""
    if tier == "host":
        state = engine.cache._state
        need = {Kind.PREFIX: state.arena(Tier.DEVICE).layout.rows(Kind.PREFIX) + 1}
        while engine.cache.stats().tier(Tier.DEVICE).used_bytes:  # more than once where things are saved as they leave
            make_room(state, Tier.DEVICE, need)
            settle(engine)
    elif tier == "disk":
        engine.cache.flush()
