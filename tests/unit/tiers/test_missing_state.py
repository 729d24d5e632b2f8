"""Optional states that pages do not hold: named by explanations, through splits and evictions, and of no other effect."""

from __future__ import annotations

import pytest

from stepwell import Cause, Prefix, StateSpec, Tier
from stepwell.base.errors import LeaseError
from toys import KV, PAGE, Rig, model, text

DRAFT = StateSpec(name="draft", shape=Prefix(), layers=1, row_bytes=8, dtype="u8", required=False)
SPEC = model(KV, DRAFT)
PROMPT = text(1, 25)


def missing_states(rig: Rig, tokens: list[int] = PROMPT) -> dict[str, int]:
    return dict(rig.cache.explain(tokens).missing_states)


def served_without(rig: Rig, since: int, tokens: list[int] = PROMPT) -> None:
    with rig.ready(tokens) as lease:
        rig.prefill(lease, max(since, lease.position))
        rig.cache.note_missing_state(lease, "draft", since=since)
        rig.prefill(lease)
    rig.settle()
    rig.cache.audit()


def test_what_a_request_lacks_is_named_from_its_first_token_on() -> None:
    rig = Rig(SPEC)
    served_without(rig, 10)
    assert missing_states(rig) == {"draft": 10}
    why = rig.cache.explain(PROMPT)
    assert why.cause is Cause.COMPLETE and why.restore_tokens == 24, "it limits nothing"
    assert str(why).endswith("everything that can be reused is reused; without draft from token 10 on, so slower")
    assert missing_states(rig, PROMPT[:9]) == {}, "nothing is missing of the pages that it would resume from"
    assert missing_states(rig, PROMPT[:13]) == {"draft": 10}


def test_a_split_deals_notes_to_the_part_they_are_about() -> None:
    rig = Rig(SPEC)
    served_without(rig, 18)
    rig.serve([*PROMPT[:12], *text(2, 9)])  # leaves the path after three pages
    assert missing_states(rig) == {"draft": 18}
    assert missing_states(rig, [*PROMPT[:12], *text(2, 9)]) == {}
    rig.serve([*PROMPT[:20], *text(3, 9)])
    assert missing_states(rig, [*PROMPT[:20], *text(3, 9)]) == missing_states(rig) == {"draft": 18}
    rig.cache.audit()


def test_notes_leave_with_their_pages_and_stay_with_a_copy() -> None:
    rig = Rig(SPEC, host_pages=256)
    served_without(rig, 10)
    rig.evict_all(Tier.DEVICE)
    assert missing_states(rig) == {"draft": 10}, "the host has the same bytes"
    rig.evict_all(Tier.HOST)
    rig.serve(PROMPT)
    assert missing_states(rig) == {}, "these pages have it"


def test_a_page_cut_off_takes_its_note_along() -> None:
    rig = Rig(SPEC, device_pages=32)
    served_without(rig, 18)
    rig.shrink(Tier.DEVICE, 2)
    rig.cache.audit()
    assert rig.restore(PROMPT) == 16 and missing_states(rig) == {}
    rig.serve(PROMPT)
    assert missing_states(rig) == {}


def test_pages_that_another_request_left_first_are_not_accused() -> None:
    rig = Rig(SPEC)
    first, second = rig.ready(PROMPT), rig.ready(PROMPT)
    rig.cache.note_missing_state(second, "draft", since=0)
    rig.prefill(first, 16)
    rig.prefill(second)  # all its pages are its own, and the tree takes those from page 4 on
    rig.prefill(first)
    for lease in (first, second):
        rig.cache.release(lease)
    rig.settle()
    rig.cache.audit()
    assert missing_states(rig) == {"draft": 16}


def test_what_is_found_missing_at_a_resume_is_noted_on_the_path() -> None:
    rig = Rig(SPEC)
    rig.serve(PROMPT)
    with rig.ready([*PROMPT, *text(2, 8)]) as lease:
        assert lease.resume == 24
        rig.cache.note_missing_state(lease, "draft", since=9)
        assert missing_states(rig) == {"draft": 9}
        rig.cache.note_missing_state(lease, "draft", since=14)  # later than is known
        assert missing_states(rig) == {"draft": 9}
    rig.settle()
    rig.cache.audit()


def test_a_required_state_cannot_be_missing() -> None:
    rig = Rig(SPEC)
    with rig.ready(PROMPT) as lease, pytest.raises(LeaseError, match="required"):
        rig.cache.note_missing_state(lease, "kv", since=PAGE)
