"""The history of each path of a trace: how deep it was seen and ever cached, and where checkpoints were left.

    blocks      | 7 | 8 | 31 | 32 |      equal ids have equal history, so one id identifies the whole path to it
    seen        ==================       by any earlier request
    cached      ==========               committed at any time, evicted or not
    checkpoints     o   o                made at any time, evicted or not

Never evicts, and never asks the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepwell.sim.trace import TraceRequest


class Reach:
    """How deep paths are known. A path is as deep as the deepest one that it shares blocks with."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._whole: set[int] = set()
        self._part: dict[int, int] = {}  # tokens of blocks that were seen in part only

    def of(self, request: TraceRequest) -> int:
        """Tokens of the prompt that some earlier path had."""
        blocks, size = request.blocks, self._block_tokens
        low, high = 0, len(blocks)
        while low < high:  # bisection: no block is whole after one that is not
            middle = (low + high) // 2
            if int(blocks[middle]) in self._whole:
                low = middle + 1
            else:
                high = middle
        part = self._part.get(int(blocks[low]), 0) if low < len(blocks) else 0
        return min(low * size + part, request.prompt_tokens)

    def add(self, request: TraceRequest, tokens: int) -> None:
        """Adds the first `tokens` of the prompt."""
        whole, part = divmod(min(tokens, request.prompt_tokens), self._block_tokens)
        self._whole.update(request.blocks[self.of(request) // self._block_tokens : whole].tolist())
        if part and whole < len(request.blocks):
            block = int(request.blocks[whole])
            self._part[block] = max(part, self._part.get(block, 0))


class Past:
    """The history of a replay, by path."""

    def __init__(self, block_tokens: int) -> None:
        self.seen = Reach(block_tokens)
        self.cached = Reach(block_tokens)
        self._block_tokens = block_tokens
        self._made: dict[int, list[int]] = {}  # boundaries in tokens, by the block that their last token is in

    def add_checkpoint(self, request: TraceRequest, boundary: int) -> None:
        """One was made at `boundary`. One within a request's own tail can serve no other request and is skipped."""
        at = (boundary - 1) // self._block_tokens
        if at < len(request.blocks):
            made = self._made.setdefault(int(request.blocks[at]), [])
            if boundary not in made:
                made.append(boundary)

    def checkpoints(self, request: TraceRequest, upto: int) -> Iterator[int]:
        """The boundaries of the prompt, up to `upto`, at which one was ever made."""
        for block in request.blocks[: -(-upto // self._block_tokens)].tolist():
            for boundary in self._made.get(block, ()):
                if boundary <= upto:
                    yield boundary
