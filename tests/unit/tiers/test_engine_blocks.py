"""Engines that name their own memory say what they have: from which page on, where state exists, and before they compute it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_external import BorrowedRig

from stepwell import EnginePages, Kind, LeaseError, LeaseState, LoadFailed
from toys import KV, SSM, model, swa, text


def test_a_load_brings_only_what_the_engine_lacks() -> None:
    rig = BorrowedRig(model(KV, swa(8), SSM))
    lease, saved = rig.save(text(1, 17))
    rig.settle()
    rig.cache.release(lease)
    again, there = rig.open(text(1, 17)), rig.pages(16, start=20)
    before = rig.read(there)
    rig.cache.load(again, replace(there, prefix=there.prefix[3:], windows=there.windows[1:], first_page=3), since=12)
    rig.settle()
    found = rig.read(there)
    assert np.array_equal(found[Kind.PREFIX][:3], before[Kind.PREFIX][:3]), "the engine's own pages were written"
    assert np.array_equal(found[Kind.PREFIX][3:], saved[Kind.PREFIX][3:])
    assert np.array_equal(found[Kind.WINDOW][1:], saved[Kind.WINDOW][1:])
    assert np.array_equal(found[Kind.WINDOW][:1], before[Kind.WINDOW][:1])
    assert np.array_equal(found[Kind.POINT], saved[Kind.POINT])
    rig.cache.release(again)
    rig.idle_check()


@pytest.mark.parametrize(("since", "first_page"), [(3, 0), (20, 5), (-4, -1), (8, 0)])
def test_a_load_from_nowhere_is_refused(since: int, first_page: int) -> None:
    rig = BorrowedRig(model(KV))
    lease, _ = rig.save(text(1, 17))
    rig.settle()
    rig.cache.release(lease)
    again = rig.open(text(1, 17))
    with pytest.raises(LeaseError, match="loads from"):
        rig.cache.load(again, replace(rig.pages(16, start=20), first_page=first_page), since=since)
    rig.cache.release(again)
    rig.idle_check()


def test_commits_name_new_pages_only() -> None:
    rig = BorrowedRig(model(KV))
    lease, pages = rig.open(text(1, 25)), rig.pages(24)
    saved = rig.fill(pages)
    assert rig.cache.commit(lease, 8, source=replace(pages, prefix=pages.prefix[:2]))
    assert rig.cache.first_unsaved(lease) == 2
    assert rig.cache.commit(lease, 24, source=replace(pages, prefix=pages.prefix[2:], first_page=2))
    rig.settle()
    rig.cache.release(lease)
    again, there = rig.open(text(1, 25)), rig.pages(24, start=30)
    rig.cache.load(again, there)
    rig.settle()
    assert np.array_equal(rig.read(there)[Kind.PREFIX], saved[Kind.PREFIX])
    rig.cache.release(again)
    rig.idle_check()


def test_a_page_whose_copy_failed_must_be_named_again() -> None:
    rig = BorrowedRig(model(KV))
    lease, pages = rig.open(text(1, 25)), rig.pages(24)
    rig.fill(pages)
    rig.cache.commit(lease, 8, source=replace(pages, prefix=pages.prefix[:2]))
    rig.fail_all()
    assert rig.cache.first_unsaved(lease) == 0
    with pytest.raises(LeaseError, match=r"pages 0 to 5 [a-z ]+ saved, but the engine named"):
        rig.cache.commit(lease, 24, source=replace(pages, prefix=pages.prefix[2:], first_page=2))
    assert rig.cache.commit(lease, 24, source=pages)
    rig.settle()
    assert rig.restore(text(1, 25)) == 24
    rig.cache.release(lease)
    rig.idle_check()


def test_the_engine_says_where_state_exists() -> None:
    rig = BorrowedRig(model(KV, SSM))
    prompt = text(1, 33)
    lease, pages = rig.open(prompt), rig.pages(32)
    rig.fill(pages)
    assert rig.cache.wants_checkpoint(lease, 32) and not rig.cache.wants_checkpoint(lease, 16)
    assert not rig.cache.wants_checkpoint(lease, 30), "no boundary"
    rig.cache.commit(lease, 16, source=pages, checkpoint=True)
    rig.settle()
    rig.cache.commit(lease, 32, source=pages, checkpoint=False)
    rig.settle()
    assert rig.restore(prompt) == 16, "there is a checkpoint where the engine had state, and none where it had not"
    rig.cache.release(lease)
    rig.idle_check()


def test_a_checkpoint_named_ahead_holds_nobody_up() -> None:
    """An engine that keeps the state of a boundary in a block of its own goes on; its pages are used when they were copied."""
    rig = BorrowedRig(model(KV, SSM))
    lease, pages = rig.open(text(1, 25), hints=(16,)), rig.pages(24)
    rig.fill(pages)
    rig.cache.commit(lease, 16, source=replace(pages, ahead=True))
    assert lease.state is LeaseState.READY and len(lease.jobs) == 2
    rig.cache.commit(lease, 24, source=EnginePages(prefix=pages.prefix[4:], points=pages.points, first_page=4, ahead=True))
    assert rig.restore(text(1, 25)) == 0
    rig.settle()
    assert not lease.jobs and rig.restore(text(1, 25)) == 24
    rig.cache.release(lease)
    rig.idle_check()


def test_commits_ahead_do_not_count_as_computing() -> None:
    rig = BorrowedRig(model(KV))
    lease, pages = rig.open(text(1, 2000)), rig.pages(100)
    rig.clock.advance(1.0)
    rig.cache.commit(lease, 100, source=replace(pages, ahead=True))
    assert rig.state.compute_speed.per_s is None
    rig.cache.computed([(0, 1000)], 2.0)
    assert rig.state.compute_speed.per_s == pytest.approx(500)
    rig.settle()
    rig.cache.release(lease)


def test_a_lease_that_waits_may_lose_its_checkpoint_and_says_so() -> None:
    """Two requests want the same: the load of the first fails, and takes the checkpoint away before the second has begun."""
    rig = BorrowedRig(model(KV, SSM))
    lease, _ = rig.save(text(1, 17))
    rig.settle()
    rig.cache.release(lease)
    first, second = rig.open(text(1, 17)), rig.open(text(1, 17))
    rig.cache.load(first, rig.pages(16, start=20))
    assert rig.cache.can_load(second)
    assert rig.fail_all().failed == (first,)
    assert not rig.cache.can_load(second)
    with pytest.raises(LoadFailed, match="look the prompt up again"):
        rig.cache.load(second, rig.pages(16, start=40))
    rig.cache.release(first)
    rig.cache.release(second)
    rig.idle_check()
