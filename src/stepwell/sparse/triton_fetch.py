"""`fetch` by Triton: rows of a plan, read from pinned host memory over the bus and written into hot pages.

    rows      |-- 656 bytes --|-- 656 bytes --|-- ...         as many units of 16 bytes as all rows of the plan have,
    programs  |=== 0 ===|=== 1 ===|=== 0 ===| ...             taken by turns; several rows of a program are on the way at once

A fixed number of programs goes on until the plan's count, which only the device knows. Copies bytes and nothing else. Importing
needs Triton.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from stepwell.sparse.resolve import Plan, Sides

# Programs, warps of each, and units that a program has on the way: 262 KB of all. Half of that is enough where few rows of a page
# are read at a time; where nearly all are, a round over the bus took 5.8 us on an H200, and half of it gave 22 GB/s.
PROGRAMS, WARPS, UNITS = 64, 4, 256
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fetch(places: Sides, layer: int, plan: Plan, *, programs: int = PROGRAMS, warps: int = WARPS, units: int = UNITS) -> None:
    """As `resolve.fetch`, on the current stream."""
    (source_PRW, target_PRW), unit = words_of(places.host_PLRE[:, layer], places.rows_PLRE[:, layer])
    _fetch_kernel[(programs,)](
        source_PRW, target_PRW, plan.source_M, plan.target_M, plan.count_1,
        source_PRW.stride(0) // unit, source_PRW.stride(1) // unit, target_PRW.stride(0) // unit, target_PRW.stride(1) // unit,
        SIZE=places.page_rows, ROW=source_PRW.shape[2] // unit, UNIT=unit, BLOCK=units, num_warps=warps,
    )  # fmt: skip


def words_of(*views_PRE: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], int]:
    """Rows as the widest words that all of them begin at, and how many words are read at a time."""
    shared = _shared_bytes(*views_PRE)
    word = gcd(shared, 8)
    return tuple(view.view(_WORDS[word]) for view in views_PRE), 2 if shared % 16 == 0 else 1


def _shared_bytes(*views_PRE: torch.Tensor) -> int:
    """The largest number of bytes of which every row is a multiple, and begins at one."""
    sizes = []
    for view in views_PRE:
        assert view.stride(2) == 1, f"rows with gaps: {view.stride()}"
        sizes += [view.data_ptr(), *(number * view.element_size() for number in (*view.stride()[:2], view.shape[2]))]
    return gcd(*sizes)


@triton.jit
def _fetch_kernel(
    source, target, source_M, target_M, plan_count, source_page, source_row, target_page, target_row,
    SIZE: tl.constexpr, ROW: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Strides count units of UNIT words. So the compiler knows that accesses may be 16 bytes wide when UNIT is 2.
    lane, word = tl.arange(0, BLOCK), tl.arange(0, UNIT)
    total = tl.load(plan_count) * ROW
    first = tl.program_id(0) * BLOCK
    read = tl.load(source_M + (first + lane) // ROW, mask=first + lane < total, other=0)
    write = tl.load(target_M + (first + lane) // ROW, mask=first + lane < total, other=0)
    while first < total:
        inside = first + lane < total
        part = (first + lane) % ROW
        from_B = (read // SIZE).to(tl.int64) * source_page + (read % SIZE).to(tl.int64) * source_row + part
        onto_B = (write // SIZE).to(tl.int64) * target_page + (write % SIZE).to(tl.int64) * target_row + part
        # Not through the first-level cache: it does not hear of what the host writes.
        content = tl.load(source + from_B[:, None] * UNIT + word[None, :], mask=inside[:, None], other=0, cache_modifier=".cg")
        first += tl.num_programs(0) * BLOCK
        read = tl.load(source_M + (first + lane) // ROW, mask=first + lane < total, other=0)  # while the bytes are on the way
        write = tl.load(target_M + (first + lane) // ROW, mask=first + lane < total, other=0)
        tl.store(target + onto_B[:, None] * UNIT + word[None, :], content, mask=inside[:, None])
