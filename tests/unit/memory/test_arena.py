"""The arena: all or nothing, counted references, page states, slabs that change hands."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stepwell import Kind, NoRoom, Tier
from stepwell.base.ids import CACHED_KINDS
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import DEAD, FILLING, FREE, READY, Arena
from stepwell.memory.layout import ArenaLayout

SMALL = ArenaLayout(size_bytes=1000, slab_bytes=100, strides={Kind.PREFIX: 10, Kind.WINDOW: 20, Kind.POINT: 50})


def test_alloc_hands_out_filling_pages_with_one_reference() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    pages = arena.alloc({Kind.PREFIX: 3, Kind.POINT: 1})
    assert len(pages[Kind.PREFIX]) == 3 and len(pages[Kind.POINT]) == 1
    assert (arena.state[Kind.PREFIX][pages[Kind.PREFIX]] == FILLING).all()
    assert (arena.refs[Kind.PREFIX][pages[Kind.PREFIX]] == 1).all()
    assert arena.used_bytes == 3 * 10 + 50
    arena.audit()


def test_alloc_is_all_or_nothing() -> None:
    arena = Arena(Tier.HOST, SMALL)
    arena.alloc({Kind.POINT: 18})  # nine of ten slabs
    with pytest.raises(NoRoom, match="host tier has no memory for 5 prefix, 4 point"):
        arena.alloc({Kind.PREFIX: 5, Kind.POINT: 4})
    assert arena.used_pages(Kind.PREFIX) == 0 and arena.used_pages(Kind.POINT) == 18
    arena.audit()


def test_pages_of_different_kinds_never_overlap() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    taken = arena.alloc({Kind.PREFIX: 25, Kind.WINDOW: 8, Kind.POINT: 7})
    owner = np.full(SMALL.size_bytes, -1)
    for kind, ids in taken.items():
        stride = SMALL.strides[kind]
        for page in ids.tolist():
            where = slice(page * stride, (page + 1) * stride)
            assert page * stride + stride <= SMALL.size_bytes and (owner[where] == -1).all()
            owner[where] = kind


@pytest.mark.parametrize("count", [1, 7, 10, 11, 25, 60])
def test_pages_come_back_to_their_own_slabs_in_any_order(count: int) -> None:
    """Few or many at once, of one slab or of several."""
    arena = Arena(Tier.DEVICE, SMALL)
    pages = arena.alloc({Kind.PREFIX: 100})[Kind.PREFIX]
    back = np.array(random.Random(count).sample(pages[:count].tolist(), count), np.int32)
    assert sorted(arena.release(Kind.PREFIX, back).tolist()) == sorted(pages[:count].tolist())
    arena.audit()
    assert arena.fits({Kind.PREFIX: count}) and not arena.fits({Kind.PREFIX: count + 1})
    assert arena.fits({Kind.POINT: 2 * (count // 10)}) and not arena.fits({Kind.POINT: 2 * (count // 10) + 1})


def test_an_empty_slab_changes_hands() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    prefix = arena.alloc({Kind.PREFIX: 100})[Kind.PREFIX]
    assert not arena.fits({Kind.POINT: 1})
    arena.release(Kind.PREFIX, prefix[90:99])
    assert not arena.fits({Kind.POINT: 1})  # one page of the slab is still used
    arena.release(Kind.PREFIX, prefix[99:])
    assert arena.fits({Kind.POINT: 2}) and not arena.fits({Kind.POINT: 3})
    arena.alloc({Kind.POINT: 2})
    arena.audit()


def test_fits_agrees_with_alloc_and_knows_the_empty_arena() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    arena.alloc({Kind.PREFIX: 95})
    assert not arena.fits({Kind.PREFIX: 6}) and arena.fits({Kind.PREFIX: 5})
    assert arena.fits_when_empty({Kind.PREFIX: 100}) and not arena.fits_when_empty({Kind.PREFIX: 101})
    assert arena.fits_when_empty({Kind.POINT: 20}) and not arena.fits_when_empty({Kind.POINT: 20, Kind.WINDOW: 1})
    assert arena.used_pages(Kind.PREFIX) == 95


def test_alloc_if_fits_hands_out_what_alloc_would_or_nothing() -> None:
    arena, other = Arena(Tier.DEVICE, SMALL), Arena(Tier.DEVICE, SMALL)
    pages = arena.alloc_if_fits({Kind.PREFIX: 95})
    assert pages is not None and pages[Kind.PREFIX].tolist() == other.alloc({Kind.PREFIX: 95})[Kind.PREFIX].tolist()
    assert arena.alloc_if_fits({Kind.PREFIX: 6}) is None
    assert arena.used_pages(Kind.PREFIX) == 95
    arena.audit()


def test_release_frees_with_the_last_reference_only() -> None:
    freed: list[tuple[Tier, Kind, list[int]]] = []
    arena = Arena(Tier.HOST, SMALL, on_free=lambda tier, kind, ids: freed.append((tier, kind, ids.tolist())))
    ids = arena.alloc({Kind.WINDOW: 2})[Kind.WINDOW]
    arena.retain(Kind.WINDOW, ids[:1])
    assert arena.release(Kind.WINDOW, ids).tolist() == ids[1:].tolist()
    assert arena.release(Kind.WINDOW, ids[:1]).tolist() == ids[:1].tolist()
    assert freed == [(Tier.HOST, Kind.WINDOW, [ids[1]]), (Tier.HOST, Kind.WINDOW, [ids[0]])]
    assert arena.used_bytes == 0


def test_a_free_page_cannot_be_released_or_retained() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    ids = arena.alloc({Kind.PREFIX: 1})[Kind.PREFIX]
    arena.release(Kind.PREFIX, ids)
    for misuse in (arena.release, arena.retain, arena.mark_ready):
        with pytest.raises(AssertionError, match="free"):
            misuse(Kind.PREFIX, ids)
    arena.audit()


def test_states_go_forward_only() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    ids = arena.alloc({Kind.PREFIX: 3})[Kind.PREFIX]
    arena.mark_ready(Kind.PREFIX, ids[:1])
    arena.mark_dead(Kind.PREFIX, ids[:2])  # the first has its bytes already
    arena.mark_ready(Kind.PREFIX, ids[1:])  # the second will never have them
    assert arena.state[Kind.PREFIX][ids].tolist() == [READY, DEAD, READY]
    assert not arena.is_ready(Kind.PREFIX, ids) and arena.is_ready(Kind.PREFIX, ids[[0, 2]])
    arena.release(Kind.PREFIX, ids)
    assert (arena.state[Kind.PREFIX] == FREE).all()


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_never_exceeds_the_budget_nor_shares_a_page(seed: int) -> None:
    random_ = random.Random(seed)
    layout = ArenaLayout(size_bytes=1370, slab_bytes=120, strides={Kind.PREFIX: 7, Kind.WINDOW: 30, Kind.POINT: 100})
    arena = Arena(Tier.DEVICE, layout)
    held: list[tuple[Kind, PageIds]] = []
    for _ in range(300):
        if held and random_.random() < 0.5:
            kind, ids = held.pop(random_.randrange(len(held)))
            arena.release(kind, ids)
        else:
            need = {kind: random_.randrange(6) for kind in CACHED_KINDS}
            fits = arena.fits(need)
            try:
                held += list(arena.alloc(need).items())
            except NoRoom:
                assert not fits
            else:
                assert fits
        for kind in CACHED_KINDS:
            mine = [page for each, ids in held if each is kind for page in ids.tolist()]
            assert len(set(mine)) == len(mine) == arena.used_pages(kind)
        arena.audit()
    for kind, ids in held:
        arena.release(kind, ids)
    arena.audit()
    assert arena.used_bytes == 0


def test_pages_that_only_the_tree_keeps_do_not_count_as_busy() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    ids = arena.alloc({Kind.PREFIX: 4})[Kind.PREFIX]
    assert arena.busy_bytes == 40
    arena.retain_for_tree(Kind.PREFIX, ids)
    arena.release(Kind.PREFIX, ids[:3])
    assert arena.busy_bytes == 10 and arena.used_bytes == 40
    assert arena.could_fit({Kind.PREFIX: 99}) and not arena.could_fit({Kind.PREFIX: 100})
    arena.retain(Kind.PREFIX, ids[:1])
    assert arena.busy_bytes == 20
    arena.audit()
    assert arena.release_for_tree(Kind.PREFIX, ids).tolist() == ids[1:3].tolist()
    assert arena.busy_bytes == arena.used_bytes == 20
    arena.audit()


def test_shortage_is_what_must_come_free() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    arena.alloc({Kind.PREFIX: 85})
    assert [arena.shortage({Kind.PREFIX: count}) for count in (1, 15, 16)] == [{}, {}, {Kind.PREFIX: 1}]
    arena.alloc({Kind.POINT: 1})
    assert arena.shortage({Kind.PREFIX: 15}) == {Kind.PREFIX: 10}


def test_shortage_knows_that_the_last_slab_is_short() -> None:
    arena = Arena(Tier.DEVICE, ArenaLayout(size_bytes=330, slab_bytes=100, strides={Kind.PREFIX: 10, Kind.POINT: 50}))
    arena.alloc({Kind.PREFIX: 30})
    assert arena.shortage({Kind.PREFIX: 5}) == {Kind.PREFIX: 2}, "three pages are left, not a slab of ten"
    assert arena.shortage({Kind.PREFIX: 1, Kind.POINT: 1}) == {Kind.POINT: 1}, "too short for a point"


def test_shortage_gives_an_idle_slab_to_one_kind_only() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    arena.alloc({Kind.PREFIX: 90})
    assert arena.shortage({Kind.PREFIX: 4, Kind.POINT: 1}) == {Kind.PREFIX: 4}
    assert arena.shortage({Kind.PREFIX: 4, Kind.POINT: 3}) == {Kind.PREFIX: 4, Kind.POINT: 1}


@pytest.mark.parametrize("seed", range(5))
def test_freeing_what_is_short_is_enough_and_less_is_not(seed: int) -> None:
    random_ = random.Random(seed)
    layout = ArenaLayout(size_bytes=1370, slab_bytes=120, strides={Kind.PREFIX: 7, Kind.WINDOW: 30})
    arena = Arena(Tier.DEVICE, layout)
    while not arena.shortage({Kind.PREFIX: 20}):
        arena.alloc({Kind.PREFIX: random_.randint(1, 8), Kind.WINDOW: random_.randint(0, 1)})
    held = np.flatnonzero(arena.refs[Kind.PREFIX]).astype(np.int32)
    short = arena.shortage({Kind.PREFIX: 20})[Kind.PREFIX]
    arena.release(Kind.PREFIX, held[: short - 1])
    assert not arena.fits({Kind.PREFIX: 20})
    arena.release(Kind.PREFIX, held[short - 1 : short])
    assert arena.fits({Kind.PREFIX: 20})


def test_prefix_pages_leave_the_slabs_that_windows_of_running_requests_took() -> None:
    arena = Arena(Tier.DEVICE, ArenaLayout(size_bytes=3200, slab_bytes=100, strides={Kind.PREFIX: 10, Kind.WINDOW: 20}))
    arena.release(Kind.WINDOW, arena.alloc({Kind.WINDOW: 8})[Kind.WINDOW])  # two slabs of 32
    arena.alloc({Kind.PREFIX: 300})
    assert arena.shortage({Kind.PREFIX: 1}) == {Kind.PREFIX: 1} and arena.fits({Kind.WINDOW: 10})
    assert arena.unreserve() and not arena.unreserve()
    assert arena.fits({Kind.PREFIX: 20}), "a request that no eviction can serve may have them"
    arena.audit()


def test_no_more_than_a_sixteenth_is_reserved() -> None:
    arena = Arena(Tier.DEVICE, ArenaLayout(size_bytes=3200, slab_bytes=100, strides={Kind.PREFIX: 10, Kind.WINDOW: 20}))
    arena.release(Kind.WINDOW, arena.alloc({Kind.WINDOW: 80})[Kind.WINDOW])
    assert arena.fits({Kind.PREFIX: 300}) and not arena.fits({Kind.PREFIX: 301})


def test_audit_sees_a_count_that_is_off() -> None:
    arena = Arena(Tier.DEVICE, SMALL)
    ids = arena.alloc({Kind.PREFIX: 2})[Kind.PREFIX]
    arena.refs[Kind.PREFIX][ids[0]] = 0
    with pytest.raises(AssertionError, match="device prefix"):
        arena.audit()
