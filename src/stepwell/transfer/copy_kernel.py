"""One Triton kernel that copies a byte range of many pages between pinned host memory and a device, in either direction.

    pages     |--- page 0 ---|--- page 1 ---|--- page 2 ---| ...      page ids come from two lists, pinned or on the device
    range          [=====]        [=====]        [=====]              the same bytes of every page
    tile           [==|==]        [==|==]                             one program copies ROWS blocks at a time

A few programs saturate the bus, because each keeps 64 KiB in flight. Imports Triton, so it is imported when it is used.
Checks no ids and chooses nothing: its caller has done both.
"""

from __future__ import annotations

from math import gcd

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]

WARPS = 32  # of a program, which then has a multiprocessor to itself: a few large programs beat many small ones
TILE_WORDS = 256  # that each warp has in flight: 64 bytes a thread in words of 8 bytes
BLOCKS_WORDS = (4096, 1024, 256, 64)  # a block lies inside one page; larger blocks read fewer ids
WASTE = 1.07  # how much of a tile may lie behind the range's end, before a smaller block is used
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["num_pages", "blocks", "units", "source_stride", "target_stride"])  # type: ignore[untyped-decorator,misc,unused-ignore]
def _copy_pages(  # type: ignore[no-untyped-def]
    source, target, source_ids, target_ids, num_pages, blocks, units, source_stride, target_stride,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # Sizes and strides count units of UNIT words, so the compiler knows that accesses may be 16 bytes wide if UNIT is 2.
    rows_R = tl.arange(0, ROWS)
    words_W = tl.arange(0, BLOCK)
    total = num_pages * blocks
    first = tl.program_id(0) * ROWS
    page_R = (first + rows_R) // blocks
    read_R = tl.load(source_ids + page_R, mask=first + rows_R < total, other=0)
    write_R = tl.load(target_ids + page_R, mask=first + rows_R < total, other=0)
    while first < total:  # not a range: the interpreter cannot convert its bounds to numbers with NumPy 2.4
        item_R = first + rows_R
        at_RW = ((item_R % blocks) * BLOCK)[:, None] + words_W[None, :]
        mask_RW = (item_R < total)[:, None] & (at_RW < units * UNIT)
        from_RW = (read_R.to(tl.int64) * (source_stride * UNIT))[:, None] + at_RW
        onto_RW = (write_R.to(tl.int64) * (target_stride * UNIT))[:, None] + at_RW
        # Bypasses the first-level cache, which is not coherent with writes of the host.
        content_RW = tl.load(source + from_RW, mask=mask_RW, cache_modifier=".cg")
        first += tl.num_programs(0) * ROWS
        page_R = (first + rows_R) // blocks  # the next ids arrive while the bytes are in flight
        read_R = tl.load(source_ids + page_R, mask=first + rows_R < total, other=0)
        write_R = tl.load(target_ids + page_R, mask=first + rows_R < total, other=0)
        tl.store(target + onto_RW, content_RW, mask=mask_RW, cache_modifier=".cs")


def copy_pages(
    source_B: torch.Tensor,
    target_B: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    source_stride: int,
    target_stride: int,
    size_bytes: int,
    programs: int,
) -> None:
    """Queues, on the current stream, the copy of `size_bytes` from page `source_ids[i]` to page `target_ids[i]`, for every i.

    The tensors of bytes begin where the range begins in page 0; strides are in bytes. None of it may change before the stream
    has run the copy. Raises Triton's exception if the kernel cannot be built or launched.
    """
    if not len(source_ids) or not size_bytes:
        return
    shared = gcd(source_B.data_ptr(), target_B.data_ptr(), source_stride, target_stride, size_bytes)
    word = gcd(shared, 8)
    unit = 2 if shared % 16 == 0 else 1
    block = block_words(size_bytes // word)
    _copy_pages[(programs,)](
        _words(source_B, word), _words(target_B, word), source_ids, target_ids,
        len(source_ids), -(-size_bytes // (block * word)), size_bytes // (word * unit),
        source_stride // (word * unit), target_stride // (word * unit),
        UNIT=unit, BLOCK=block, ROWS=TILE_WORDS * WARPS // block, num_warps=WARPS,
    )  # fmt: skip


def block_words(words: int) -> int:
    """The largest block that a range of this many words fills well; if there is none, the one it fills best."""
    waste = {block: -(-words // block) * block / words for block in BLOCKS_WORDS}
    return next((block for block in BLOCKS_WORDS if waste[block] <= WASTE), min(BLOCKS_WORDS, key=lambda block: waste[block]))


def _words(bytes_B: torch.Tensor, word: int) -> torch.Tensor:
    return bytes_B[: len(bytes_B) // word * word].view(_WORDS[word])
