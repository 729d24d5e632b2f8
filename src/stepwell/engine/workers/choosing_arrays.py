"""How tokens are chosen, as arrays of a message: a part of `messages.py`. Greedy passes have no such arrays.

drawn      temperature of each row, then top-k, top-p and number of each
rows       logprobs, given token, and the number of ids and words of its edit, see `_COUNTS`; empty if no row needs any
ids        of all edits, back to back: biased, repeated, used, forbidden, then the words of the allowed-token mask
numbers    of all edits: repetition penalty, min-p, biases, other penalties
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepwell.engine.ops.drawing import Draw
from stepwell.engine.ops.editing import NO_IDS, NO_NUMBERS, Edit, words_for
from stepwell.engine.sampling.choices import Choosing
from stepwell.jobs.channel import Array

_NONE = -1  # in arrays
_COUNTS = 8  # logprobs, given, whether it is edited; biased, repeated, used, forbidden, words
_LIKELIEST = Choosing()
_LIKELIEST_DRAWN = Draw(temperature=0.0, top_k=None, top_p=1.0, number=0.0)
_NO_ROWS = np.empty(0, np.int64)


def pack_choosing(ways: Sequence[Choosing]) -> list[Array]:
    if not ways or ways.count(_LIKELIEST) == len(ways):
        return []
    draws, edits, given, logprobs = zip(*ways, strict=True)
    drawn_only = edits.count(None) == given.count(None) == logprobs.count(None) == len(ways)
    drawn = [_LIKELIEST_DRAWN if each is None else each for each in draws] if None in draws else draws
    temperatures, top_k, top_p, numbers = zip(*drawn, strict=True)
    present = [edit for edit in edits if edit is not None]
    ids = [part for edit in present for part in (edit.biased, edit.repeated, edit.used, edit.forbidden, edit.allowed)]
    values = [part for edit in present for part in (_two(edit), edit.biases, edit.penalties)]
    return [
        np.array([*temperatures, *[most or 0 for most in top_k], *top_p, *numbers], np.float64),
        _NO_ROWS if drawn_only else np.array([_row(way) for way in ways], np.int64).reshape(-1),
        np.concatenate(ids).astype(np.int32, copy=False) if ids else NO_IDS,
        np.concatenate(values) if values else NO_NUMBERS,
    ]


def _row(way: Choosing) -> tuple[int, ...]:
    about = (_NONE if way.logprobs is None else way.logprobs, _NONE if way.given is None else way.given)
    edit = way.edit
    if edit is None:
        return *about, 0, 0, 0, 0, 0, 0
    return *about, 1, len(edit.biased), len(edit.repeated), len(edit.used), len(edit.forbidden), len(edit.allowed)


def _two(edit: Edit) -> Array:
    return np.array([edit.repetition, float("nan") if edit.within is None else edit.within], np.float64)


def read_choosing(arrays: Sequence[Array], count: int, *, vocab_size: int) -> list[Choosing]:
    """For `count` rows of logits. Raises ValueError if the arrays are inconsistent."""
    if not arrays:
        return [_LIKELIEST] * count
    if [each.dtype.str for each in arrays] != ["<f8", "<i8", "<i4", "<f8"]:
        raise ValueError(f"a pass must describe its draws in four arrays of known dtypes, got {len(arrays)}")
    drawn, rows, ids, numbers = arrays
    if drawn.size != count * 4 or rows.size not in (0, count * _COUNTS):
        raise ValueError("a pass whose number of draws differs from its rows of logits")
    if not np.isfinite(drawn).all():
        raise ValueError("a pass whose sampling parameters are no numbers")
    temperatures, top_k, top_p, draw_numbers = drawn.reshape(4, -1).tolist()
    most = [int(each) or None for each in top_k] if any(top_k) else [None] * count
    draws: list[Draw | None] = [*map(Draw._make, zip(temperatures, most, top_p, draw_numbers, strict=True))]
    if min(temperatures) <= 0:
        draws = [draw if temperature > 0 else None for draw, temperature in zip(draws, temperatures, strict=True)]
    reader = _Reader(ids, numbers, vocab_size)
    if rows.size:
        ways = [reader.way(draw, *row) for draw, row in zip(draws, rows.reshape(-1, _COUNTS).tolist(), strict=True)]
    else:
        ways = [*map(Choosing, draws)]
    reader.must_be_done()
    return ways


class _Reader:
    def __init__(self, ids: Array, numbers: Array, vocab_size: int) -> None:
        self._left = {"ids": ids, "numbers": numbers}
        self._vocab_size = vocab_size

    def way(self, draw: Draw | None, logprobs: int, given: int, is_edited: int, *counts: int) -> Choosing:
        if min(counts) < 0 or not _NONE <= given < self._vocab_size or counts[-1] not in (0, words_for(self._vocab_size)):
            raise ValueError(f"a pass with an edit of {counts} ids, or a given token {given} outside the vocabulary")
        return Choosing(
            draw=draw,
            edit=self._edit(*counts) if is_edited else None,
            given=None if given == _NONE else given,
            logprobs=None if logprobs == _NONE else logprobs,
        )

    def _edit(self, biased: int, repeated: int, used: int, forbidden: int, words: int) -> Edit:
        places = [self._ids(count) for count in (biased, repeated, used, forbidden)]
        allowed, (repetition, within) = self._take("ids", words), self._take("numbers", 2).tolist()
        return Edit(
            biased=places[0], biases=self._take("numbers", biased), repeated=places[1], repetition=repetition, used=places[2],
            penalties=self._take("numbers", used), forbidden=places[3], allowed=allowed,
            within=within if within == within else None,
        )  # fmt: skip

    def must_be_done(self) -> None:
        if any(left.size for left in self._left.values()):
            raise ValueError("a pass with more edits than its counts declare")

    def _ids(self, count: int) -> Array:
        ids = self._take("ids", count)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise ValueError(f"a pass whose edits name tokens outside the vocabulary: {ids[:8]}")
        return ids

    def _take(self, what: str, count: int) -> Array:
        taken, self._left[what] = self._left[what][:count], self._left[what][count:]
        if len(taken) < count:
            raise ValueError(f"a pass with fewer {what} of edits than its counts declare")
        return taken
