"""How many segments fit a budget, next to everything else in the directory. Arithmetic only.

    | lock, store.json, sealed, their successors | snapshot | its successor | segment | segment | ... | segment |   <= budget

A snapshot grows with the number of values and spaces, so the number of segments shrinks with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.errors import ConfigError
from stepwell.base.units import format_bytes
from stepwell.store.log.disk.files import BLOCK_BYTES, up_to_block
from stepwell.store.log.format.snapshot import ROW_BYTES

FIXED_BYTES = 64 * 1024  # lock, store.json, sealed, and the blocks a file system keeps for itself
_USUAL_SUPERBLOCK_BYTES = 16 * 1024  # of store.json, counted there; one with many quotas is larger
_LISTED_BYTES = 4 * 24  # of a segment in two slots of `sealed`, and in those of its successor
MIN_SEGMENTS = 4  # one being written, one free to relocate into, and two to choose from
MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES = 64 * 1024, 1 << 34
DEFAULT_SEGMENT_BYTES = 256 << 20
_SPARE_BYTES = 1000 * ROW_BYTES + 16 * 1024  # the next snapshot may be an eighth larger than one made now, and this much


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    total_bytes: int
    segment_bytes: int
    fixed_bytes: int = FIXED_BYTES

    @property
    def max_value_bytes(self) -> int:
        """Half a segment: whatever is relocated into a fresh segment, at most the other half, a value always fits beside it."""
        return self.segment_bytes // 2 // BLOCK_BYTES * BLOCK_BYTES - 2 * BLOCK_BYTES  # its header, and what may be revoked

    @property
    def relocate_bytes(self) -> int:
        """The most that reclaim copies to free one segment."""
        return self.segment_bytes // 2

    def segments(self, snapshot_bytes: int) -> int:
        """How many segments may exist beside such a snapshot and its successor."""
        snapshot = self.slot(snapshot_bytes + snapshot_bytes // 8 + _SPARE_BYTES)
        return (self.total_bytes - self.fixed_bytes - 2 * snapshot) // self._each

    def left_beside(self, num_segments: int, *snapshots: int) -> int:
        """What is left of the budget beside so many segments and snapshots of these sizes; negative when they do not fit."""
        files = num_segments * self._each + sum(map(self.slot, snapshots))
        return self.total_bytes - self.fixed_bytes - files

    @property
    def most_segments(self) -> int:
        """More than ever fit."""
        return max(MIN_SEGMENTS, self.total_bytes // self.segment_bytes)

    @property
    def _each(self) -> int:
        return self.slot(self.segment_bytes) + _LISTED_BYTES

    @staticmethod
    def slot(size: int) -> int:
        """What a file of this size may take up, with what the file system needs to find its pieces."""
        return up_to_block(size) + max(2 * BLOCK_BYTES, up_to_block(size // 1024))


def choose_budget(budget_bytes: int, segment_bytes: int | None, *, superblock_bytes: int = 0) -> Budget:
    """A budget that can work, beside a store.json of this size. Raises ConfigError with the smallest one that would."""
    if segment_bytes is None:
        segment_bytes = max(MIN_SEGMENT_BYTES, min(DEFAULT_SEGMENT_BYTES, budget_bytes // 16 // BLOCK_BYTES * BLOCK_BYTES))
    if segment_bytes % BLOCK_BYTES or not MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
        bounds = f"from {format_bytes(MIN_SEGMENT_BYTES)} to {format_bytes(MAX_SEGMENT_BYTES)}"
        raise ConfigError(f"a segment has a multiple of {BLOCK_BYTES} bytes, {bounds}; got {segment_bytes}")
    larger = max(0, up_to_block(superblock_bytes) - _USUAL_SUPERBLOCK_BYTES)
    fixed_bytes = FIXED_BYTES + 2 * larger  # and its successor
    budget = Budget(total_bytes=budget_bytes, segment_bytes=segment_bytes, fixed_bytes=fixed_bytes)
    if budget.segments(0) < MIN_SEGMENTS:
        least = MIN_SEGMENTS * budget._each + fixed_bytes + 2 * budget.slot(_SPARE_BYTES)
        raise ConfigError(
            f"a budget of {format_bytes(budget_bytes)} is too small for segments of {format_bytes(segment_bytes)}; "
            f"give the log store at least {least} bytes ({format_bytes(least)}), or smaller segments"
        )
    return budget
