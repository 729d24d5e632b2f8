"""Where the rows of each prefix page on the device are: in a ROWS page beside it, or on the host alone.

    PREFIX page   FREE -> FILLING --bind--> bound: `rows` says which ROWS page        a READY page is one of the two
                             '-----back---> backed: `host` says which host page  <--shed-- bound

A ROWS page is bound to one PREFIX page, or hot: lent to a request for copies of rows it reads often, under a number by which the
tables of hot rows know it. Holds no bytes. What changed since the last pass is handed out once (`drain`), for whoever writes
headers and empties hints. References to host pages that nobody needs any more are collected here and given back by the caller
(`forsaken_host`), never inside `Arena.release`. One thread.
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
    """What the next pass must know. All of it counts together: later changes have replaced earlier ones."""

    new: PageIds  # PREFIX pages whose hints say nothing yet
    pages: PageIds  # PREFIX pages whose header is another one,
    header_N3: npt.NDArray[np.int32]  # and that header: ordinal, ROWS page, host page
    numbers: Numbers  # hot pages that were lent or came back: nothing is in them yet
    hot_pages: PageIds  # the ROWS page of each, ABSENT for those that came back


class RowPages:
    """Of a device arena, by the ids of its PREFIX pages. All arrays are ABSENT where there is nothing."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        arena.page_use = self
        pages = arena.layout.rows(Kind.PREFIX)
        self.rows: PageIds = np.full(pages, ABSENT, np.int32)
        self.host: PageIds = np.full(pages, ABSENT, np.int32)
        self._ordinal = np.full(pages, ABSENT, np.int32)
        self._page_of = np.full(arena.layout.rows(Kind.ROWS), ABSENT, np.int32)  # by ROWS page
        self.hot: dict[int, int] = {}  # ROWS pages that are lent, by number; read it freely
        self._free_numbers: list[int] = []  # heap: the lowest first, so that numbers stay few
        self._new: dict[int, None] = {}
        self._changed: dict[int, None] = {}
        self._renumbered: dict[int, None] = {}
        self._forsaken: list[PageIds] = []
        self._distrusted: set[int] = set()
        # Counted as it changes, so that nobody looks at all pages: `audit` does, and compares.
        self.num_backed = 0
        self._idle_backed: set[int] = set()  # backed pages that nobody beside the tree refers to
        self._backs: dict[int, list[int]] = {}  # by host page: the pages whose rows it alone has

    # ---- questions --------------------------------------------------------------------------------

    def whole(self, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Which of these pages have their rows on the device, to be read."""
        rows = self.rows[ids]
        return np.asarray((rows != ABSENT) & (self._arena.state[Kind.ROWS][rows] == READY))

    def placed(self, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Which of these pages have a place for their rows, here or on the host."""
        return np.asarray((self.rows[ids] != ABSENT) | (self.host[ids] != ABSENT))

    def backed(self, ids: PageIds) -> npt.NDArray[np.bool_]:
        """Which of these pages have their rows on the host alone."""
        return np.asarray(self.host[ids] != ABSENT)

    def backed_by(self, host: PageIds) -> PageIds:
        """The pages whose rows are on these host pages alone."""
        return _ids(page for each in host.tolist() for page in self._backs.get(each, ()))

    def distrust(self, ids: PageIds) -> None:
        """The host pages that hold the rows of these pages are suspect: while these live, nobody else is to have them."""
        self._distrusted.update(ids.tolist())

    def are_trusted(self, ids: PageIds) -> bool:
        return not self._distrusted or self._distrusted.isdisjoint(ids.tolist())

    def num_held(self) -> int:
        """ROWS pages that stay where they are unless somebody's rows spill: of pages that somebody beside the tree refers to, and
        those that are referred to themselves. A page that is loaded right now is both, and counted once. Looks at all of them.
        """
        arena, bound = self._arena, self._page_of != ABSENT
        held = arena.refs[Kind.ROWS] > arena.kept[Kind.ROWS]
        held[bound] |= self._busy(self._page_of[bound])
        return int(np.count_nonzero(held))

    def idle_backed(self) -> PageIds:
        """The pages whose rows are on the host alone and that only the tree refers to."""
        return _ids(self._idle_backed)

    # ---- orders -----------------------------------------------------------------------------------

    def bind(self, ids: PageIds, rows: PageIds, ordinals: npt.ArrayLike) -> None:
        """These pages have rows of their own from now on. Takes over the caller's reference to each ROWS page."""
        self._place(ids, ordinals)
        self.rows[ids] = rows
        self._page_of[rows] = ids
        self._arena.hand_over(Kind.ROWS, rows)

    def back(self, ids: PageIds, host: PageIds, ordinals: npt.ArrayLike) -> None:
        """These pages never had rows here: they are on the host. Takes over one reference to each host page."""
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
        """Gives up the rows of bound pages; takes over one reference to each host page that has them too."""
        rows = self.rows[ids]
        assert (rows != ABSENT).all(), f"pages {ids[rows == ABSENT]} have no rows to give up"
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
        """Which of these pages somebody beside the tree refers to."""
        arena = self._arena
        return np.asarray(arena.refs[Kind.PREFIX][ids] > arena.kept[Kind.PREFIX][ids])

    def lend(self, rows: PageIds) -> Numbers:
        """These ROWS pages, which are nobody's rows and stay referenced by the caller, become hot; returns their numbers."""
        assert (self._page_of[rows] == ABSENT).all(), f"ROWS pages {rows} belong to prefix pages"
        numbers: list[int] = []
        for page in rows.tolist():
            number = heappop(self._free_numbers) if self._free_numbers else len(self.hot)
            self.hot[number] = page
            numbers.append(number)
        self._renumbered |= dict.fromkeys(numbers)
        return np.array(numbers, np.int32)

    def take_back(self, numbers: Numbers) -> None:
        """These hot pages are ordinary again; the caller gives back its references to them."""
        for number in numbers.tolist():
            del self.hot[number]
            heappush(self._free_numbers, number)
        self._renumbered |= dict.fromkeys(numbers.tolist())

    def on_use(self, ids: PageIds, *, begins: bool) -> None:
        """Somebody beside the tree refers to PREFIX pages, and nobody did before; or the other way round. Called by the arena."""
        if self.num_backed:
            backed = ids[self.host[ids] != ABSENT].tolist()
            (self._idle_backed.difference_update if begins else self._idle_backed.update)(backed)

    def on_free(self, ids: PageIds) -> None:
        """PREFIX pages are free: so are their rows. Called by the arena, once nobody uses them."""
        rows, host = self.rows[ids], self.host[ids]
        self.rows[ids] = self.host[ids] = self._ordinal[ids] = ABSENT
        for page in ids.tolist():
            self._new.pop(page, None)
            self._changed.pop(page, None)
        self._distrusted.difference_update(ids.tolist())
        backing = host[host != ABSENT]
        if len(backing):
            self.num_backed -= len(backing)
            self._forsaken.append(backing)
            for page, below in zip(ids[host != ABSENT].tolist(), backing.tolist(), strict=True):
                self._idle_backed.discard(page)
                self._backs[below].remove(page)
                if not self._backs[below]:
                    del self._backs[below]
        self._unbind(rows[rows != ABSENT])

    def forsaken_host(self) -> PageIds:
        """Host pages to which references are left over, one for each time a page is named; the caller gives them back."""
        forsaken, self._forsaken = self._forsaken, []
        return np.concatenate(forsaken) if forsaken else NO_PAGES

    def drain(self, apply: Callable[[Changes], None] = lambda changes: None) -> Changes:
        """What changed since the last call, for the pass that begins now. It is forgotten once `apply` has taken it: if that
        fails, the next call has all of it again.
        """
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
        self._arena.drop(Kind.ROWS, rows)

    # ---- self-check -------------------------------------------------------------------------------

    def holders(self) -> tuple[PageIds, PageIds]:
        """Every reference that is held here: to ROWS pages of this arena, and to host pages."""
        backing = [self.host[self.host != ABSENT], *self._forsaken]
        return self.rows[self.rows != ABSENT], np.concatenate(backing)

    def audit(self) -> None:
        """Asserts that every READY page has its rows in exactly one place, and that no ROWS page is two pages' or hot as well."""
        state, bound, backed = self._arena.state[Kind.PREFIX], self.rows != ABSENT, self.host != ABSENT
        assert not (bound & backed).any(), f"pages {np.flatnonzero(bound & backed)[:8]} are both bound and backed"
        lost = np.flatnonzero((state == READY) & ~bound & ~backed)
        assert not len(lost), f"READY pages {lost[:8]} have their rows nowhere"
        stray = np.flatnonzero((state == FREE) & (bound | backed))
        assert not len(stray), f"free pages {stray[:8]} still have rows"
        assert self.num_backed == np.count_nonzero(backed), f"{self.num_backed=}, but {np.count_nonzero(backed)} are"
        self._audit_counts(backed)
        ids, rows = np.flatnonzero(bound), self.rows[bound]
        assert (self._page_of[rows] == ids).all(), "a ROWS page is bound to two pages"
        assert np.count_nonzero(self._page_of != ABSENT) == len(ids), "a ROWS page is bound to a page that does not know it"
        filled = self._arena.state[Kind.ROWS][rows]
        torn = ids[(state[ids] == READY) & (filled != READY)]
        assert not len(torn), f"pages {torn[:8]} are READY without their rows"
        hot = np.fromiter(self.hot.values(), np.int32, len(self.hot))
        assert len(np.unique(hot)) == len(hot) and (self._page_of[hot] == ABSENT).all(), "a hot page is hot twice, or bound"
        numbers = sorted([*self.hot, *self._free_numbers])
        assert numbers == list(range(len(numbers))), f"numbers of hot pages do not add up: {numbers[:16]}"

    def _audit_counts(self, backed: npt.NDArray[np.bool_]) -> None:
        busy = self._busy(np.arange(len(self.rows), dtype=np.int32))
        idle = np.flatnonzero(backed & ~busy).tolist()
        assert sorted(self._idle_backed) == idle, f"idle pages on the host: {sorted(self._idle_backed)[:8]}, but {idle[:8]} are"
        pairs = sorted((page, below) for below, pages in self._backs.items() for page in pages)
        known = [(page, int(self.host[page])) for page in np.flatnonzero(backed).tolist()]
        assert pairs == known, f"host pages back {pairs[:8]}, but {known[:8]} are backed"


def _ids(pages: Iterable[int]) -> PageIds:
    return np.array(sorted(pages), np.int32)
