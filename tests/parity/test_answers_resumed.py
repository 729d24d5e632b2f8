"""Answers are prompts of tomorrow: the next prompt resumes behind the last full page of the answer that it repeats."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest

from engine.families import FAMILIES
from parity.recorded import PAGE, Recorded, distance, same_bits, store_at
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.policy.placement import PlacementRules
from waiting import step_until

pytest.importorskip("transformers")

TOLERANCE = 1e-4
AS_SHIPPED = PlacementRules(interval_tokens=0, most_added=None)
PROMPT = [7 * at % 113 + 3 for at in range(2 * PAGE + 5)]
RESTS = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0.05)
NEXT = [11 * at % 109 + 5 for at in range(PAGE - 3)]


@pytest.mark.parametrize("reads_later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_prompt_resumes_behind_the_last_full_page_of_the_answer(family: str, reads_later: bool) -> None:
    turns = {}
    for where in ("device", "host", "cold"):
        recorded = Recorded(family, placement=AS_SHIPPED)
        recorded.engine.passing.reads_later = reads_later
        first = recorded.play(PROMPT, answer=3 * PAGE - 2)
        follow = [*PROMPT, *first.tokens, *NEXT]
        if where == "host":
            recorded.evict_to_host()
        turns[where] = recorded.play(follow, use_cache=where != "cold")
        computed = recorded.engine.cache.spec.floor(len(follow) - len(NEXT) - 1)  # the last token was chosen, and not computed
        assert turns[where].resumed == (computed if where != "cold" else 0)
        recorded.close()
    assert same_bits(turns["device"], turns["host"]), f"differs by {distance(turns['device'], turns['host'])}"
    assert turns["cold"].tokens == turns["device"].tokens and distance(turns["cold"], turns["device"]) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_process_that_is_killed_once_the_answer_has_rested_leaves_it_to_the_next(family: str, tmp_path: Path) -> None:
    alive = Recorded(family, placement=AS_SHIPPED, **store_at(tmp_path / "log"), store_config=RESTS)
    first = alive.play(PROMPT, answer=3 * PAGE - 2)
    alive.settle()
    step_until(alive.engine.cache, lambda: not alive.engine.cache.stats().deferred)
    alive.settle()
    copytree(tmp_path / "log", tmp_path / "left")  # as a kill would leave it: nothing was closed or flushed
    follow = [*PROMPT, *first.tokens, *NEXT]
    resident = alive.play(follow)
    alive.close()
    after = Recorded(family, placement=AS_SHIPPED, **store_at(tmp_path / "left"), store_config=RESTS)
    restored = after.play(follow)
    computed = after.engine.cache.spec.floor(len(follow) - len(NEXT) - 1)
    after.close()
    assert restored.resumed == restored.stored == resident.resumed == computed
    assert same_bits(restored, resident), f"differs by {distance(restored, resident)}"
