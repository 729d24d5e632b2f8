"""`resolve` in Triton: two launches of fixed shapes that never wait for the host, so that a pass can be captured.

    claim     one program for a block of one query row's entries; a claim is a minimum in the row's hint
    assign    one program per request: its winners, a histogram of its slots' bins, then the slots in order. If all its slots fit
              in one block, it reads their tables only once

Gives the same tables, hints and rows as plain torch; only the order of requests in the plan differs. All offsets into pages have
64 bits. Importing needs Triton. Axes as in `resolve.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stepwell.sparse.counts import KINDS
from stepwell.sparse.places import Places
from stepwell.sparse.resolve import CLAIM, Plan, Wanted

CLAIM_BLOCK, CLAIM_WARPS = 256, 4
ASSIGN_BLOCK, ASSIGN_WARPS = 4096, 8  # entries or slots per block; no more threads than bins


def resolve(places: Places, group: int, wanted: Wanted, plan: Plan) -> None:
    """As `resolve.resolve`. Tensors of `wanted` must have contiguous rows, and live until the stream has finished."""
    (queries, count), (requests, hot_pages) = wanted.position_XK.shape, wanted.hot_BQ.shape
    tally_BC = places.counts.tally_GBC[group]
    assert queries * count <= plan.entries and requests <= len(tally_BC), f"{wanted.position_XK.shape=} {wanted.hot_BQ.shape=}"
    if not queries or not count:
        plan.count_1.zero_()
        return
    hint_PR, key_S, stamp_S = places.slot_PGR[:, group], places.key_GS[group], places.stamp_GS[group]
    _claim_kernel[(queries, triton.cdiv(count, CLAIM_BLOCK))](
        wanted.position_XK, wanted.last_X, wanted.owner_X, wanted.table_BP, wanted.hot_BQ,
        places.header_P3, hint_PR, key_S, stamp_S, places.now_1, plan.claim_M, plan.count_1, tally_BC,
        count, places.slots, wanted.position_XK.stride(0), wanted.table_BP.stride(0), wanted.hot_BQ.stride(0),
        places.header_P3.stride(0), hint_PR.stride(0),
        SIZE=places.page_rows, FIRST_CLAIM=CLAIM, HOT=hot_pages > 0, KINDS=KINDS, BLOCK=CLAIM_BLOCK, num_warps=CLAIM_WARPS,
    )  # fmt: skip
    if not hot_pages:
        return
    score_XT = wanted.score_XT
    block = min(ASSIGN_BLOCK, max(triton.next_power_of_2(max(count, hot_pages * places.page_rows)), 256))
    _assign_kernel[(requests,)](
        wanted.first_A, wanted.hot_BQ, places.header_P3, hint_PR, key_S, stamp_S, places.hot_N, places.now_1,
        plan.claim_M, plan.winner_M, plan.source_M, plan.target_M, plan.count_1, tally_BC,
        places.now_1 if score_XT is None else score_XT, places.worth_S, 0 if score_XT is None else score_XT.shape[1],
        count, hot_pages, wanted.hot_BQ.stride(0), places.header_P3.stride(0), hint_PR.stride(0),
        0 if score_XT is None else score_XT.stride(0),
        SIZE=places.page_rows, FIRST_CLAIM=CLAIM, SCORED=score_XT is not None, WHOLE=hot_pages * places.page_rows <= block,
        KINDS=KINDS, BLOCK=block, num_warps=ASSIGN_WARPS,
    )  # fmt: skip


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["table_stride", "position_stride"])
def _claim_kernel(
    position, last, owner, table, hot, header, hint, key_S, stamp_S, now, claim, plan_count, tally,
    count, slots, position_stride, table_stride, hot_stride, header_stride, hint_stride,
    SIZE: tl.constexpr, FIRST_CLAIM: tl.constexpr, HOT: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Claims the entries of one query row. A hint for another row never matches, even while another program writes it."""
    query = tl.program_id(0)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (query == 0) & (tl.program_id(1) == 0):
        tl.store(plan_count, 0)
    request = tl.load(owner + query).to(tl.int64)
    at = tl.load(position + query.to(tl.int64) * position_stride + number, mask=number < count, other=-1).to(tl.int32)
    asked = (at >= 0) & (at <= tl.load(last + query))
    page = tl.load(table + request * table_stride + at // SIZE, mask=asked, other=0).to(tl.int64)
    row = at % SIZE
    bound = asked & (tl.load(header + page * header_stride + 1, mask=asked, other=-1) >= 0)
    away = asked & (tl.load(header + page * header_stride + 2, mask=asked, other=-1) >= 0) & ~bound
    place = hint + page * hint_stride + row
    slot = tl.load(place, mask=asked & ~bound, other=-1)
    sane = (slot >= 0) & (slot < slots)
    key = (page * SIZE + row).to(tl.int32)
    hit = sane & (tl.load(key_S + slot, mask=sane, other=-1) == key)
    tally += request * KINDS
    tl.store(stamp_S + slot, tl.load(now) + tl.zeros_like(slot), mask=hit)
    tl.atomic_add(tally + 0, tl.sum(bound.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(tally + 1, tl.sum(hit.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
    missing = away & ~hit
    has_hot = 0
    if HOT:
        has_hot = (tl.load(hot + request * hot_stride) >= 0).to(tl.int32)
    if has_hot > 0:
        entry = query * count + number
        tl.atomic_min(place, entry + FIRST_CLAIM, mask=missing, sem="relaxed")
        tl.store(claim + entry, tl.where(missing, key, -1), mask=number < count)
    else:
        tl.store(claim + query * count + number, tl.full([BLOCK], -1, tl.int32), mask=number < count)
        tl.atomic_add(tally + 3, tl.sum(missing.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")


@triton.jit
def _score_of(key, idle, score, header, header_stride, first, stop, length, score_stride, SIZE: tl.constexpr):
    """The highest score that any query row of the request gives to the row in each slot; NaN counts as the highest."""
    ordinal = tl.load(header + (key // SIZE).to(tl.int64) * header_stride, mask=idle, other=-1)
    at = ordinal.to(tl.int64) * SIZE + key % SIZE
    known = idle & (at >= 0) & (at < length)
    most = tl.where(known, float("-inf"), float("-inf"))
    query = first
    while query < stop:
        here = tl.load(score + query.to(tl.int64) * score_stride + at, mask=known, other=float("-inf")).to(tl.float32)
        most = tl.maximum(most, tl.where(here == here, here, float("inf")))
        query += 1
    return most


@triton.jit
def _score_bin(most, low, high):
    """As `resolve.score_bins`, for slots that are not in use."""
    known = (most > float("-inf")) & (most < float("inf"))
    several = high > low  # otherwise all are equal
    top, span = tl.where(several, high, 0.0), tl.where(several, tl.minimum(high - low, 3e38), 1.0)
    step = tl.where(several, tl.minimum(tl.div_rn(253.0, span), 3e38), 0.0)
    below = tl.where(known, tl.minimum(top - tl.where(known, most, 0.0), 3e38), 0.0)
    level = 1 + tl.minimum(below * step, 253.0).to(tl.int32)
    return tl.where(most == float("-inf"), 254, level)


@triton.jit
def _own(own, hot, slots, key_S, stamp_S, now, SIZE: tl.constexpr):
    """The slots of a request by their index among its own, -1 for none; the key of each, and whether it is idle."""
    page = tl.load(hot + own // SIZE, mask=own < slots, other=-1)
    slot = tl.where(page >= 0, page * SIZE + own % SIZE, -1)
    key = tl.load(key_S + slot, mask=slot >= 0, other=-1)
    stamp = tl.load(stamp_S + slot, mask=slot >= 0, other=now)
    return slot, key, (key >= 0) & (stamp < now)


@triton.jit
def _bin_of(slot, key, idle, most, low, high):
    rank = tl.where(idle, _score_bin(most, low, high), 0)
    return tl.where(slot < 0, 0, tl.where(key < 0, 255, rank))


@triton.jit
def _worth(slot, idle, worth_S, SCORED: tl.constexpr):
    """The recorded scores of slots, if there are any."""
    most = tl.full(idle.shape, float("-inf"), tl.float32)
    if SCORED:
        most = tl.load(worth_S + slot, mask=idle, other=float("-inf"))
    return most


@triton.jit
def _range_of(most):
    """The lowest and the highest finite score."""
    finite = (most > float("-inf")) & (most < float("inf"))
    low = tl.min(tl.where(finite, most, float("inf")), axis=0)
    return low, tl.max(tl.where(finite, most, float("-inf")), axis=0)


@triton.jit
def _share(bins, wins):
    """The number of winners that get a slot, the lowest bin that is reused, and how many slots of that bin are reused."""
    which = tl.arange(0, 256)
    given = tl.minimum(wins, tl.sum(tl.where(which > 0, bins, 0), axis=0))
    older = tl.cumsum(bins, axis=0, reverse=True)  # slots in this bin or a higher one
    least = tl.max(tl.where((older >= given) & (which > 0), which, 0), axis=0)
    return given, least, given - tl.sum(tl.where(which > least, bins, 0), axis=0)


@triton.jit
def _give(
    slot, rank, least, level_slots, level_before, before, base, stamp,
    winner, header, hint, hot_N, key_S, stamp_S, source, target, header_stride, hint_stride, SIZE: tl.constexpr,
):  # fmt: skip
    """Assigns slots, in order, to winners, in order, with the same stamp. Returns the number of slots seen in the lowest bin
    and the number assigned so far.
    """
    level = (rank == least).to(tl.int32)
    among = tl.cumsum(level, axis=0) + level_before
    taken = ((rank > least) | ((level > 0) & (among <= level_slots))).to(tl.int32)
    place, mine = tl.cumsum(taken, axis=0) + before - 1, taken > 0
    new = tl.load(winner + place, mask=mine, other=0)
    origin = tl.load(header + (new // SIZE).to(tl.int64) * header_stride + 2, mask=mine, other=0)
    onto = tl.load(hot_N + slot // SIZE, mask=mine, other=0)
    tl.store(key_S + slot, new, mask=mine)
    tl.store(stamp_S + slot, stamp + tl.zeros_like(new), mask=mine)
    tl.store(hint + (new // SIZE).to(tl.int64) * hint_stride + new % SIZE, slot, mask=mine)
    tl.store(source + base + place, origin * SIZE + new % SIZE, mask=mine)
    tl.store(target + base + place, onto * SIZE + slot % SIZE, mask=mine)
    return level_before + tl.sum(level, axis=0), before + tl.sum(taken, axis=0)


@triton.jit
def _winners(claim, winner, hint, hint_stride, start, stop, SIZE: tl.constexpr, FIRST_CLAIM: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the rows that a request has won, compacted in the order of its entries. Returns their number."""
    lane = tl.arange(0, BLOCK)
    wins = 0
    at = start
    while at < stop:
        key = tl.load(claim + at + lane, mask=at + lane < stop, other=-1)
        said = tl.load(hint + (key // SIZE).to(tl.int64) * hint_stride + key % SIZE, mask=key >= 0, other=0)
        won = ((key >= 0) & (said == at + lane + FIRST_CLAIM)).to(tl.int32)
        tl.store(winner + start + tl.cumsum(won, axis=0) + wins - 1, key, mask=won > 0)
        wins += tl.sum(won, axis=0)
        at += BLOCK
    return wins


@triton.jit
def _assign_kernel(
    first_A, hot, header, hint, key_S, stamp_S, hot_N, now_1, claim, winner, source, target, plan_count, tally, score, worth_S,
    length, count, hot_pages, hot_stride, header_stride, hint_stride, score_stride,
    SIZE: tl.constexpr, FIRST_CLAIM: tl.constexpr, SCORED: tl.constexpr, WHOLE: tl.constexpr, KINDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Assigns slots for one request. No other program writes to its slots, or to the hints of rows that it has won."""
    request = tl.program_id(0).to(tl.int64)
    lane, now, slots = tl.arange(0, BLOCK), tl.load(now_1), hot_pages * SIZE
    first, stop = tl.load(first_A + request), tl.load(first_A + request + 1)
    hot += request * hot_stride
    tally += request * KINDS
    wins = _winners(claim, winner, hint, hint_stride, first * count, stop * count, SIZE, FIRST_CLAIM, BLOCK)
    winner += first * count
    if wins > 0:
        tl.debug_barrier()  # other threads read the winners
        low, high = float("inf"), float("-inf")
        if WHOLE:
            slot, key, idle = _own(lane, hot, slots, key_S, stamp_S, now, SIZE)
            most = tl.full([BLOCK], float("-inf"), tl.float32)
            if SCORED:
                most = _score_of(key, idle, score, header, header_stride, first, stop, length, score_stride, SIZE)
                low, high = _range_of(most)
            rank = _bin_of(slot, key, idle, most, low, high)
            given, least, level_slots = _share(tl.histogram(rank, 256), wins)
            base = tl.atomic_add(plan_count, given, sem="relaxed")
            tl.debug_barrier()  # keys are read before any slot is reused
            _give(
                slot, rank, least, level_slots, 0, 0, base, now,
                winner, header, hint, hot_N, key_S, stamp_S, source, target, header_stride, hint_stride, SIZE,
            )  # fmt: skip
        else:
            if SCORED:
                start = 0
                while start < slots:
                    slot, key, idle = _own(start + lane, hot, slots, key_S, stamp_S, now, SIZE)
                    most = _score_of(key, idle, score, header, header_stride, first, stop, length, score_stride, SIZE)
                    tl.store(worth_S + slot, most, mask=idle)
                    lowest, highest = _range_of(most)
                    low, high = tl.minimum(low, lowest), tl.maximum(high, highest)
                    start += BLOCK
                tl.debug_barrier()  # so are the scores
            bins = tl.zeros([256], tl.int32)
            start = 0
            while start < slots:
                slot, key, idle = _own(start + lane, hot, slots, key_S, stamp_S, now, SIZE)
                most = _worth(slot, idle, worth_S, SCORED)
                bins += tl.histogram(_bin_of(slot, key, idle, most, low, high), 256)
                start += BLOCK
            given, least, level_slots = _share(bins, wins)
            base = tl.atomic_add(plan_count, given, sem="relaxed")
            level_before = 0
            before = 0
            start = 0
            while start < slots:
                slot, key, idle = _own(start + lane, hot, slots, key_S, stamp_S, now, SIZE)
                most = _worth(slot, idle, worth_S, SCORED)
                rank = _bin_of(slot, key, idle, most, low, high)
                level_before, before = _give(
                    slot, rank, least, level_slots, level_before, before, base, now,
                    winner, header, hint, hot_N, key_S, stamp_S, source, target, header_stride, hint_stride, SIZE,
                )  # fmt: skip
                start += BLOCK
        tl.atomic_add(tally + 2, given.to(tl.int64), sem="relaxed")
        tl.atomic_add(tally + 3, (wins - given).to(tl.int64), sem="relaxed")
        at = given
        while at < wins:  # no slot is free for these
            lost = tl.load(winner + at + lane, mask=at + lane < wins, other=0)
            nowhere = tl.full([BLOCK], -1, tl.int32)
            tl.store(hint + (lost // SIZE).to(tl.int64) * hint_stride + lost % SIZE, nowhere, mask=at + lane < wins)
            at += BLOCK
