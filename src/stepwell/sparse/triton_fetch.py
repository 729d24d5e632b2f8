"""`fetch` in Triton: reads the rows of a plan from pinned host memory over the bus, and writes them into hot pages.

    rows      |-- 656 bytes --|-- 656 bytes --|-- ...         all rows of the plan, in units of 16 bytes,
    programs  |=== 0 ===|=== 1 ===|=== 0 ===| ...             taken by turns; a program has several rows in flight

A fixed number of programs loops up to the plan's count, which only the device knows. Copies bytes only. Importing needs Triton.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from stepwell.sparse.resolve import Plan, Sides

# Programs, warps of each, and units that a program has in flight: 262 KB in all. Half is enough if few rows of a page are read at
# a time; if nearly all are, a round trip over the bus took 5.8 us on an H200, and half gave only 22 GB/s.
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
    """Rows viewed as the widest words that they are aligned to, and the number of words per unit."""
    shared = _shared_bytes(*views_PRE)
    word = gcd(shared, 8)
    return tuple(view.view(_WORDS[word]) for view in views_PRE), 2 if shared % 16 == 0 else 1


def _shared_bytes(*views_PRE: torch.Tensor) -> int:
    """The greatest common divisor of the sizes and addresses of all rows."""
    sizes = []
    for view in views_PRE:
        assert view.stride(2) == 1, f"rows must be contiguous: {view.stride()}"
        sizes += [view.data_ptr(), *(number * view.element_size() for number in (*view.stride()[:2], view.shape[2]))]
    return gcd(*sizes)


@triton.jit
def _fetch_kernel(
    source, target, source_M, target_M, plan_count, source_page, source_row, target_page, target_row,
    SIZE: tl.constexpr, ROW: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Strides count units of UNIT words, so that the compiler knows that accesses can be 16 bytes wide when UNIT is 2.
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
        # Bypasses the L1 cache, which does not see writes of the host.
        content = tl.load(source + from_B[:, None] * UNIT + word[None, :], mask=inside[:, None], other=0, cache_modifier=".cg")
        first += tl.num_programs(0) * BLOCK
        read = tl.load(source_M + (first + lane) // ROW, mask=first + lane < total, other=0)  # while the bytes are in flight
        write = tl.load(target_M + (first + lane) // ROW, mask=first + lane < total, other=0)
        tl.store(target + onto_B[:, None] * UNIT + word[None, :], content, mask=inside[:, None])
