"""Passes as messages: a part of `messages.py`. Both sides keep the previous pass, so that a message holds only what changed.

    previous pass  a    b    c    d         rows of requests, as the worker read them
    kept           0         2    3    -1   by row: the previous row it continues, one token later, with the same pages or one
    this pass      a         c    d     e   more; -1 for a row sent in full. Empty if all rows continue in order

    numbers        number of this and of the previous pass; counts of rows, entries of `kept`, rows sent in full, and pages
    ints           kept | which continued rows got a page | those pages | one token for each continued row
                   tokens of rows sent in full | their prefix pages | their window pages
    table          the other numbers of rows sent in full, see `_numbers`; absent if there are none

A decode step thus sends one token per request, and a page id where a new page begins: about 200 bytes for 32 requests of any
length. A worker refuses a message that names another previous pass than the one it read. Rows are compared and built by
columns, in C: a Python loop over 32 rows takes longer than the sockets.
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
_COLUMNS = 11  # numbers of one row, see `_numbers`
_NONE = -1  # in arrays
_IN_ORDER: list[int] = []
_NO_ROWS: list[RequestRows] = []
_made: Callable[[Iterable[Any]], RequestRows] = partial(
    tuple.__new__, RequestRows
)  # of all fields; faster than `_make`, which counts them

Counts = Mapping[Kind, int]  # pages that a memory has, by kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One pass: the rows of every request, and how the token of each row of logits is chosen."""

    rows: Sequence[RequestRows]
    choosing: Sequence[Choosing]


# ---- the scheduler's side -------------------------------------------------------------------------


class PassPacker:
    """Packs passes in the order in which they are sent. Every worker reads all of them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sends the next pass in full: some ranks may have missed the last message."""
        self._prefix: Sequence[PageIds] = ()  # of the previous rows
        self._windows: Sequence[PageIds] = ()  # held, so that their `id`s are not reused
        self._next: list[tuple[Any, ...]] = []  # what rows that continue the previous ones look like, see `_looks`
        self._sent: Sequence[Sequence[Any]] | None = None  # columns of them, until `look_ahead`
        self._number = 0

    def pack(self, given: Pass, number: int) -> Message:
        """Answers repeat `number`."""
        self.look_ahead()
        rows, after, before = given.rows, self._number, self._prefix
        columns = _columns(rows)
        tokens, prefix = columns[0], columns[2]
        looks = _looks(columns)
        longer = self._longer(prefix) if len(rows) == len(before) and looks == self._next else None
        if longer is not None:  # true for most steps
            kept, whole, going = _IN_ORDER, _NO_ROWS, prefix
        else:
            kept = self._kept(prefix, looks)
            whole = [each for each, at in zip(rows, kept, strict=True) if at == _NONE]
            tokens = [each for each, at in zip(tokens, kept, strict=True) if at != _NONE]
            going = [each for each, at in zip(prefix, kept, strict=True) if at != _NONE]
            were = [before[at] for at in kept if at != _NONE]
            longer = [at for at, (each, was) in enumerate(zip(going, were, strict=True)) if each is not was]
        pages = [int(going[at][-1]) for at in longer]
        for new in chain(*((each.prefix_pages, each.window_pages) for each in whole), (going[at] for at in longer)):
            new.setflags(write=False)  # kept by reference, so it must not change
        ints = np.array([*kept, *longer, *pages, *chain.from_iterable(tokens)], np.int32)
        message = Message(
            kind=RUN,
            numbers=(number, after, len(rows), len(kept), len(whole), len(longer)),
            arrays=[*(_whole(ints, whole) if whole else (ints,)), *pack_choosing(given.choosing)],
        )
        self._sent, self._prefix, self._number = columns, prefix, number
        return message

    def _longer(self, prefix: Sequence[PageIds]) -> list[int] | None:
        """Which of the previous rows got another page, if all continue in order; None if any row has other pages."""
        before = self._prefix
        if all(map(is_, prefix, before)):
            return []
        changed = [at for at, same in enumerate(map(is_, prefix, before)) if not same]
        return changed if all(_one_longer(prefix[at], before[at]) for at in changed) else None

    def _kept(self, prefix: Sequence[PageIds], looks: Sequence[tuple[Any, ...]]) -> list[int]:
        """Rows are identified by their page lists; a row whose list changed is looked for after the row before it."""
        before, expected = self._prefix, self._next
        places = {id(each): at for at, each in enumerate(before)}  # unique, for this object holds them
        kept, last = [], -1
        for pages, look in zip(prefix, looks, strict=True):
            behind = last + 1
            at = behind if behind < len(before) and before[behind] is pages else places.get(id(pages), behind)
            goes_on = at < len(before) and look == expected[at] and (before[at] is pages or _one_longer(pages, before[at]))
            kept.append(at if goes_on else _NONE)
            last = at if goes_on else last
        return kept

    def look_ahead(self) -> None:
        """Prepares what the next pass is compared with, while this one runs."""
        if self._sent is not None:
            tokens, positions, _, windows, first_window, point, _, slot, _, _, _, picks = self._sent
            one, none, no, ends = repeat(1), repeat(None), repeat(False), map(add, positions, map(len, tokens))
            self._next = list(zip(ends, one, first_window, point, none, slot, no, one, picks, map(id, windows), strict=False))
            self._windows, self._sent = windows, None


def _columns(rows: Sequence[RequestRows]) -> Sequence[Sequence[Any]]:
    """In the order of the fields of `RequestRows`."""
    return [*zip(*rows, strict=True)] or [()] * len(RequestRows._fields)


def _looks(columns: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """All fields that decide whether a row continues, without tokens and prefix pages; window pages by identity."""
    tokens, positions, _, windows, first_window, point, copy, slot, resumes, num_logits, _, picks = columns
    known = positions, map(len, tokens), first_window, point, copy, slot, resumes, num_logits, picks, map(id, windows)
    return list(zip(*known, strict=True))


def _one_longer(pages: PageIds, before: PageIds) -> bool:
    return len(pages) == len(before) + 1 and bool((pages[:-1] == before).all())


def _whole(ints: PageIds, whole: Sequence[RequestRows]) -> tuple[Array, Array]:
    """The ints and the table of rows sent in full."""
    tokens = (np.asarray(each.tokens, np.int32) for each in whole)
    pages = chain((each.prefix_pages for each in whole), (each.window_pages for each in whole))
    return np.concatenate([ints, *tokens, *pages]), np.array([_numbers(each) for each in whole], np.int64).reshape(-1)


def _numbers(rows: RequestRows) -> tuple[int, ...]:
    return (
        len(rows.tokens), len(rows.prefix_pages), len(rows.window_pages), rows.position, rows.first_window,
        _NONE if rows.point_page is None else rows.point_page, _NONE if rows.slot is None else rows.slot,
        int(rows.resumes), rows.num_logits, rows.picks_from, _NONE if rows.point_copy is None else rows.point_copy,
    )  # fmt: skip


# ---- a worker's side ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadPass:
    """One pass, as a worker has read it. Only the rank that chooses tokens reads how, when it does."""

    rows: Sequence[RequestRows]
    num_logits: int
    vocab_size: int
    ways: Sequence[Array]

    def choosing(self) -> list[Choosing]:
        """Raises ValueError if the arrays are inconsistent."""
        return read_choosing(self.ways, self.num_logits, vocab_size=self.vocab_size)


class _Ahead(NamedTuple):
    """The rows one token later, without their tokens: columns in the order of the fields of `RequestRows`."""

    ends: Sequence[int]
    prefix: Sequence[PageIds]
    others: Sequence[Iterable[Any]]

    @classmethod
    def of(cls, rows: Sequence[RequestRows]) -> _Ahead:
        tokens, positions, prefix, windows, first_window, point, _, slot, _, _, hot, picks = _columns(rows)
        one, none, no = repeat(1), repeat(None), repeat(False)
        others = windows, first_window, point, none, slot, no, one, hot, picks
        return cls([*map(add, positions, map(len, tokens))], prefix, others)


class PassReader:
    """Reads passes in the order in which they arrive."""

    def __init__(self, *, pages: Counts, vocab_size: int, most_slots: int) -> None:
        self._pages = pages
        self._vocab_size = vocab_size
        self._most_slots = most_slots
        self._rows: Sequence[RequestRows] = ()
        self._number = 0
        self._ahead: _Ahead | None = None  # of these rows

    def look_ahead(self) -> None:
        """Prepares the rows of the next pass, once this one is answered."""
        if self._ahead is None and self._rows:
            self._ahead = _Ahead.of(self._rows)

    def read(self, message: Message) -> ReadPass:
        """Raises ValueError for an inconsistent message; then no later pass can continue it."""
        number, after, count, num_entries, num_whole, num_longer = message.counts(6)
        before, ahead = (self._rows, self._ahead) if after == self._number else ((), None)
        self._rows, self._number, self._ahead = (), 0, None
        first_way = 2 if num_whole else 1
        if [each.dtype.str for each in message.arrays[:first_way]] != ["<i4", "<i8"][:first_way]:
            raise ValueError("a pass with arrays of unexpected dtypes")
        ints, ways = message.arrays[0], message.arrays[first_way:]
        if num_entries not in (0, count) or num_whole > count:
            raise ValueError("a pass whose number of requests differs from its counts")
        num_small = num_entries + 2 * num_longer + count - num_whole
        if len(ints) < num_small or (len(ints) > num_small and not num_whole):
            raise ValueError("a pass whose number of tokens or pages differs from its counts")
        small = ints[:num_small].tolist()
        kept = small[:num_entries]
        going = self._going(kept, before, count, num_whole)
        rows = self._further(going, small[num_entries:], num_longer, ahead if going is before else None)
        whole = self._read_whole(message.arrays[1], num_whole, ints[num_small:]) if num_whole else _NO_ROWS
        if whole:
            nexts = iter(rows), iter(whole)
            rows = [next(nexts[at == _NONE]) for at in kept]
        self._rows, self._number = rows, number
        num_logits = len(going) + sum([each.num_logits for each in whole])
        return ReadPass(rows=rows, num_logits=num_logits, vocab_size=self._vocab_size, ways=ways)

    def _going(self, kept: list[int], before: Sequence[RequestRows], count: int, num_whole: int) -> Sequence[RequestRows]:
        """The rows of the previous pass that this one continues."""
        if not kept:
            if count != len(before) or num_whole:
                raise ValueError(f"a pass that continues rows of another pass: {count} rows, and not {len(before)}")
            return before
        going = [at for at in kept if at != _NONE]
        if len(kept) - len(going) != num_whole or (going and not 0 <= min(going) <= max(going) < len(before)):
            raise ValueError(f"a pass that continues rows {kept[:8]} of {len(before)}")
        return [before[at] for at in going]

    def _further(
        self, before: Sequence[RequestRows], numbers: list[int], num_longer: int, ahead: _Ahead | None
    ) -> list[RequestRows]:
        """Each one token later. `numbers`: which of them got a page, the pages, and the tokens."""
        if not before:
            return []
        longer, pages, tokens = numbers[:num_longer], numbers[num_longer : 2 * num_longer], numbers[2 * num_longer :]
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(f"tokens outside the vocabulary of {self._vocab_size}: {tokens[:8]}")
        ahead = ahead or _Ahead.of(before)
        prefix = self._longer(ahead.prefix, longer, pages) if longer else ahead.prefix
        return [*map(_made, zip(zip(tokens, strict=True), ahead.ends, prefix, *ahead.others, strict=False))]

    def _longer(self, prefix: Sequence[PageIds], longer: Sequence[int], pages: Sequence[int]) -> list[PageIds]:
        """The page lists, with one page more for each row of `longer`."""
        most = self._pages.get(Kind.PREFIX, 0)
        if not (0 <= min(longer) <= max(longer) < len(prefix) and 0 <= min(pages) <= max(pages) < most):
            raise ValueError(f"prefix pages {pages[:8]} out of range, of {most}, for rows {longer[:8]} of {len(prefix)}")
        made = list(prefix)
        for at, page in zip(longer, pages, strict=True):
            made[at] = np.empty(len(made[at]) + 1, np.int32)
            made[at][:-1], made[at][-1] = prefix[at], page
        return made

    def _read_whole(self, table: Array, count: int, ints: PageIds) -> list[RequestRows]:
        """The rows that are sent in full."""
        if table.size != count * _COLUMNS:
            raise ValueError("a pass whose number of requests differs from its counts")
        whole = table.reshape(-1, _COLUMNS).tolist()
        for each in whole:
            self._check(each)
        sizes = [sum(each[column] for each in whole) for column in range(3)]
        if sum(sizes) != len(ints):
            raise ValueError("a pass whose number of tokens or pages differs from its counts")
        parts = ints[: sizes[0]], ints[sizes[0] : sizes[0] + sizes[1]], ints[sizes[0] + sizes[1] :]
        must_be_below(parts[0], self._vocab_size, "tokens")
        must_be_below(parts[1], self._pages.get(Kind.PREFIX, 0), "prefix pages")
        must_be_below(parts[2], self._pages.get(Kind.WINDOW, 0), "window pages")
        return _rows(whole, *parts)

    def _check(self, numbers: list[int]) -> None:
        """The numbers of one row that is sent in full."""
        num_tokens, num_prefix, num_windows, position, first_window, point, slot, resumes, num_logits, picks, copy = numbers
        lowest = min(num_tokens - 1, num_prefix, num_windows, position, first_window, num_logits, picks)
        if lowest < 0 or num_logits > num_tokens:
            raise ValueError(f"a pass with a request of {numbers}")
        most_points = self._pages.get(Kind.POINT, 0)
        if not (_NONE <= point < most_points and _NONE <= slot < self._most_slots and 0 <= resumes <= 1):
            raise ValueError(f"a pass with point page {point} of {most_points}, slot {slot} of {self._most_slots}")
        if not _NONE <= copy < most_points or (copy != _NONE and point == _NONE):
            raise ValueError(f"a pass that copies a point to page {copy} of {most_points}, or copies none")


def _rows(whole: Sequence[list[int]], tokens: PageIds, prefix: PageIds, windows: PageIds) -> list[RequestRows]:
    rows = []
    first = first_prefix = first_window_page = 0
    for num_tokens, num_prefix, num_windows, position, first_window, point, slot, resumes, num_logits, picks, copy in whole:
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
    if ids.dtype != np.int32 or (ids.size and int(ids.view(np.uint32).max()) >= most):  # as uint32, negative numbers are large
        raise ValueError(f"{what} out of range, of {most}: {ids[:8]}")
