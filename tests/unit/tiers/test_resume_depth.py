"""Requests that resume before their restore point, because computing the rest is sooner than loading it."""

from __future__ import annotations

import pytest

from stepwell import ModelSpec, PlacementConfig, Tier
from stepwell.base.tasks import Purpose
from stepwell.policy.loading import LEAST_LOAD_BYTES
from stepwell.tiers import copies
from toys import ALL_MODELS, FULL, OBJECT_BYTES, PAGE, Rig, text

PROMPT = text(1, 10 * PAGE + 1)
EVERY_PAGE = PlacementConfig(interval_tokens=PAGE, decode_interval_tokens=0)


def on_host(spec: ModelSpec = FULL, *, bytes_per_s: float = 1.0, tokens_per_s: float = 1e9) -> Rig:
    """A cache with ten pages on the host alone, that may compute, and thinks that loading and computing are so fast."""
    rig = Rig(spec, host_pages=128, placement=EVERY_PAGE)
    rig.serve(PROMPT)
    rig.evict_all(Tier.DEVICE)
    rig.state.compute_while_loading = True
    rig.state.copies.load_speed.per_s = bytes_per_s
    rig.state.compute_speed.measure(tokens_per_s, 1.0)
    return rig


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_what_computing_beats_is_computed_and_the_bytes_are_the_same(spec: ModelSpec) -> None:
    rig = on_host(spec)
    sources = rig.serve(PROMPT)  # which checks every byte
    assert (sources.host, sources.computed) == (0, 10 * PAGE + 1)
    assert rig.state.counters["computed_while_loading_tokens"] == 10 * PAGE
    assert rig.serve(PROMPT).device == 10 * PAGE, "what was computed is on the device"
    rig.idle_check()


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_while_a_load_arrives_as_much_is_computed_as_takes_as_long(spec: ModelSpec) -> None:
    rig = on_host(spec, bytes_per_s=OBJECT_BYTES / PAGE, tokens_per_s=1.0)  # a token a second, each
    rig.state.copies._arrivals = lambda job: None
    sources = rig.serve(PROMPT)
    assert 3 * PAGE <= sources.host <= 7 * PAGE and sources.total == len(PROMPT)
    rig.idle_check()


def test_loading_that_is_faster_is_left_alone() -> None:
    rig = on_host(bytes_per_s=1e9, tokens_per_s=1.0)
    assert rig.serve(PROMPT).host == 10 * PAGE
    rig.idle_check()


def test_nothing_is_computed_twice_before_both_speeds_are_known() -> None:
    rig = on_host()
    rig.state.copies.load_speed.per_s = None
    assert rig.serve(PROMPT).host == 10 * PAGE
    assert rig.state.counters["computed_while_loading_tokens"] == 0


def test_nothing_is_computed_twice_unless_it_was_asked_for() -> None:
    rig = on_host()
    rig.state.compute_while_loading = False
    assert rig.serve(PROMPT).host == 10 * PAGE


def test_large_loads_say_how_fast_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = on_host()
    rig.state.copies.load_speed.per_s, rig.state.compute_while_loading = None, False
    rig.serve(PROMPT)
    assert rig.state.copies.load_speed.per_s is None, f"{10 * OBJECT_BYTES} bytes are less than {LEAST_LOAD_BYTES}"
    monkeypatch.setattr(copies, "LEAST_LOAD_BYTES", 1)
    rig.evict_all(Tier.DEVICE)
    with rig.open(PROMPT):
        (job,) = rig.pending(Purpose.LOAD)
        rig.state.copies._measure(rig.executor.plan(job), 2.0)
        assert rig.state.copies.load_speed.per_s == 10 * OBJECT_BYTES / 2.0
    rig.idle_check()
