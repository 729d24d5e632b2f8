"""Prompts for toy engines, and what came of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toy_vllm import ToyEngine

Make = Callable[..., ToyEngine]


@dataclass(frozen=True)
class Lora:
    lora_int_id: int
    lora_path: str
    lora_name: str = "one"


def text(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def counters(engine: ToyEngine) -> dict[str, float]:
    return dict(engine.connector._scheduler.cache.counters.snapshot())


def computed_by(engine: ToyEngine, tokens: list[int], *, late: bool = False, **more: Any) -> int:
    """How many tokens a prompt and its answer took to compute."""
    before = engine.computed
    engine.submit(tokens, **more)
    engine.run(late=late)
    return engine.computed - before
