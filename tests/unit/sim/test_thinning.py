"""Checkpoints that a later one supersedes on its path, through the facade."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stepwell import ModelSpec, PlacementConfig
from stepwell.sim import thinning
from stepwell.sim.thinning import Thinning
from toys import FULL_POINT, FULL_WINDOW, HYBRID, NO_INTERVALS, PAGE, SMALL_PAGES, Rig, text

EVERY_SECOND_PAGE = PlacementConfig(interval_tokens=2 * PAGE, decode_interval_tokens=0)
CAPPED: dict[str, Any] = {"placement": NO_INTERVALS, "tuning": replace(SMALL_PAGES, on_checkpoint=Thinning(path_cap=3))}
THINNED: dict[str, Any] = {"placement": EVERY_SECOND_PAGE, "tuning": replace(SMALL_PAGES, on_checkpoint=Thinning(thinning=0.5))}


def _boundaries(rig: Rig, tokens: list[int]) -> list[int]:
    """Where one can resume on a path."""
    return sorted({rig.restore(tokens[:upto]) for upto in range(1, len(tokens) + 1)} - {0})


def _superseded(rig: Rig) -> int:
    return sum(rig.cache.counters[f"superseded_{tier}_checkpoints"] for tier in ("device", "host"))


@pytest.mark.parametrize("spec", [FULL_WINDOW, FULL_POINT, HYBRID])
def test_a_growing_conversation_keeps_as_many_as_its_cap(spec: ModelSpec) -> None:
    rig = Rig(spec, host_pages=256, **CAPPED)
    for turn in range(1, 9):
        assert rig.serve(text(1, 12 * turn + 1)).computed == 13
        assert _boundaries(rig, text(1, 12 * turn + 1)) == [12 * at for at in range(max(turn - 2, 1), turn + 1)]
    assert rig.cache.counters["superseded_device_checkpoints"] == rig.cache.counters["superseded_host_checkpoints"] == 5
    rig.idle_check()


def test_where_others_have_left_the_path_the_cap_takes_last() -> None:
    rig = Rig(HYBRID, **CAPPED)
    for name in (2, 3):
        rig.serve([*text(1, 8), *text(name, 5)])
    for turn in range(1, 7):
        prompt = [*text(1, 8), *text(4, 12 * turn + 1)]
        rig.serve(prompt)
        assert len(_boundaries(rig, prompt)) <= 3
        assert 8 in _boundaries(rig, prompt), "new conversations begin here"
    assert rig.serve([*text(1, 8), *text(5, 5)]).device == 8


def test_what_another_request_resumed_from_is_not_superseded_under_it() -> None:
    rig = Rig(HYBRID, **CAPPED)
    rig.serve(text(1, 9))
    reader = rig.ready([*text(1, 8), *text(2, 4)])
    assert reader.resume == 8
    for turn in range(2, 7):
        prompt = text(1, 8 * turn + 1)
        rig.serve(prompt)
        assert _boundaries(rig, prompt) == [8, *range(8 * max(turn - 1, 2), 8 * turn + 1, 8)]
    rig.prefill(reader)
    rig.engine.check(reader)
    rig.cache.release(reader)
    rig.idle_check()


def test_what_is_still_on_its_way_down_is_not_superseded() -> None:
    rig = Rig(FULL_WINDOW, host_pages=256, tuning=replace(SMALL_PAGES, on_checkpoint=Thinning(path_cap=1)))
    lease = rig.ready(text(1, 21), hints=(8, 12, 16))
    for stop in (8, 12, 16):
        rig.compute(lease, stop)  # saves are not answered
        rig.cache.audit()
        assert _boundaries(rig, text(1, 21)) == [at for at in (8, 12, 16) if at <= stop]
    rig.settle()
    rig.prefill(lease)
    rig.cache.release(lease)
    rig.idle_check()
    assert _boundaries(rig, text(1, 21)) == [20]


def test_spacing_grows_along_a_long_prompt() -> None:
    rig = Rig(HYBRID, device_pages=2048, host_pages=4096, **THINNED)
    rig.serve(text(1, 801))
    kept = _boundaries(rig, text(1, 801))
    assert kept[-1] == 800 and len(kept) < 16
    assert 200 < kept[0] < 400 and kept[-2] >= 784
    assert _superseded(rig) == 2 * (100 - len(kept))
    assert rig.serve([*text(1, 500), 7]).computed < 501 - kept[0]
    rig.idle_check()


def test_only_so_many_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "LOOK_BACK", 4)
    rig = Rig(HYBRID, device_pages=4096, **THINNED)
    rig.serve(text(1, 801))
    kept = _boundaries(rig, text(1, 801))
    assert len(kept) > 16, "what lies further back stays"
    rig.idle_check()


@pytest.mark.parametrize("rule", [CAPPED, THINNED])
@pytest.mark.parametrize("spec", [FULL_WINDOW, FULL_POINT, HYBRID])
def test_random_conversations_stay_exact(spec: ModelSpec, rule: dict[str, Any]) -> None:
    rng = random.Random(5)
    rig = Rig(spec, device_pages=96, host_pages=192, **rule)
    paths = [text(name, 4) for name in range(1, 4)]
    reused = 0
    for number in range(60):
        path = rng.choice(paths)
        cut = path[: rng.randrange(len(path) // 2, len(path)) + 1] if rng.random() < 0.3 else path
        prompt = [*cut, *text(1000 + number, rng.randrange(1, 17))]
        if len(prompt) > 120:
            prompt = prompt[:40]
        paths.append(prompt)
        sources = rig.serve(prompt)  # bytes are checked, and the audit passes
        reused += sources.total - sources.computed
        if rule is CAPPED:
            assert len(_boundaries(rig, [*prompt, 1])) <= 4, "one more while the newest was left behind another"
    assert reused > 0 and _superseded(rig) > 0
    rig.idle_check()
