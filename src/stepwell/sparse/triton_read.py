"""`read` in Triton: gathers stored rows from device and host into one tensor on the device, without the host's help.

    header    names a rows page on the device: read there
    hint      names a hot slot whose key is this row: read there
    else      read from pinned host memory, over the bus

`look_up` does the lookup alone, for kernels that read rows themselves. Copies bytes, and changes no table. A row that is in
neither place reads as ones in every bit, which is NaN. Importing needs Triton. Axes as in `places.py`, and N rows to read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from stepwell.sparse.places import Places
from stepwell.sparse.triton_fetch import words_of

WARPS, UNITS = 4, 512  # warps of a program, and units that it reads at once, of several short rows


def read(places: Places, layer: int, page: torch.Tensor, row: torch.Tensor, group: int) -> torch.Tensor:
    """As `Places.read`, on the current stream; pages and rows have the same shape."""
    page_N, row_N = page.reshape(-1).contiguous(), row.reshape(-1).contiguous()
    rows_PRE, host_PRE = places.rows_PLRE[:, layer], places.host_PLRE[:, layer]
    out_NE = torch.empty(len(page_N), rows_PRE.shape[2], dtype=rows_PRE.dtype, device=places.device)
    if out_NE.numel():
        (device_PRW, host_PRW, out_PRW), unit = words_of(rows_PRE, host_PRE, out_NE[:, None])
        block = min(triton.next_power_of_2(out_PRW.shape[2] // unit), UNITS)
        _read_kernel[(triton.cdiv(len(page_N), UNITS // block),)](
            device_PRW, host_PRW, out_PRW, page_N, row_N, len(page_N), *tables(places, group),
            device_PRW.stride(0) // unit, device_PRW.stride(1) // unit, host_PRW.stride(0) // unit, host_PRW.stride(1) // unit,
            SIZE=places.page_rows, ROW=out_PRW.shape[2] // unit, UNIT=unit, ROWS=UNITS // block, BLOCK=block,
            num_warps=WARPS,
        )  # fmt: skip
    return out_NE.view(*page.shape, rows_PRE.shape[2])


def tables(places: Places, group: int) -> tuple[Any, ...]:
    """The arguments of `look_up`, in its order."""
    hint_PR, key_S = places.slot_PGR[:, group], places.key_GS[group]
    if not places.slots:
        key_S = places.now_1  # never read, but the kernel needs an argument
    return (
        places.header_P3, hint_PR, key_S, places.hot_N if places.slots else places.now_1, places.slots,
        places.header_P3.stride(0), hint_PR.stride(0),
    )  # fmt: skip


@triton.jit
def look_up(page, row, asked, header, hint, key_S, hot_N, slots, header_stride, hint_stride, SIZE: tl.constexpr):
    """Where rows of prefix pages are: page and row on the device, or page on the host and the same row; -1 in the other.

    A hint counts only if the slot's key is this row.
    """
    own = tl.load(header + page * header_stride + 1, mask=asked, other=-1)
    below = tl.load(header + page * header_stride + 2, mask=asked, other=-1)
    slot = tl.load(hint + page * hint_stride + row, mask=asked & (own < 0), other=-1)
    sane = (slot >= 0) & (slot < slots)
    held = tl.load(key_S + slot, mask=sane, other=-1)
    hit = sane & (held == (page * SIZE + row).to(tl.int32))
    hot = tl.load(hot_N + slot // SIZE, mask=hit, other=-1)
    device = tl.where(hit, hot, own).to(tl.int64)
    below = tl.where(device >= 0, -1, below).to(tl.int64)
    return device, tl.where(hit, slot % SIZE, row).to(tl.int64), below


@triton.jit
def _read_kernel(
    device, host, out, page_N, row_N, count, header, hint, key_S, hot_N, slots, header_stride, hint_stride,
    device_page, device_row, host_page, host_row,
    SIZE: tl.constexpr, ROW: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads some rows. Strides count units of UNIT words, as in `triton_fetch`."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    asked = number < count
    page = tl.load(page_N + number, mask=asked, other=0).to(tl.int64)
    row = tl.load(row_N + number, mask=asked, other=0).to(tl.int64)
    there, at, below = look_up(page, row, asked, header, hint, key_S, hot_N, slots, header_stride, hint_stride, SIZE)
    from_device = (there * device_page + at * device_row)[:, None]
    from_host = (below * host_page + row * host_row)[:, None]
    word = tl.arange(0, UNIT)
    start = 0
    while start < ROW:
        part = start + tl.arange(0, BLOCK)
        inside = part < ROW
        here = ((there >= 0) & asked)[:, None] & inside[None, :]
        away = ((below >= 0) & asked)[:, None] & inside[None, :]
        near = tl.load(
            device + ((from_device + part[None, :]) * UNIT)[:, :, None] + word[None, None, :], mask=here[:, :, None], other=-1
        )  # fmt: skip
        # Not through the first-level cache: it does not hear of what the host writes.
        far = tl.load(
            host + ((from_host + part[None, :]) * UNIT)[:, :, None] + word[None, None, :], mask=away[:, :, None], other=-1,
            cache_modifier=".cg",
        )  # fmt: skip
        onto = out + ((number[:, None] * ROW + part[None, :]) * UNIT)[:, :, None] + word[None, None, :]
        tl.store(onto, tl.where(here[:, :, None], near, far), mask=(asked[:, None] & inside[None, :])[:, :, None])
        start += BLOCK
