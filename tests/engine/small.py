"""Small engines and prompts for tests of the engine as a whole."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from engine.families import checkpoint
from stepwell.base.config import PlacementConfig
from stepwell.engine import Delta, Engine, EngineConfig, GenerateRequest, Limits, Sampling, build_engine
from waiting import run_to_the_end

PAGE = 16
DEFAULTS: dict[str, Any] = {
    "device": "cpu", "page_tokens": PAGE, "device_memory": "4MiB", "host_memory": "8MiB",
    "limits": Limits(chunk_tokens=64, max_running=8),
    "placement": PlacementConfig(interval_tokens=0, decode_interval_tokens=2 * PAGE),
}  # fmt: skip


def small(family: str = "llama", **settings: Any) -> Engine:
    return build_engine(checkpoint(family), EngineConfig(**(DEFAULTS | settings)))


def prompt(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(128) for _ in range(count)]


def run(engine: Engine, asks: list[GenerateRequest]) -> list[list[Delta]]:
    """All asks together; the deltas of each."""
    numbers = [engine.submit(ask) for ask in asks]
    deltas: dict[int, list[Delta]] = {number: [] for number in numbers}
    for delta in run_to_the_end(engine):
        deltas[delta.request].append(delta)
    engine.cache.audit()
    return [deltas[number] for number in numbers]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def greedy(tokens: list[int], count: int = 8, **more: Any) -> GenerateRequest:
    return GenerateRequest(tokens=tokens, sampling=Sampling(max_tokens=count), **more)


def alone(family: str, asks: list[GenerateRequest]) -> list[list[int]]:
    """What each answer is with no other request and nothing cached. Computed once."""
    return [list(_alone(family, tuple(ask.tokens), ask.sampling)) for ask in asks]


@cache
def _alone(family: str, tokens: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    with small(family) as engine:
        return tuple(tokens_of(run(engine, [GenerateRequest(tokens=tokens, sampling=sampling, use_cache=False)])[0]))
