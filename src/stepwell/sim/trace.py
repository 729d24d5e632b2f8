"""A request of a trace: when it arrived, and the blocks of text in its prompt. Reads no files.

    prompt     |  block 7  |  block 8  |  block 31 |  tail  |
                                                      less than a block, or text that no other request has

Equal block ids are equal content with equal history, so two prompts share what their leading ids share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]

MAX_BLOCK_ID = 2**53  # exclusive: ids pass through JSON numbers of every reader
LEAST_BLOCK_TOKENS = 2  # a block's id is written into its first two tokens
_LOW_BITS = 31
_LOW_MASK = 2**_LOW_BITS - 1
_TAIL_MARK = 2**30  # above the high half of every block id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    session: str
    prompt_tokens: int
    output_tokens: int
    blocks: BlockIds  # covers the prompt up to a tail; the last block may reach past the prompt's end


class Trace(Protocol):
    """Requests in the order of their arrival; can be read more than once."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int: ...

    def __iter__(self) -> Iterator[TraceRequest]: ...


def prompt_of(request: TraceRequest, block_tokens: int, *, number: int, whole_blocks: bool = False) -> npt.NDArray[np.int32]:
    """Tokens that two requests share exactly where they share blocks; `number` makes this request's tail its own.

    With `whole_blocks` the last block counts as full, and a token follows it, so that all blocks can be reused.
    """
    count = len(request.blocks)
    length = count * block_tokens + 1 if whole_blocks else request.prompt_tokens
    tokens_BT = np.zeros((-(-length // block_tokens), block_tokens), np.int32)  # B blocks, T tokens of each
    tokens_BT[:count, 0] = request.blocks & _LOW_MASK
    tokens_BT[:count, 1] = request.blocks >> _LOW_BITS
    tokens_BT[count:, 0] = number & _LOW_MASK
    tokens_BT[count:, 1] = _TAIL_MARK
    return tokens_BT.reshape(-1)[:length]


def runs_of(blocks: BlockIds) -> list[list[int]]:
    """Block ids as `[first id, count]` runs of consecutive ids."""
    if not len(blocks):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(blocks) != 1) + 1])
    counts = np.diff(np.concatenate([starts, [len(blocks)]]))
    return [[int(blocks[start]), int(count)] for start, count in zip(starts, counts, strict=True)]
