"""Engines whose attention rows are on the host alone wherever that may be, at any moment; what is freed holds no numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch

from engine.families import checkpoint
from parity.recorded import Recorded
from stepwell.base.ids import Kind, Tier
from stepwell.base.tasks import PageIds
from stepwell.engine import Engine
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.passes.spilling import SpillReport
from waiting import settle

POISON = 0xFF  # in every byte: not a number, and no page
CONTEXT = 1024
SPARSE = ("deepseek_v32", "glm_moe_dsa")


def short(made: Checkpoint) -> Checkpoint:
    """For requests of so few tokens that little is set aside for long ones."""
    return replace(made, config=dict(made.config) | {"max_position_embeddings": CONTEXT})


def recorded(family: str | Checkpoint, *, hot_rows: int | None = None, memory: str = "4MiB", **settings: Any) -> Recorded:
    """An engine that keeps its logits; with `hot_rows` one whose rows may spill."""
    made = short(checkpoint(family) if isinstance(family, str) else family)
    sparse = {} if hot_rows is None else {"sparse": "dsa", "hot_rows": hot_rows}
    return Recorded(made, **({"device_memory": memory, "host_memory": "4MiB", "max_running": 6} | sparse | settings))


def spilled(family: str | Checkpoint, *, hot_rows: int, **settings: Any) -> Recorded:
    """The same, where rows leave the device before each step as soon as the host has them."""
    made = recorded(family, hot_rows=hot_rows, **settings)
    press(made.engine)
    return made


def press(engine: Engine) -> None:
    poison_freed(engine)
    step = engine._step

    def pressed() -> None:
        settle(engine.cache)
        shed(engine)
        step()
        engine.cache.audit()

    engine._step = pressed  # type: ignore[method-assign]


def shed(engine: Engine) -> None:
    """Frees the memory that a request for the most pages possible would need."""
    state, rows = engine.cache._state, engine.cache.row_pages
    assert state.spill is not None and rows is not None
    most, before = state.arena(Tier.DEVICE).layout.rows(Kind.ROWS), rows.num_backed
    for count in range(most, 0, -1):
        if state.spill({Kind.ROWS: count}) or rows.num_backed > before:
            break


def poison_freed(engine: Engine) -> None:
    rows = memory_of(engine)

    def freed(tier: Tier, kind: Kind, ids: PageIds) -> None:
        if tier is Tier.DEVICE:
            rows[kind][torch.from_numpy(ids).long().to(rows[kind].device)] = POISON
            if rows[kind].is_cuda:
                torch.cuda.synchronize()  # before anybody copies into it

    engine.cache._state.arena(Tier.DEVICE)._on_free = freed


def memory_of(engine: Engine) -> dict[Kind, torch.Tensor]:
    """All bytes of the device's pages, by kind."""
    pages = engine._runner._pages
    spec, found = engine.cache.spec, {}
    for kind in (Kind.PREFIX, Kind.ROWS):
        state_PLRB = pages._bytes[next(name for name in pages._bytes if name != "kv") if kind is Kind.PREFIX else "kv"]
        found[kind] = state_PLRB.as_strided((len(state_PLRB), spec.device_bytes(kind)), (state_PLRB.stride(0), 1), 0)
    return found


def report(made: Recorded | Engine) -> SpillReport:
    engine = made.engine if isinstance(made, Recorded) else made
    found = engine.spilling
    assert found is not None
    return found


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(128) for _ in range(length)] for length in lengths]


def watch(engine: Engine, look: Callable[[SpillReport], None]) -> None:
    """Calls `look` behind each step."""
    step = engine._step

    def watched() -> None:
        step()
        look(report(engine))

    engine._step = watched  # type: ignore[method-assign]
