"""Where the rows of each prefix page on the device are: in a ROWS page on the device, or only on the host.

    PREFIX page   FREE -> FILLING --bind--> bound: `rows` says which ROWS page        a READY page is one of the two
                             '-----back---> backed: `host` says which host page  <--shed-- bound

A ROWS page is either bound to one PREFIX page, or hot: assigned to a request for copies of rows that it reads often, under a
number that the tables of hot rows use. Holds no bytes. `drain` returns once what changed since the last pass, so that headers are
written and hints emptied. References to host pages that are no longer needed are collected here and released by the caller
(`unreferenced_host_pages`), never inside `Arena.release`. For one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Kind
from stepwell.base.tasks import NO_PAGES, PageIds
from stepwell.memory.arena import FREE, READY, Arena

ABSENT = -1  # in arrays of page ids
Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """What the next pass must apply. Later changes have replaced earlier ones."""

    new: PageIds  # PREFIX pages whose hints are still empty
    pages: PageIds  # PREFIX pages whose header changed,
    header_N3: npt.NDArray[np.int32]  # and the new header: ordinal, ROWS page, host page
    numbers: Numbers  # hot pages that were assigned or unassigned: they are empty
    hot_pages: PageIds  # the ROWS page of each, ABSENT if it was unassigned


class RowPages:
    """The rows of a device arena, by the ids of its PREFIX pages. ABSENT marks empty entries of all arrays."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        arena.page_use = self
        pages = arena.layout.rows(Kind.PREFIX)
        self.rows: PageIds = np.full(pages, ABSENT, np.int32)
        self.host: PageIds = np.full(pages, ABSENT, np.int32)
        self._ordinal = np.full(pages, ABSENT, np.int32)
        self._page_of = np.full(arena.layout.rows(Kind.ROWS), ABSENT, np.int32)  # by ROWS page
        self.hot: dict[int, int] = {}  # assigned ROWS pages by number; callers may read it
        self._free_numbers: list[int] = []  # heap: the lowest is used first, so that numbers stay small
        self._new: dict[int, None] = {}
        self._changed: dict[int, None] = {}
        self._renumbered: dict[int, None] = {}
        self._unreferenced_host: list[PageIds] = []
        self._quarantined: set[int] = set()
        # Updated with every change, so that only `audit` has to scan all pages, and compares.
        self.num_backed = 0
        self._idle_backed: set[int] = set()  # backed pages that only the tree refers to
        self._backs: dict[int, list[int]] = {}  # by host page: the pages whose rows are only there

    # ---- questions --------------------------------------------------------------------------------

    def whole(self, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Which of these pages have readable rows on the device."""
        rows = self.rows[ids]
        return np.asarray((rows != ABSENT) & (self._arena.state[Kind.ROWS][rows] == READY))

    def placed(self, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Which of these pages have rows, here or on the host."""
        return np.asarray((self.rows[ids] != ABSENT) | (self.host[ids] != ABSENT))

    def backed(self, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Which of these pages have their rows only on the host."""
        return np.asarray(self.host[ids] != ABSENT)

    def backed_by(self, host: PageIds) -> PageIds:
        """The pages whose rows are only on these host pages."""
        return _ids(page for each in host.tolist() for page in self._backs.get(each, ()))

    def quarantine(self, ids: PageIds) -> None:
        """The host pages with the rows of these pages are suspect: until these pages are freed, they must not be shared."""
        self._quarantined.update(ids.tolist())

    def has_quarantined(self, ids: PageIds) -> bool:
        """Whether any of these pages is quarantined."""
        return bool(self._quarantined) and not self._quarantined.isdisjoint(ids.tolist())

    def num_held(self) -> int:
        """The number of ROWS pages that only spilling could free: those bound to pages in use, and those in use themselves.

        A page that is being loaded is both, and counts once. Scans all pages.
        """
        arena, bound = self._arena, self._page_of != ABSENT
        held = arena.refs[Kind.ROWS] > arena.tree_refs[Kind.ROWS]
        held[bound] |= self._busy(self._page_of[bound])
        return int(np.count_nonzero(held))

    def idle_backed(self) -> PageIds:
        """The pages whose rows are only on the host and that only the tree refers to."""
        return _ids(self._idle_backed)

    # ---- orders -----------------------------------------------------------------------------------

    def bind(self, ids: PageIds, rows: PageIds, ordinals: npt.ArrayLike) -> None:
        """Binds `rows` to these pages. Takes over the caller's reference to each ROWS page."""
        self._place(ids, ordinals)
        self.rows[ids] = rows
        self._page_of[rows] = ids
        self._arena.transfer_to_tree(Kind.ROWS, rows)

    def back(self, ids: PageIds, host: PageIds, ordinals: npt.ArrayLike) -> None:
        """Notes that the rows of these new pages are only on the host. Takes over one reference to each host page."""
        self._place(ids, ordinals)
        self._note_backed(ids, host)

    def _place(self, ids: PageIds, ordinals: npt.ArrayLike) -> None:
        taken = self.placed(ids)
        assert not taken.any(), f"pages {ids[taken]} have rows already"
        self._ordinal[ids] = ordinals
        changed = dict.fromkeys(ids.tolist())
        self._new |= changed
        self._changed |= changed

    def shed(self, ids: PageIds, host: PageIds) -> None:
        """Frees the rows of bound pages; takes over one reference to each host page that has them too."""
        rows = self.rows[ids]
        assert (rows != ABSENT).all(), f"pages {ids[rows == ABSENT]} have no rows to free"
        self.rows[ids] = ABSENT
        self._note_backed(ids, host)
        self._changed |= dict.fromkeys(ids.tolist())
        self._unbind(rows)

    def _note_backed(self, ids: PageIds, host: PageIds) -> None:
        self.host[ids] = host
        self.num_backed += len(ids)
        self._idle_backed.update(ids[~self._busy(ids)].tolist())
        for page, below in zip(ids.tolist(), host.tolist(), strict=True):
            self._backs.setdefault(below, []).append(page)

    def _busy(self, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Which of these pages have references besides the tree's."""
        arena = self._arena
        return np.asarray(arena.refs[Kind.PREFIX][ids] > arena.tree_refs[Kind.PREFIX][ids])

    def assign_hot(self, rows: PageIds) -> Numbers:
        """Makes unbound ROWS pages, which the caller keeps referenced, hot; returns their numbers."""
        assert (self._page_of[rows] == ABSENT).all(), f"ROWS pages {rows} belong to prefix pages"
        numbers: list[int] = []
        for page in rows.tolist():
            number = heappop(self._free_numbers) if self._free_numbers else len(self.hot)
            self.hot[number] = page
            numbers.append(number)
        self._renumbered |= dict.fromkeys(numbers)
        return np.array(numbers, np.int32)

    def unassign_hot(self, numbers: Numbers) -> None:
        """Makes hot pages ordinary again; the caller releases its references to them."""
        for number in numbers.tolist():
            del self.hot[number]
            heappush(self._free_numbers, number)
        self._renumbered |= dict.fromkeys(numbers.tolist())

    def on_use(self, ids: PageIds, *, begins: bool) -> None:
        """PREFIX pages that only the tree referred to are in use now, or the reverse. Called by the arena."""
        if self.num_backed:
            backed = ids[self.host[ids] != ABSENT].tolist()
            (self._idle_backed.difference_update if begins else self._idle_backed.update)(backed)

    def on_free(self, ids: PageIds) -> None:
        """PREFIX pages were freed: frees their rows. Called by the arena."""
        rows, host = self.rows[ids], self.host[ids]
        self.rows[ids] = self.host[ids] = self._ordinal[ids] = ABSENT
        for page in ids.tolist():
            self._new.pop(page, None)
            self._changed.pop(page, None)
        self._quarantined.difference_update(ids.tolist())
        backing = host[host != ABSENT]
        if len(backing):
            self.num_backed -= len(backing)
            self._unreferenced_host.append(backing)
            for page, below in zip(ids[host != ABSENT].tolist(), backing.tolist(), strict=True):
                self._idle_backed.discard(page)
                self._backs[below].remove(page)
                if not self._backs[below]:
                    del self._backs[below]
        self._unbind(rows[rows != ABSENT])

    def unreferenced_host_pages(self) -> PageIds:
        """Host pages whose references are no longer needed, each as often as it has such references; the caller releases them."""
        unreferenced, self._unreferenced_host = self._unreferenced_host, []
        return np.concatenate(unreferenced) if unreferenced else NO_PAGES

    def drain(self, apply: Callable[[Changes], None] = lambda changes: None) -> Changes:
        """What changed since the last call, for the pass that begins now. If `apply` fails, the next call returns it again."""
        pages = _ids(self._changed)
        numbers = np.array(sorted(self._renumbered), np.int32)
        changes = Changes(
            new=_ids(self._new),
            pages=pages,
            header_N3=np.stack([self._ordinal[pages], self.rows[pages], self.host[pages]], axis=1),
            numbers=numbers,
            hot_pages=np.array([self.hot.get(number, ABSENT) for number in numbers.tolist()], np.int32),
        )
        apply(changes)
        self._new, self._changed, self._renumbered = {}, {}, {}
        return changes

    def _unbind(self, rows: PageIds) -> None:
        self._page_of[rows] = ABSENT
        self._arena.release_for_tree(Kind.ROWS, rows)

    # ---- self-check -------------------------------------------------------------------------------

    def holders(self) -> tuple[PageIds, PageIds]:
        """Every reference held here: to ROWS pages of this arena, and to host pages."""
        backing = [self.host[self.host != ABSENT], *self._unreferenced_host]
        return self.rows[self.rows != ABSENT], np.concatenate(backing)

    def audit(self) -> None:
        """Asserts that every READY page has its rows in exactly one place, and that each ROWS page has at most one use."""
        state, bound, backed = self._arena.state[Kind.PREFIX], self.rows != ABSENT, self.host != ABSENT
        assert not (bound & backed).any(), f"pages {np.flatnonzero(bound & backed)[:8]} are both bound and backed"
        lost = np.flatnonzero((state == READY) & ~bound & ~backed)
        assert not len(lost), f"READY pages {lost[:8]} have no rows anywhere"
        stray = np.flatnonzero((state == FREE) & (bound | backed))
        assert not len(stray), f"free pages {stray[:8]} still have rows"
        assert self.num_backed == np.count_nonzero(backed), f"{self.num_backed=}, but {np.count_nonzero(backed)} are backed"
        self._audit_counts(backed)
        ids, rows = np.flatnonzero(bound), self.rows[bound]
        assert (self._page_of[rows] == ids).all(), "a ROWS page is bound to two pages"
        assert np.count_nonzero(self._page_of != ABSENT) == len(ids), "a ROWS page is bound to a page that does not know it"
        filled = self._arena.state[Kind.ROWS][rows]
        torn = ids[(state[ids] == READY) & (filled != READY)]
        assert not len(torn), f"pages {torn[:8]} are READY without their rows"
        hot = np.fromiter(self.hot.values(), np.int32, len(self.hot))
        assert len(np.unique(hot)) == len(hot) and (self._page_of[hot] == ABSENT).all(), "a hot page has two numbers, or is bound"
        numbers = sorted([*self.hot, *self._free_numbers])
        assert numbers == list(range(len(numbers))), f"numbers of hot pages do not add up: {numbers[:16]}"

    def _audit_counts(self, backed: npt.NDArray[np.bool_]) -> None:
        busy = self._busy(np.arange(len(self.rows), dtype=np.int32))
        idle = np.flatnonzero(backed & ~busy).tolist()
        assert sorted(self._idle_backed) == idle, f"idle backed pages: counted {sorted(self._idle_backed)[:8]}, found {idle[:8]}"
        pairs = sorted((page, below) for below, pages in self._backs.items() for page in pages)
        known = [(page, int(self.host[page])) for page in np.flatnonzero(backed).tolist()]
        assert pairs == known, f"host pages back {pairs[:8]}, but {known[:8]} are backed"


def _ids(pages: Iterable[int]) -> PageIds:
    return np.array(sorted(pages), np.int32)
