"""Passes as messages: a part of `messages.py`. Both sides remember the pass before, so that a step tells what is new in it.

    pass before    a    b    c    d         rows of requests, as the worker read them
    kept           0         2    3    -1   by row: the one that it goes on from, a token further and with the same pages, or with
    this pass      a         c    d     e   one more behind them; or none, and it is told whole. Nothing where all go on in order

    numbers        of the pass, and of the one before; how many rows, entries of `kept`, rows that are told, and pages
    ints           kept | which of those that go on got a page | the pages | a token of each that goes on
                   tokens of those that are told | their prefix pages | their window pages
    table          numbers of those that are told, see `_numbers`; nothing where none is

A decode step so tells a token for each request, and a page where one begins: some 200 bytes for 32 requests, however long they
are. The number of the pass before says which is meant: a worker that has read another, or could not read it, finds no rows to go
on from, and refuses. Rows are compared and made by columns, in C: a loop over 32 of them takes longer than sockets do for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import add, is_
from typing import Any, NamedTuple

import numpy as np

from stepwell.base.ids import Kind
from stepwell.base.tasks import PageIds
from stepwell.engine.passes.paging import RequestRows
from stepwell.engine.sampling.choices import Choosing
from stepwell.engine.workers.choosing_arrays import pack_choosing, read_choosing
from stepwell.jobs.channel import Array, Message

RUN = "run"
_COLUMNS = 11  # numbers of one request's part of a pass, see `_numbers`
_NONE = -1  # in arrays
_IN_ORDER: list[int] = []
_NOBODY: list[RequestRows] = []
_made: Callable[[Iterable[Any]], RequestRows] = partial(tuple.__new__, RequestRows)  # of all fields; `_make` counts them

Counts = Mapping[Kind, int]  # pages that a memory has, by kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One pass: every request's part, and how the tokens behind each row of logits are chosen."""

    rows: Sequence[RequestRows]
    choosing: Sequence[Choosing]


# ---- the scheduler's side -------------------------------------------------------------------------


class PassPacker:
    """Passes in the order in which they are sent. All workers read all of them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The next pass is told whole: nobody knows who has read the last one."""
        self._prefix: Sequence[PageIds] = ()  # of the rows before
        self._windows: Sequence[PageIds] = ()  # held, so that nobody else has their ids
        self._next: list[tuple[Any, ...]] = []  # what rows look like that go on from those before, see `_looks`
        self._sent: Sequence[Sequence[Any]] | None = None  # columns of them, until `look_ahead`
        self._number = 0

    def pack(self, given: Pass, number: int) -> Message:
        """`number` is repeated by what comes of it."""
        self.look_ahead()
        rows, after, before = given.rows, self._number, self._prefix
        columns = _columns(rows)
        tokens, prefix = columns[0], columns[2]
        looks = _looks(columns)
        longer = self._longer(prefix) if len(rows) == len(before) and looks == self._next else None
        if longer is not None:  # most steps
            kept, told, going = _IN_ORDER, _NOBODY, prefix
        else:
            kept = self._kept(prefix, looks)
            told = [each for each, at in zip(rows, kept, strict=True) if at == _NONE]
            tokens = [each for each, at in zip(tokens, kept, strict=True) if at != _NONE]
            going = [each for each, at in zip(prefix, kept, strict=True) if at != _NONE]
            were = [before[at] for at in kept if at != _NONE]
            longer = [at for at, (each, was) in enumerate(zip(going, were, strict=True)) if each is not was]
        pages = [int(going[at][-1]) for at in longer]
        for new in chain(*((each.prefix_pages, each.window_pages) for each in told), (going[at] for at in longer)):
            new.setflags(write=False)  # remembered by reference, and so not to be changed
        ints = np.array([*kept, *longer, *pages, *chain.from_iterable(tokens)], np.int32)
        message = Message(
            kind=RUN,
            numbers=(number, after, len(rows), len(kept), len(told), len(longer)),
            arrays=[*(_whole(ints, told) if told else (ints,)), *pack_choosing(given.choosing)],
        )
        self._sent, self._prefix, self._number = columns, prefix, number
        return message

    def _longer(self, prefix: Sequence[PageIds]) -> list[int] | None:
        """Which of those before, all of them in their order, have a page more; None where one has other pages."""
        before = self._prefix
        if all(map(is_, prefix, before)):
            return []
        changed = [at for at, same in enumerate(map(is_, prefix, before)) if not same]
        return changed if all(_one_longer(prefix[at], before[at]) for at in changed) else None

    def _kept(self, prefix: Sequence[PageIds], looks: Sequence[tuple[Any, ...]]) -> list[int]:
        """From their pages we know which they were; a row that has other pages now is looked for behind the one before it."""
        before, expected = self._prefix, self._next
        places = {id(each): at for at, each in enumerate(before)}  # which this holds, so nobody else has their ids
        kept, last = [], -1
        for pages, look in zip(prefix, looks, strict=True):
            behind = last + 1
            at = behind if behind < len(before) and before[behind] is pages else places.get(id(pages), behind)
            goes_on = at < len(before) and look == expected[at] and (before[at] is pages or _one_longer(pages, before[at]))
            kept.append(at if goes_on else _NONE)
            last = at if goes_on else last
        return kept

    def look_ahead(self) -> None:
        """Once a pass is on its way there is time for it: makes what the next one is compared with."""
        if self._sent is not None:
            tokens, positions, _, windows, first_window, point, _, slot, _, _, _, picks = self._sent
            one, none, no, ends = repeat(1), repeat(None), repeat(False), map(add, positions, map(len, tokens))
            self._next = list(zip(ends, one, first_window, point, none, slot, no, one, picks, map(id, windows), strict=False))
            self._windows, self._sent = windows, None


def _columns(rows: Sequence[RequestRows]) -> Sequence[Sequence[Any]]:
    """In the order of the fields of `RequestRows`."""
    return [*zip(*rows, strict=True)] or [()] * len(RequestRows._fields)


def _looks(columns: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """All of each row that says whether it goes on, but for its tokens and prefix pages; window pages by which they are."""
    tokens, positions, _, windows, first_window, point, copy, slot, resumes, num_logits, _, picks = columns
    known = positions, map(len, tokens), first_window, point, copy, slot, resumes, num_logits, picks, map(id, windows)
    return list(zip(*known, strict=True))


def _one_longer(pages: PageIds, before: PageIds) -> bool:
    return len(pages) == len(before) + 1 and bool((pages[:-1] == before).all())


def _whole(ints: PageIds, told: Sequence[RequestRows]) -> tuple[Array, Array]:
    """With all of those that are told: ints and their table."""
    tokens = (np.asarray(each.tokens, np.int32) for each in told)
    pages = chain((each.prefix_pages for each in told), (each.window_pages for each in told))
    return np.concatenate([ints, *tokens, *pages]), np.array([_numbers(each) for each in told], np.int64).reshape(-1)


def _numbers(rows: RequestRows) -> tuple[int, ...]:
    return (
        len(rows.tokens), len(rows.prefix_pages), len(rows.window_pages), rows.position, rows.first_window,
        _NONE if rows.point_page is None else rows.point_page, _NONE if rows.slot is None else rows.slot,
        int(rows.resumes), rows.num_logits, rows.picks_from, _NONE if rows.point_copy is None else rows.point_copy,
    )  # fmt: skip


# ---- a worker's side ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadPass:
    """One pass, as a worker has read it. How tokens are chosen is read by the rank that chooses, once it has to."""

    rows: Sequence[RequestRows]
    num_logits: int
    vocab_size: int
    ways: Sequence[Array]

    def choosing(self) -> list[Choosing]:
        """Raises ValueError for what makes no sense."""
        return read_choosing(self.ways, self.num_logits, vocab_size=self.vocab_size)


class _Ahead(NamedTuple):
    """What rows have that are a token further, but for their tokens: columns in the order of the fields of `RequestRows`."""

    ends: Sequence[int]
    prefix: Sequence[PageIds]
    others: Sequence[Iterable[Any]]

    @classmethod
    def of(cls, rows: Sequence[RequestRows]) -> _Ahead:
        told, positions, prefix, windows, first_window, point, _, slot, _, _, hot, picks = _columns(rows)
        one, none, no = repeat(1), repeat(None), repeat(False)
        others = windows, first_window, point, none, slot, no, one, hot, picks
        return cls([*map(add, positions, map(len, told))], prefix, others)


class PassReader:
    """Passes in the order in which they come."""

    def __init__(self, *, pages: Counts, vocab_size: int, most_slots: int) -> None:
        self._pages = pages
        self._vocab_size = vocab_size
        self._most_slots = most_slots
        self._rows: Sequence[RequestRows] = ()
        self._number = 0
        self._ahead: _Ahead | None = None  # of these rows

    def look_ahead(self) -> None:
        """Once a pass is answered there is time for it: makes of its rows what those of the next are made from."""
        if self._ahead is None and self._rows:
            self._ahead = _Ahead.of(self._rows)

    def read(self, message: Message) -> ReadPass:
        """Raises ValueError for what makes no sense; then nothing can go on from it."""
        number, after, count, num_entries, num_told, num_longer = message.counts(6)
        before, ahead = (self._rows, self._ahead) if after == self._number else ((), None)
        self._rows, self._number, self._ahead = (), 0, None
        first_way = 2 if num_told else 1
        if [each.dtype.str for each in message.arrays[:first_way]] != ["<i4", "<i8"][:first_way]:
            raise ValueError("a pass in numbers of other kinds")
        ints, ways = message.arrays[0], message.arrays[first_way:]
        if num_entries not in (0, count) or num_told > count:
            raise ValueError("a pass with more or fewer requests than it says")
        num_small = num_entries + 2 * num_longer + count - num_told
        if len(ints) < num_small or (len(ints) > num_small and not num_told):
            raise ValueError("a pass with more or fewer tokens or pages than it says")
        small = ints[:num_small].tolist()
        kept = small[:num_entries]
        going = self._going(kept, before, count, num_told)
        rows = self._further(going, small[num_entries:], num_longer, ahead if going is before else None)
        told = self._told(message.arrays[1], num_told, ints[num_small:]) if num_told else _NOBODY
        if told:
            nexts = iter(rows), iter(told)
            rows = [next(nexts[at == _NONE]) for at in kept]
        self._rows, self._number = rows, number
        num_logits = len(going) + sum([each.num_logits for each in told])
        return ReadPass(rows=rows, num_logits=num_logits, vocab_size=self._vocab_size, ways=ways)

    def _going(self, kept: list[int], before: Sequence[RequestRows], count: int, num_told: int) -> Sequence[RequestRows]:
        """The rows of the pass before that this one goes on from."""
        if not kept:
            if count != len(before) or num_told:
                raise ValueError(f"a pass that goes on from rows of which there are {count}, and not {len(before)}")
            return before
        going = [at for at in kept if at != _NONE]
        if len(kept) - len(going) != num_told or (going and not 0 <= min(going) <= max(going) < len(before)):
            raise ValueError(f"a pass that goes on from rows {kept[:8]} of {len(before)}")
        return [before[at] for at in going]

    def _further(
        self, before: Sequence[RequestRows], numbers: list[int], num_longer: int, ahead: _Ahead | None
    ) -> list[RequestRows]:
        """Each a token further. `numbers` are which of them got a page, the pages, and the tokens."""
        if not before:
            return []
        longer, pages, tokens = numbers[:num_longer], numbers[num_longer : 2 * num_longer], numbers[2 * num_longer :]
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(f"tokens that are not there: {tokens[:8]} of {self._vocab_size}")
        ahead = ahead or _Ahead.of(before)
        prefix = self._longer(ahead.prefix, longer, pages) if longer else ahead.prefix
        return [*map(_made, zip(zip(tokens, strict=True), ahead.ends, prefix, *ahead.others, strict=False))]

    def _longer(self, prefix: Sequence[PageIds], longer: Sequence[int], pages: Sequence[int]) -> list[PageIds]:
        """Each of those with a page more."""
        most = self._pages.get(Kind.PREFIX, 0)
        if not (0 <= min(longer) <= max(longer) < len(prefix) and 0 <= min(pages) <= max(pages) < most):
            raise ValueError(f"prefix pages that are not there: {pages[:8]} of {most}, for rows {longer[:8]} of {len(prefix)}")
        made = list(prefix)
        for at, page in zip(longer, pages, strict=True):
            made[at] = np.empty(len(made[at]) + 1, np.int32)
            made[at][:-1], made[at][-1] = prefix[at], page
        return made

    def _told(self, table: Array, count: int, ints: PageIds) -> list[RequestRows]:
        """Those that are told whole."""
        if table.size != count * _COLUMNS:
            raise ValueError("a pass with more or fewer requests than it says")
        told = table.reshape(-1, _COLUMNS).tolist()
        for each in told:
            self._check(each)
        sizes = [sum(each[column] for each in told) for column in range(3)]
        if sum(sizes) != len(ints):
            raise ValueError("a pass with more or fewer tokens or pages than it says")
        parts = ints[: sizes[0]], ints[sizes[0] : sizes[0] + sizes[1]], ints[sizes[0] + sizes[1] :]
        must_be_below(parts[0], self._vocab_size, "tokens")
        must_be_below(parts[1], self._pages.get(Kind.PREFIX, 0), "prefix pages")
        must_be_below(parts[2], self._pages.get(Kind.WINDOW, 0), "window pages")
        return _rows(told, *parts)

    def _check(self, numbers: list[int]) -> None:
        """Of one request that is told."""
        num_tokens, num_prefix, num_windows, position, first_window, point, slot, resumes, num_logits, picks, copy = numbers
        lowest = min(num_tokens - 1, num_prefix, num_windows, position, first_window, num_logits, picks)
        if lowest < 0 or num_logits > num_tokens:
            raise ValueError(f"a pass with a request of {numbers}")
        most_points = self._pages.get(Kind.POINT, 0)
        if not (_NONE <= point < most_points and _NONE <= slot < self._most_slots and 0 <= resumes <= 1):
            raise ValueError(f"a pass with point page {point} of {most_points}, slot {slot} of {self._most_slots}")
        if not _NONE <= copy < most_points or (copy != _NONE and point == _NONE):
            raise ValueError(f"a pass that copies a point to page {copy} of {most_points}, or copies none")


def _rows(told: Sequence[list[int]], tokens: PageIds, prefix: PageIds, windows: PageIds) -> list[RequestRows]:
    rows = []
    first = first_prefix = first_window_page = 0
    for num_tokens, num_prefix, num_windows, position, first_window, point, slot, resumes, num_logits, picks, copy in told:
        stop, stop_prefix, stop_window = first + num_tokens, first_prefix + num_prefix, first_window_page + num_windows
        rows.append(
            RequestRows(
                tokens=tokens[first:stop],
                position=position,
                prefix_pages=prefix[first_prefix:stop_prefix],
                window_pages=windows[first_window_page:stop_window],
                first_window=first_window,
                point_page=None if point == _NONE else point,
                slot=None if slot == _NONE else slot,
                resumes=bool(resumes),
                num_logits=num_logits,
                picks_from=picks,
                point_copy=None if copy == _NONE else copy,
            )
        )
        first, first_prefix, first_window_page = stop, stop_prefix, stop_window
    return rows


def must_be_below(ids: Array, most: int, what: str) -> None:
    """Raises ValueError."""
    if ids.dtype != np.int32 or (ids.size and int(ids.view(np.uint32).max()) >= most):  # where numbers below 0 are large ones
        raise ValueError(f"{what} that are not there: {ids[:8]} of {most}")
