"""A prompt resumed from any tier gives the same bits as one resumed from the device, and the same answer as one computed anew.

Bits are compared where passes cut the prompt alike, for products round by their size. With checkpoints at branches the cuts
depend on how much text is known beyond the restore point; so those are off where a memory was emptied, and on elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.families import FAMILIES
from parity.recorded import PAGE, Played, Recorded, distance, replay, same_bits, script, store_at
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.policy.placement import PlacementRules

pytest.importorskip("transformers")

TOLERANCE = 1e-4
WAIT = StoreConfig(
    prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0
)  # fetching is always worth it


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def resident(family: str) -> list[Played]:
    """What the device alone remembers."""
    recorded = Recorded(family)
    played = script(recorded, seed=5)
    recorded.close()
    assert any(each.resumed for each in played)
    return played


def check_same(again: list[Played], resident: list[Played]) -> None:
    for now, then in zip(again, resident, strict=True):
        assert now.resumed == then.resumed, f"resumed at {now.resumed}, on the device at {then.resumed}"
        assert now.chunks == then.chunks
        assert same_bits(now, then), f"differs by {distance(now, then)}"


def test_cold_answers_are_the_same_within_rounding(family: str, resident: list[Played]) -> None:
    recorded = Recorded(family)
    for then in resident:
        cold = recorded.play(then.prompt, use_cache=False)
        assert cold.resumed == 0 and cold.tokens == then.tokens
        assert distance(cold, then) <= TOLERANCE
    recorded.close()


def test_from_the_host(family: str, resident: list[Played]) -> None:
    def evict(recorded: Recorded) -> Recorded:
        recorded.evict_to_host()
        return recorded

    again = replay(Recorded(family), resident, evict)
    check_same(again, resident)
    assert sum(each.host for each in again) >= sum(each.resumed for each in again) - len(again) * PAGE


def test_from_the_host_with_checkpoints_at_branches(family: str) -> None:
    """With the defaults, known prompts decide where passes end, and eviction to the host loses nothing."""
    placement = PlacementRules(interval_tokens=4 * PAGE, most_added=None, decode_interval_tokens=2 * PAGE)
    on_device = Recorded(family, placement=placement)
    played = script(on_device, seed=11)
    on_device.close()

    def evict(recorded: Recorded) -> Recorded:
        recorded.evict_to_host()
        return recorded

    check_same(replay(Recorded(family, placement=placement), played, evict), played)


@pytest.mark.parametrize("compressed", ["deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_linear"])
def test_eight_bit_rows_from_host_and_store(compressed: str, tmp_path: Path) -> None:
    on_device = Recorded(compressed, kv_dtype="fp8")
    played = script(on_device, seed=5)
    on_device.close()

    def evict(recorded: Recorded) -> Recorded:
        recorded.evict_to_host()
        return recorded

    def forget(recorded: Recorded) -> Recorded:
        recorded.forget_memory()
        return recorded

    check_same(replay(Recorded(compressed, kv_dtype="fp8"), played, evict), played)
    stored = Recorded(compressed, kv_dtype="fp8", **store_at(tmp_path / "log"), store_config=WAIT)
    check_same(replay(stored, played, forget), played)


def test_from_the_store(family: str, resident: list[Played], tmp_path: Path) -> None:
    def forget(recorded: Recorded) -> Recorded:
        recorded.forget_memory()
        return recorded

    again = replay(Recorded(family, **store_at(tmp_path / "log"), store_config=WAIT), resident, forget)
    check_same(again, resident)
    assert sum(each.stored for each in again) == sum(each.resumed for each in again) > 0


def test_after_a_restart(family: str, resident: list[Played], tmp_path: Path) -> None:
    settings = {**store_at(tmp_path / "log"), "store_config": WAIT}

    def restart(recorded: Recorded) -> Recorded:
        recorded.close()
        return Recorded(family, **settings)

    again = replay(Recorded(family, **settings), resident, restart)
    check_same(again, resident)
    assert sum(each.stored for each in again) == sum(each.resumed for each in again) > 0


def test_a_damaged_store_costs_time_and_never_truth(family: str, resident: list[Played], tmp_path: Path) -> None:
    settings = {**store_at(tmp_path / "log"), "store_config": WAIT}
    first = Recorded(family, **settings)
    for each in resident:
        first.play(each.prompt)
    first.close()
    for segment in sorted((tmp_path / "log").glob("*.seg")):
        content = bytearray(segment.read_bytes())
        for at in range(9000, len(content), 40_000):
            content[at] ^= 0x10
        segment.write_bytes(content)
    second = Recorded(family, **settings)
    for then in resident:
        now = second.play(then.prompt)
        second.forget_memory()
        assert now.tokens == then.tokens and distance(now, then) <= TOLERANCE
    second.close()


def test_under_pressure_in_every_tier(family: str, resident: list[Played], tmp_path: Path) -> None:
    """Tiers that hold a fraction of the conversations, and several requests at once: some are preempted, and all are right."""
    recorded = Recorded(
        family, device_memory="1MiB", host_memory="1MiB", chunk_tokens=48,
        placement=PlacementRules(interval_tokens=4 * PAGE, most_added=None),
        **store_at(tmp_path / "log", "4MiB"), store_config=WAIT,
    )  # fmt: skip
    for start in range(0, len(resident), 3):
        some = resident[start : start + 3]
        for now, then in zip(recorded.play_all([each.prompt for each in some]), some, strict=True):
            assert now.tokens == then.tokens and distance(now, then) <= TOLERANCE
    recorded.close()
