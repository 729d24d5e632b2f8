"""Row pages: every prefix page has its rows in one place, and every change is reported once."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from stepwell import Kind, Tier
from stepwell.base.tasks import PageIds
from stepwell.memory.arena import Arena
from stepwell.memory.layout import ArenaLayout
from stepwell.memory.row_pages import ABSENT, Changes, RowPages

LAYOUT = ArenaLayout(size_bytes=2000, slab_bytes=200, strides={Kind.PREFIX: 10, Kind.ROWS: 40}, tier=Tier.DEVICE)


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int32)


def made() -> tuple[Arena, RowPages]:
    arena = Arena(Tier.DEVICE, LAYOUT)
    return arena, RowPages(arena)


def bound(arena: Arena, count: int, *, first: int = 0) -> tuple[PageIds, PageIds]:
    taken = arena.alloc({Kind.PREFIX: count, Kind.ROWS: count})
    assert isinstance(arena.page_use, RowPages)
    arena.page_use.bind(taken[Kind.PREFIX], taken[Kind.ROWS], np.arange(first, first + count))
    return taken[Kind.PREFIX], taken[Kind.ROWS]


def ready(arena: Arena, prefix: PageIds, rows: PageIds) -> None:
    arena.mark_ready(Kind.PREFIX, prefix)
    arena.mark_ready(Kind.ROWS, rows)


def test_bound_rows_do_not_stand_in_the_way_of_eviction() -> None:
    arena, _ = made()
    bound(arena, 3)
    assert arena.busy_bytes == 3 * 10, "the rows could go, to the host"
    arena.audit()


def test_rows_go_with_their_page() -> None:
    arena, pages = made()
    prefix, rows = bound(arena, 3)
    ready(arena, prefix, rows)
    assert pages.whole(prefix).all()
    arena.release(Kind.PREFIX, prefix[:2])
    assert arena.used_pages(Kind.ROWS) == 1 and (pages.rows[prefix[:2]] == ABSENT).all()
    pages.audit()
    arena.audit()


def test_pages_are_whole_when_their_rows_have_arrived() -> None:
    arena, pages = made()
    prefix, rows = bound(arena, 2)
    assert not pages.whole(prefix).any()
    arena.mark_ready(Kind.ROWS, rows[:1])
    assert pages.whole(prefix).tolist() == [True, False]


def test_shed_rows_are_free_and_the_host_page_is_let_go_with_the_page() -> None:
    arena, pages = made()
    prefix, rows = bound(arena, 2)
    ready(arena, prefix, rows)
    pages.shed(prefix, ids(70, 71))
    assert arena.used_pages(Kind.ROWS) == 0 and pages.backed(prefix).all() and pages.num_backed == 2
    assert pages.backed_by(ids(71, 72)).tolist() == [prefix[1]]
    assert pages.holders()[1].tolist() == [70, 71] and not len(pages.unreferenced_host_pages())
    pages.audit()
    arena.release(Kind.PREFIX, prefix[:1])
    assert pages.num_backed == 1 and sorted(pages.holders()[1].tolist()) == [70, 71], "not freed inside release"
    assert pages.unreferenced_host_pages().tolist() == [70] and not len(pages.unreferenced_host_pages())
    assert pages.holders()[1].tolist() == [71]
    pages.audit()


def test_rows_that_a_copy_still_reads_are_free_when_it_lets_go() -> None:
    arena, pages = made()
    prefix, rows = bound(arena, 1)
    ready(arena, prefix, rows)
    arena.retain(Kind.ROWS, rows)
    pages.shed(prefix, ids(5))
    assert arena.used_pages(Kind.ROWS) == 1
    arena.release(Kind.ROWS, rows)
    assert arena.used_pages(Kind.ROWS) == 0


def test_a_page_is_placed_once() -> None:
    arena, pages = made()
    prefix, _ = bound(arena, 1)
    with pytest.raises(AssertionError, match="have rows already"):
        pages.back(prefix, ids(3), [0])
    with pytest.raises(AssertionError, match="no rows to free"):
        pages.shed(arena.alloc({Kind.PREFIX: 1})[Kind.PREFIX], ids(3))


def test_changes_are_told_once_and_only_of_pages_that_are_still_there() -> None:
    arena, pages = made()
    prefix, rows = bound(arena, 3, first=4)
    arena.release(Kind.PREFIX, prefix[2:])

    def refuse(changes: Changes) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        pages.drain(refuse)  # nothing of it is lost
    changes = pages.drain()
    assert changes.new.tolist() == changes.pages.tolist() == prefix[:2].tolist()
    assert changes.header_N3.tolist() == [[4, rows[0], ABSENT], [5, rows[1], ABSENT]]
    again = pages.drain()
    assert not len(again.new) and not len(again.pages) and again.header_N3.shape == (0, 3)
    ready(arena, prefix[:2], rows[:2])
    pages.shed(prefix[1:2], ids(9))
    changes = pages.drain()
    assert not len(changes.new), "what is known of its hot rows stays true"
    assert changes.pages.tolist() == [prefix[1]] and changes.header_N3.tolist() == [[5, ABSENT, 9]]


def test_a_recycled_page_is_new_again() -> None:
    arena, pages = made()
    prefix, _ = bound(arena, 1)
    pages.drain()
    arena.release(Kind.PREFIX, prefix)
    again, _ = bound(arena, 1, first=7)
    assert again.tolist() == prefix.tolist()
    assert pages.drain().new.tolist() == prefix.tolist()


def test_hot_pages_get_the_lowest_numbers_and_are_told_of_with_the_last_that_holds() -> None:
    arena, pages = made()
    rows = arena.alloc({Kind.ROWS: 4})[Kind.ROWS]
    numbers = pages.assign_hot(rows[:3])
    assert numbers.tolist() == [0, 1, 2]
    changes = pages.drain()
    assert changes.numbers.tolist() == [0, 1, 2] and changes.hot_pages.tolist() == rows[:3].tolist()
    pages.unassign_hot(numbers[:2])
    assert pages.assign_hot(rows[3:]).tolist() == [0]
    changes = pages.drain()
    assert changes.numbers.tolist() == [0, 1] and changes.hot_pages.tolist() == [rows[3], ABSENT]
    pages.audit()
    with pytest.raises(AssertionError, match="belong to prefix pages"):
        pages.assign_hot(bound(arena, 1)[1])


class Shadow:
    """The same in dictionaries, and what a reader of the changes would know."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.ordinal: dict[int, int] = {}
        self.new: set[int] = set()
        self.headers: dict[int, tuple[int, int, int]] = {}  # as reported
        self.hot: dict[int, int] = {}
        self.told_hot: dict[int, int] = {}
        self.use: dict[int, str] = {}  # "own" for who holds it alone, "tree" for idle ones, "both"

    def free(self, page: int) -> int | None:
        self.rows.pop(page, None)
        self.use.pop(page, None)
        self.new.discard(page)
        return self.host.pop(page, None)

    def tell(self, changes: Changes) -> None:
        assert set(changes.new.tolist()) == self.new
        self.new = set()
        for page, header in zip(changes.pages.tolist(), changes.header_N3.tolist(), strict=True):
            self.headers[page] = tuple(header)
        self.told_hot |= dict(zip(changes.numbers.tolist(), changes.hot_pages.tolist(), strict=True))
        for page in (*self.rows, *self.host):
            wanted = (self.ordinal[page], self.rows.get(page, ABSENT), self.host.get(page, ABSENT))
            assert self.headers[page] == wanted, page
        assert {number: page for number, page in self.told_hot.items() if page != ABSENT} == self.hot

    def check_counts(self, pages: RowPages) -> None:
        """As a look at all pages would find them."""
        use = self.use
        assert pages.num_held() == len(self.hot) + sum(use.get(page, "own") != "tree" for page in self.rows)
        assert pages.idle_backed().tolist() == sorted(page for page in self.host if use.get(page) == "tree")
        asked = [*self.host.values()][::2]
        assert pages.backed_by(ids(ABSENT, *asked)).tolist() == sorted(p for p, host in self.host.items() if host in asked)


def change_use(arena: Arena, page: int, use: str) -> str:
    """A page goes to the tree, or is used again."""
    if use == "own":
        arena.transfer_to_tree(Kind.PREFIX, ids(page))
    elif use == "both":
        arena.release(Kind.PREFIX, ids(page))
    else:
        arena.retain(Kind.PREFIX, ids(page))
    return "both" if use == "tree" else "tree"


def let_go(arena: Arena, page: int, use: str) -> None:
    if use != "own":
        arena.release_for_tree(Kind.PREFIX, ids(page))
    if use != "tree":
        arena.release(Kind.PREFIX, ids(page))


@pytest.mark.parametrize("seed", range(30))
def test_a_random_life_agrees_with_dictionaries(seed: int) -> None:
    rng, shadow = Random(seed), Shadow()
    arena, pages = made()
    hosts = 0  # every reference to a host page has a name of its own
    for _ in range(200):
        live = [*shadow.rows, *shadow.host]
        some = ids(*rng.sample(live, min(len(live), rng.randint(1, 5))))
        verb = rng.choice(("bind", "bind", "back", "shed", "free", "assign_hot", "unassign_hot", "drain", "use", "use"))
        count = rng.randint(1, 4)
        if verb == "bind" and arena.fits({Kind.PREFIX: count, Kind.ROWS: count}):
            first = rng.randrange(50)
            prefix, rows = bound(arena, count, first=first)
            ready(arena, prefix, rows)
            shadow.rows |= dict(zip(prefix.tolist(), rows.tolist(), strict=True))
            shadow.ordinal |= dict(zip(prefix.tolist(), range(first, first + count), strict=True))
            shadow.new |= set(prefix.tolist())
        elif verb == "back" and arena.fits({Kind.PREFIX: count}):
            prefix = arena.alloc({Kind.PREFIX: count})[Kind.PREFIX]
            pages.back(prefix, np.arange(hosts, hosts + count, dtype=np.int32), [3] * count)
            shadow.host |= dict(zip(prefix.tolist(), range(hosts, hosts + count), strict=True))
            shadow.ordinal |= dict.fromkeys(prefix.tolist(), 3)
            shadow.new |= set(prefix.tolist())
            hosts += count
        elif verb == "shed":
            some = ids(*(page for page in some.tolist() if page in shadow.rows))
            pages.shed(some, np.arange(hosts, hosts + len(some), dtype=np.int32))
            for page in some.tolist():
                del shadow.rows[page]
                shadow.host[page] = hosts
                hosts += 1
        elif verb == "use":
            for page in some.tolist():
                shadow.use[page] = change_use(arena, page, shadow.use.get(page, "own"))
        elif verb == "free":
            for page in some.tolist():
                let_go(arena, page, shadow.use.get(page, "own"))
            gone = [host for page in some.tolist() if (host := shadow.free(page)) is not None]
            assert sorted(pages.unreferenced_host_pages().tolist()) == sorted(gone)
        elif verb == "assign_hot" and arena.fits({Kind.ROWS: count}):
            rows = arena.alloc({Kind.ROWS: count})[Kind.ROWS]
            shadow.hot |= dict(zip(pages.assign_hot(rows).tolist(), rows.tolist(), strict=True))
        elif verb == "unassign_hot" and shadow.hot:
            number = rng.choice(list(shadow.hot))
            pages.unassign_hot(ids(number))
            arena.release(Kind.ROWS, ids(shadow.hot.pop(number)))
        elif verb == "drain":
            shadow.tell(pages.drain())
        pages.audit()
        arena.audit()
        assert {page: int(pages.rows[page]) for page in np.flatnonzero(pages.rows != ABSENT).tolist()} == shadow.rows
        assert {page: int(pages.host[page]) for page in np.flatnonzero(pages.host != ABSENT).tolist()} == shadow.host
        shadow.check_counts(pages)
        assert pages.hot == shadow.hot
        assert arena.used_pages(Kind.ROWS) == len(shadow.rows) + len(shadow.hot)
    shadow.tell(pages.drain())
