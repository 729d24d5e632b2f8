"""A plain gather of rows from pinned host pages: one program a row. What fetching is compared with. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def gather(host_PRE: torch.Tensor, source_N: torch.Tensor, out_NE: torch.Tensor) -> None:
    """Rows by their numbers (page x R + row), back to back. Rows of whole words of eight bytes."""
    words_PRW, out_NW = host_PRE.view(torch.int64), out_NE.view(torch.int64)
    width = out_NW.shape[1]
    _gather_kernel[(len(source_N),)](
        words_PRW, out_NW, source_N, words_PRW.stride(0), words_PRW.stride(1),
        SIZE=host_PRE.shape[1], WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


@triton.jit
def _gather_kernel(host, out, source, page, row, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    item, word = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = tl.load(source + item)
    content = tl.load(host + at // SIZE * page + at % SIZE * row + word, mask=word < WIDTH)
    tl.store(out + item * WIDTH + word, content, mask=word < WIDTH)
