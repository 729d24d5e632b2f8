"""What the scheduler's process and its workers tell each other, as messages: page ids and numbers, never bytes of pages.

    scheduler    setup, memory          what to load, and how much memory for device pages
                 run, copy              a pass, a plan of copies
    worker       loaded, ready          answers to the first two
                 chosen, copied         answers to the others; tokens come from the first rank alone
                 broke                  a pass failed, and the rank can go on if all are in step
                 failed                 it cannot go on, and ends

What comes out of a message was looked at: counts add up, pages are inside their memory. Raises ValueError where they are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepwell.base.ids import CACHED_KINDS, JobId, Kind, Tier
from stepwell.base.tasks import Copy, PageIds, Plan, Purpose, Span
from stepwell.engine.passes.batch import RequestRows
from stepwell.engine.request import TokenLogprob
from stepwell.engine.sampling import Choosing, Chosen
from stepwell.engine.workers.choosing_arrays import CHOOSING_ARRAYS, pack_choosing, read_choosing
from stepwell.jobs.channel import Array, Message

SETUP, MEMORY, RUN, COPY = "setup", "memory", "run", "copy"
LOADED, READY, CHOSEN, BROKE, COPIED, FAILED = "loaded", "ready", "chosen", "broke", "copied", "failed"
_COLUMNS = 11  # numbers of one request's part of a pass, see `_numbers`
_COUNTS = [0, 1, 2, 8]  # of those, how many tokens, pages and logits it has
_NONE = -1  # in arrays

Counts = Mapping[Kind, int]  # pages that a memory has, by kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One pass: every request's part, and how the tokens behind each row of logits are chosen."""

    rows: Sequence[RequestRows]
    choosing: Sequence[Choosing]


# ---- passes -------------------------------------------------------------------------------------


def pack_pass(given: Pass, number: int) -> Message:
    """`number` is repeated by what comes of it."""
    rows = given.rows
    numbers = np.array([_numbers(each) for each in rows], np.int64).reshape(-1)
    return Message(
        kind=RUN,
        fields={"pass": number},
        arrays=[
            numbers,
            _joined([each.tokens for each in rows]), _joined([each.prefix_pages for each in rows]),
            _joined([each.window_pages for each in rows]),
            *pack_choosing(given.choosing),
        ],
    )  # fmt: skip


def _numbers(rows: RequestRows) -> tuple[int, ...]:
    return (
        len(rows.tokens), len(rows.prefix_pages), len(rows.window_pages), rows.position, rows.first_window,
        _NONE if rows.point_page is None else rows.point_page, _NONE if rows.slot is None else rows.slot,
        int(rows.resumes), rows.num_logits, rows.picks_from, _NONE if rows.point_copy is None else rows.point_copy,
    )  # fmt: skip


def read_pass(message: Message, *, pages: Counts, vocab_size: int, most_slots: int) -> Pass:
    numbers, tokens, prefix, window, *more = _so_many(message, 4 + CHOOSING_ARRAYS)
    if numbers.dtype.str != "<i8":
        raise ValueError("a pass in numbers of other kinds")
    if numbers.size % _COLUMNS:
        raise ValueError("a pass whose parts are not of one length")
    choosing = read_choosing(more, vocab_size=vocab_size)
    for array, most, what in (
        (tokens, vocab_size, "tokens"), (prefix, pages.get(Kind.PREFIX, 0), "prefix pages"),
        (window, pages.get(Kind.WINDOW, 0), "window pages"),
    ):  # fmt: skip
        _must_be_below(array, most, what)
    table_RC = numbers.reshape(-1, _COLUMNS)
    _check_table(table_RC, most_points=pages.get(Kind.POINT, 0), most_slots=most_slots)
    said = table_RC[:, _COUNTS].sum(axis=0, dtype=np.float64).tolist()  # which no sum is too large for
    if said != [len(tokens), len(prefix), len(window), len(choosing)]:
        raise ValueError("a pass with more or fewer tokens, pages or draws than it says")
    rows, first, first_prefix, first_seen = [], 0, 0, 0
    for each in table_RC.tolist():
        num_tokens, num_prefix, num_window, position, first_window, point, slot, resumes, num_logits, picks, copy = each
        stop, stop_prefix, stop_seen = first + num_tokens, first_prefix + num_prefix, first_seen + num_window
        rows.append(
            RequestRows(
                tokens=tokens[first:stop],
                position=position,
                prefix_pages=prefix[first_prefix:stop_prefix],
                window_pages=window[first_seen:stop_seen],
                first_window=first_window,
                point_page=None if point == _NONE else point,
                slot=None if slot == _NONE else slot,
                resumes=bool(resumes),
                num_logits=num_logits,
                picks_from=picks,
                point_copy=None if copy == _NONE else copy,
            )
        )
        first, first_prefix, first_seen = stop, stop_prefix, stop_seen
    return Pass(rows=rows, choosing=choosing)


def _check_table(table_RC: Array, *, most_points: int, most_slots: int) -> None:
    """All requests at once: a step has many of them, and is short."""
    if not len(table_RC):
        return
    low, high = table_RC.min(axis=0).tolist(), table_RC.max(axis=0).tolist()
    fewest = [1, 0, 0, 0, 0, _NONE, _NONE, 0, 0, 0, _NONE]
    if any(each < least for each, least in zip(low, fewest, strict=True)) or (table_RC[:, 8] > table_RC[:, 0]).any():
        raise ValueError(f"a pass with numbers down to {low}, or more logits than tokens")
    if high[10] >= most_points or ((table_RC[:, 10] != _NONE) & (table_RC[:, 5] == _NONE)).any():
        raise ValueError(f"a pass that copies a point to page {high[10]} of {most_points}, or copies none")
    if high[5] >= most_points or high[6] >= most_slots or high[7] > 1:
        raise ValueError(f"a pass with point page {high[5]} of {most_points}, slot {high[6]} of {most_slots}")


# ---- what was chosen ----------------------------------------------------------------------------


def pack_chosen(chosen: Sequence[Chosen | None], number: int) -> Message:
    """Of the pass with that number. One entry a row of logits; None for a row that holds something else than numbers."""
    tokens = [_NONE if each is None else each.token for each in chosen]
    found = [None if each is None or each.logprob is None else each.logprob for each in chosen]
    tops = [() if each is None else each.top for each in found]
    return Message(
        kind=CHOSEN,
        fields={"pass": number},
        arrays=[
            np.array(tokens, np.int32),
            np.array([float("nan") if each is None else each.logprob for each in found], np.float64),
            np.array([0 if each is None else each.rank for each in found], np.int32),
            np.array([len(top) for top in tops], np.int32),
            np.array([token for top in tops for token, _ in top], np.int32),
            np.array([value for top in tops for _, value in top], np.float64),
        ],
    )


def read_chosen(message: Message, *, vocab_size: int) -> list[Chosen | None]:
    arrays = _so_many(message, 6)
    if [each.dtype.str for each in arrays] != ["<i4", "<f8", "<i4", "<i4", "<i4", "<f8"]:
        raise ValueError(f"an answer in numbers of other kinds: {[each.dtype.str for each in arrays]}")
    _must_be_below(arrays[0] + 1, vocab_size + 1, "tokens")  # or none
    _must_be_below(arrays[2], vocab_size + 1, "ranks of tokens")
    _must_be_below(arrays[3], vocab_size + 1, "alternatives")
    _must_be_below(arrays[4], vocab_size, "tokens")
    tokens, values, ranks, counts, top_tokens, top_values = (each.tolist() for each in arrays)
    lengths_agree = len(tokens) == len(values) == len(ranks) == len(counts)
    if not lengths_agree or sum(counts) != len(top_tokens) or len(top_tokens) != len(top_values):
        raise ValueError("an answer whose parts are not of one length")
    chosen: list[Chosen | None] = []
    start = 0
    for token, value, rank, count in zip(tokens, values, ranks, counts, strict=True):
        logprob = None
        if value == value:  # not a number where none was asked for
            top = tuple(zip(top_tokens[start : start + count], top_values[start : start + count], strict=True))
            logprob = TokenLogprob(token=token, logprob=value, rank=rank, top=top)
        start += count
        chosen.append(None if token == _NONE else Chosen(token=token, logprob=logprob))
    return chosen


def read_kernels(message: Message, name: str) -> dict[str, str]:
    """Words on operations, by their names. None where nothing is said."""
    given = message.fields.get(name, {})
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise ValueError(f"{message.kind}: {name} are no words on operations")
    return given


# ---- copies -------------------------------------------------------------------------------------


def pack_plan(plan: Plan) -> Message:
    sides = [[copy.source.tier.value, copy.target.tier.value, copy.source.kind.value] for copy in plan.copies]
    return Message(
        kind=COPY,
        fields={"job": int(plan.job), "purpose": plan.purpose.value, "awaited": plan.awaited, "copies": sides},
        arrays=[span.ids.astype(np.int32, copy=False) for copy in plan.copies for span in (copy.source, copy.target)],
    )


def read_plan(message: Message, *, pages: Mapping[Tier, Counts]) -> Plan:
    sides = message.fields.get("copies")
    if not isinstance(sides, list) or len(message.arrays) != 2 * len(sides):
        raise ValueError("a plan whose copies are not of one length")
    copies = []
    for at, side in enumerate(sides):
        match side:
            case [int(source), int(target), int(kind)]:
                spans = [
                    _span(Tier(tier), Kind(kind), ids, pages)
                    for tier, ids in zip((source, target), message.arrays[2 * at : 2 * at + 2], strict=True)
                ]
            case _:
                raise ValueError(f"a copy between {side!r:.80}")
        if len(spans[0].ids) != len(spans[1].ids) or {Tier.HOST} == {span.tier for span in spans}:
            raise ValueError("a copy that no rank can make")
        copies.append(Copy(source=spans[0], target=spans[1]))
    awaited = message.fields.get("awaited")
    return Plan(
        job=JobId(message.number("job")), purpose=Purpose(message.text("purpose")), copies=tuple(copies), awaited=awaited is True
    )


def _span(tier: Tier, kind: Kind, ids: Array, pages: Mapping[Tier, Counts]) -> Span:
    if tier not in pages or kind not in CACHED_KINDS:
        raise ValueError(f"a copy of {kind.label} pages of a tier that is not here")
    _must_be_below(ids, pages[tier].get(kind, 0), f"{kind.label} pages")
    return Span(tier=tier, kind=kind, ids=ids)


# ---- inside ---------------------------------------------------------------------------------------


def _joined(parts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> PageIds:
    if any(isinstance(each, np.ndarray) for each in parts):
        return np.concatenate([np.asarray(each, np.int32) for each in parts])
    return np.array([number for each in parts for number in each], np.int32)  # a token each, mostly


def _so_many(message: Message, count: int) -> Sequence[Array]:
    if len(message.arrays) != count:
        raise ValueError(f"{message.kind} has {len(message.arrays)} arrays and not {count}")
    return message.arrays


def _must_be_below(ids: Array, most: int, what: str) -> None:
    if ids.dtype != np.int32 or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < most):
        raise ValueError(f"{what} that are not there: {ids[:8]} of {most}")
