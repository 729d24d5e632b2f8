"""Passes as messages: a part of `messages.py`. Both sides remember the pass before, so that a step tells what is new in it.

    pass before    a    b    c    d         rows of requests, as the worker read them
    kept           0         2    3    -1   by row: the one that it goes on from, a token further and with the same pages;
    this pass      a         c    d     e   or none, and it is told whole

    ints           kept | tokens of all rows | prefix pages, then window pages, of those that are told
    table          numbers of those that are told, see `_numbers`

A decode step so tells a token for each request, and page tables of those alone that got a page since. `after` says which pass is
meant by the one before: a worker that has read another, or could not read it, finds no rows to go on from, and refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import Kind
from stepwell.base.tasks import PageIds
from stepwell.engine.passes.batch import RequestRows
from stepwell.engine.sampling import Choosing
from stepwell.engine.workers.choosing_arrays import pack_choosing, read_choosing
from stepwell.jobs.channel import Array, Message

RUN = "run"
_COLUMNS = 11  # numbers of one request's part of a pass, see `_numbers`
_NONE = -1  # in arrays

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
        self._rows: Sequence[RequestRows] = ()
        self._number = 0

    def forget(self) -> None:
        """The next pass is told whole: nobody knows who has read the last one."""
        self._rows, self._number = (), 0

    def pack(self, given: Pass, number: int) -> Message:
        """`number` is repeated by what comes of it."""
        rows = given.rows
        kept = self._kept(rows)
        told = [each for each, at in zip(rows, kept, strict=True) if at == _NONE]
        for each in told:  # remembered by reference, and so not to be changed
            each.prefix_pages.setflags(write=False)
            each.window_pages.setflags(write=False)
        pages = [*(each.prefix_pages for each in told), *(each.window_pages for each in told)]
        message = Message(
            kind=RUN,
            fields={"pass": number, "after": self._number, "rows": len(rows)},
            arrays=[
                np.concatenate([_joined(kept, [each.tokens for each in rows]), *pages]),
                np.array([_numbers(each) for each in told], np.int64).reshape(-1),
                *pack_choosing(given.choosing),
            ],
        )
        self._rows, self._number = rows, number
        return message

    def _kept(self, rows: Sequence[RequestRows]) -> list[int]:
        before = self._rows
        places = {id(each.prefix_pages): at for at, each in enumerate(before)}  # which this holds, so nobody else has their ids
        found = [places.get(id(each.prefix_pages), _NONE) for each in rows]
        return [at if at != _NONE and _goes_on(each, before[at]) else _NONE for each, at in zip(rows, found, strict=True)]


def _goes_on(rows: RequestRows, before: RequestRows) -> bool:
    """Whether they are what `_one_further` makes of those before."""
    return (
        rows.position == before.position + len(before.tokens)
        and len(rows.tokens) == rows.num_logits == 1
        and rows.prefix_pages is before.prefix_pages
        and rows.window_pages is before.window_pages
        and rows.first_window == before.first_window
        and rows.point_page == before.point_page
        and rows.slot == before.slot
        and rows.picks_from == before.picks_from
        and rows.point_copy is None
        and not rows.resumes
    )


def _numbers(rows: RequestRows) -> tuple[int, ...]:
    return (
        len(rows.tokens), len(rows.prefix_pages), len(rows.window_pages), rows.position, rows.first_window,
        _NONE if rows.point_page is None else rows.point_page, _NONE if rows.slot is None else rows.slot,
        int(rows.resumes), rows.num_logits, rows.picks_from, _NONE if rows.point_copy is None else rows.point_copy,
    )  # fmt: skip


def _joined(first: list[int], parts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> PageIds:
    if any(isinstance(each, np.ndarray) for each in parts):
        return np.concatenate([np.array(first, np.int32), *(np.asarray(each, np.int32) for each in parts)])
    return np.array([*first, *(number for each in parts for number in each)], np.int32)  # a token each, mostly


# ---- a worker's side ------------------------------------------------------------------------------


class PassReader:
    """Passes in the order in which they come."""

    def __init__(self, *, pages: Counts, vocab_size: int, most_slots: int) -> None:
        self._pages = pages
        self._vocab_size = vocab_size
        self._most_slots = most_slots
        self._rows: Sequence[RequestRows] = ()
        self._number = 0

    def read(self, message: Message) -> Pass:
        """Raises ValueError for what makes no sense; then nothing can go on from it."""
        number, after, count = message.number("pass"), message.number("after"), message.number("rows")
        before = self._rows if after == self._number else ()
        self._rows, self._number = (), 0
        if len(message.arrays) < 2 or [each.dtype.str for each in message.arrays[:2]] != ["<i4", "<i8"]:
            raise ValueError("a pass in numbers of other kinds")
        ints, numbers, *more = message.arrays
        kept = ints[:count].tolist()
        num_kept = count - kept.count(_NONE)
        if len(kept) < count or numbers.size != (count - num_kept) * _COLUMNS:
            raise ValueError("a pass with more or fewer requests than it says")
        if kept and not _NONE <= min(kept) <= max(kept) < len(before):
            raise ValueError(f"a pass that goes on from rows {kept[:8]} of {len(before)}")
        told = numbers.reshape(-1, _COLUMNS).tolist()
        for each in told:
            self._check(each)
        parts = self._parts(ints[count:], num_kept, told)
        num_logits = num_kept + sum(each[8] for each in told)
        choosing = read_choosing(more, num_logits, vocab_size=self._vocab_size)
        rows = _rows(kept, before, told, *parts) if told else _going_on(kept, before, parts[0])
        self._rows, self._number = rows, number
        return Pass(rows=rows, choosing=choosing)

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

    def _parts(self, ints: PageIds, num_kept: int, told: Sequence[list[int]]) -> tuple[PageIds, PageIds, PageIds]:
        """Tokens, prefix pages and window pages."""
        num_tokens, num_prefix, num_windows = num_kept, 0, 0
        for each in told:
            num_tokens, num_prefix, num_windows = num_tokens + each[0], num_prefix + each[1], num_windows + each[2]
        if num_tokens + num_prefix + num_windows != len(ints):
            raise ValueError("a pass with more or fewer tokens or pages than it says")
        tokens, prefix, windows = (
            ints[:num_tokens], ints[num_tokens : num_tokens + num_prefix], ints[num_tokens + num_prefix :]
        )  # fmt: skip
        must_be_below(tokens, self._vocab_size, "tokens")
        must_be_below(prefix, self._pages.get(Kind.PREFIX, 0), "prefix pages")
        must_be_below(windows, self._pages.get(Kind.WINDOW, 0), "window pages")
        return tokens, prefix, windows


def _going_on(kept: list[int], before: Sequence[RequestRows], tokens: PageIds) -> list[RequestRows]:
    """Most steps: every request goes on."""
    return [_one_further(before[at], token) for at, token in zip(kept, tokens.tolist(), strict=True)]


def _one_further(rows: RequestRows, token: int) -> RequestRows:
    return RequestRows(
        tokens=(token,), position=rows.end, prefix_pages=rows.prefix_pages, window_pages=rows.window_pages,
        first_window=rows.first_window, point_page=rows.point_page, slot=rows.slot, picks_from=rows.picks_from,
    )  # fmt: skip


def _rows(
    kept: list[int], before: Sequence[RequestRows], told: Sequence[list[int]], tokens: PageIds, prefix: PageIds, windows: PageIds
) -> list[RequestRows]:
    rows, numbers = [], iter(told)
    first = first_prefix = first_window_page = 0
    for at in kept:
        if at != _NONE:
            rows.append(_one_further(before[at], int(tokens[first])))
            first += 1
            continue
        num_tokens, num_prefix, num_windows, position, first_window, point, slot, resumes, num_logits, picks, copy = next(numbers)
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
