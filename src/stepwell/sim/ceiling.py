"""How much of each prompt endless memory would save: what any earlier request had of it, in whole boundaries."""

from __future__ import annotations

from stepwell.base.spec import ModelSpec
from stepwell.sim.trace import BlockIds, TraceRequest


class Ceiling:
    """Remembers every block that has come by. Equal ids have equal history, so a known block stands on known ones."""

    def __init__(self, spec: ModelSpec, block_tokens: int, *, whole_blocks: bool) -> None:
        self._spec = spec
        self._block_tokens = block_tokens
        self._whole_blocks = whole_blocks
        self._seen: set[int] = set()

    def reusable(self, request: TraceRequest) -> int:
        """Tokens of the prompt that earlier ones had; then remembers this one too."""
        known = self._known(request.blocks)
        self._seen.update(request.blocks[known:].tolist())
        tokens = min(known * self._block_tokens, request.prompt_tokens)
        return tokens if self._whole_blocks else min(self._spec.floor(tokens), self._spec.usable(request.prompt_tokens))

    def _known(self, blocks: BlockIds) -> int:
        """How many leading blocks were seen before, by halving: no block is known after one that is not."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if int(blocks[middle]) in self._seen:
                low = middle + 1
            else:
                high = middle
        return low
