"""What the scheduler's process and its workers tell each other, as messages: page ids and numbers, never bytes of pages.

    scheduler    setup, memory          what to load, and how much memory for device pages
                 run, copy              a pass, a plan of copies
    worker       loaded, ready          answers to the first two
                 chosen, copied         answers to the others; tokens come from the first rank alone
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
LOADED, READY, CHOSEN, COPIED, FAILED = "loaded", "ready", "chosen", "copied", "failed"
_COLUMNS = 10  # numbers of one request's part of a pass, see `_numbers`
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
        int(rows.resumes), rows.num_logits, rows.picks_from,
    )  # fmt: skip


def read_pass(message: Message, *, pages: Counts, vocab_size: int, most_slots: int) -> Pass:
    numbers, tokens, prefix, window, *more = _so_many(message, 4 + CHOOSING_ARRAYS)
    if numbers.size % _COLUMNS:
        raise ValueError("a pass whose parts are not of one length")
    choosing = read_choosing(more, vocab_size=vocab_size)
    table: list[list[int]] = numbers.reshape(-1, _COLUMNS).tolist()
    for array, most, what in (
        (tokens, vocab_size, "tokens"), (prefix, pages.get(Kind.PREFIX, 0), "prefix pages"),
        (window, pages.get(Kind.WINDOW, 0), "window pages"),
    ):  # fmt: skip
        _must_be_below(array, most, what)
    rows, at = [], [0, 0, 0]
    for num_tokens, num_prefix, num_window, position, first_window, point, slot, resumes, num_logits, picks_from in table:
        counts = (num_tokens, num_prefix, num_window)
        if min(counts) < 0 or num_tokens < 1 or min(position, first_window, picks_from, num_logits) < 0:
            raise ValueError(f"a pass with {counts} tokens and pages from {position} on")
        if num_logits > num_tokens or not _NONE <= point < pages.get(Kind.POINT, 0) or not _NONE <= slot < most_slots:
            raise ValueError(f"a pass with {num_logits} logits of {num_tokens} tokens, point page {point}, slot {slot}")
        mine = [each[start : start + count] for each, start, count in zip((tokens, prefix, window), at, counts, strict=True)]
        if [len(each) for each in mine] != list(counts):
            raise ValueError("a pass with fewer tokens or pages than it says")
        at = [start + count for start, count in zip(at, counts, strict=True)]
        rows.append(
            RequestRows(
                tokens=mine[0],
                position=position,
                prefix_pages=mine[1],
                window_pages=mine[2],
                first_window=first_window,
                point_page=None if point == _NONE else point,
                slot=None if slot == _NONE else slot,
                resumes=bool(resumes),
                num_logits=num_logits,
                picks_from=picks_from,
            )
        )
    if at != [len(tokens), len(prefix), len(window)] or sum(each.num_logits for each in rows) != len(choosing):
        raise ValueError("a pass with more tokens, pages or draws than it says")
    return Pass(rows=rows, choosing=choosing)


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


def read_chosen(message: Message) -> list[Chosen | None]:
    tokens, values, ranks, counts, top_tokens, top_values = (each.tolist() for each in _so_many(message, 6))
    if (
        not len(tokens) == len(values) == len(ranks) == len(counts)
        or sum(counts) != len(top_tokens)
        or len(top_tokens) != len(top_values)
    ):
        raise ValueError("an answer whose parts are not of one length")
    chosen: list[Chosen | None] = []
    start = 0
    for token, value, rank, count in zip(tokens, values, ranks, counts, strict=True):
        top = tuple(zip(top_tokens[start : start + count], top_values[start : start + count], strict=True))
        start += count
        told = value == value  # not a number where none was asked for
        logprob = TokenLogprob(token=token, logprob=value, rank=rank, top=top) if told else None
        chosen.append(None if token == _NONE else Chosen(token=token, logprob=logprob))
    return chosen


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
    return np.concatenate([np.asarray(each, np.int32) for each in parts]) if parts else np.empty(0, np.int32)


def _so_many(message: Message, count: int) -> Sequence[Array]:
    if len(message.arrays) != count:
        raise ValueError(f"{message.kind} has {len(message.arrays)} arrays and not {count}")
    return message.arrays


def _must_be_below(ids: Array, most: int, what: str) -> None:
    if ids.dtype != np.int32 or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < most):
        raise ValueError(f"{what} that are not there: {ids[:8]} of {most}")
