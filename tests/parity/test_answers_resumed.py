"""Answers are prompts of tomorrow: the next prompt resumes behind the last full page of the answer that it repeats."""

from __future__ import annotations

import pytest

from engine.families import FAMILIES
from parity.recorded import PAGE, Recorded, distance, same_bits
from stepwell.policy.placement import PlacementRules

pytest.importorskip("transformers")

TOLERANCE = 1e-4
AS_SHIPPED = PlacementRules(interval_tokens=0, most_added=None)
PROMPT = [7 * at % 113 + 3 for at in range(2 * PAGE + 5)]
NEXT = [11 * at % 109 + 5 for at in range(PAGE - 3)]


@pytest.mark.parametrize("reads_later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_prompt_resumes_behind_the_last_full_page_of_the_answer(family: str, reads_later: bool) -> None:
    turns = {}
    for where in ("device", "host", "cold"):
        recorded = Recorded(family, placement=AS_SHIPPED)
        recorded.engine._reads_later = reads_later
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
