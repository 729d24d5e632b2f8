"""Whether the end of a prefix is computed while the rest of it is loaded. Pure: sizes, times and speeds are handed in.

    prefix    |===== loaded =====|~~ computed ~~|  new tokens     computing begins at once, and waits for each layer's rows
    without   |===== loaded ====================|  new tokens

By speeds that were measured, so that nothing is computed twice before they are known.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT_OF_PEAK = 0.98  # how much of the best speed so far the next measurement leaves
LEAST_LOAD_BYTES = 8 * 2**20  # smaller loads say more about starting one than about the bus
LEAST_CHUNK_TOKENS = 64  # nor do a few tokens say how fast many are computed
WORTH_IT = 0.9  # of the time without: what is sooner by less is not worth computing twice


class PeakSpeed:
    """The best amount per second of late; None before the first measurement.

    A load that waits for the device, or for another load, takes longer than its bytes need: the best one says what the bus does.
    """

    def __init__(self) -> None:
        self.per_s: float | None = None

    def measure(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self.per_s = max(amount / seconds, KEPT_OF_PEAK * (self.per_s or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Loading beside computing, for one request. `overlap`: its passes begin while pages arrive."""

    bytes_per_s: float
    tokens_per_s: float
    overlap: bool

    def first_token_s(self, *, load_bytes: float, compute_tokens: float) -> float:
        load_s, compute_s = load_bytes / self.bytes_per_s, compute_tokens / self.tokens_per_s
        return max(load_s, compute_s) if self.overlap else load_s + compute_s

    def tokens_to_compute(self, *, load_bytes: float, load_tokens: int, new_tokens: int) -> int:
        """Of `load_tokens` that could be loaded, how many of the last are better computed: until both take as long."""
        load_s, new_s = load_bytes / self.bytes_per_s, new_tokens / self.tokens_per_s
        load_each_s, compute_each_s = load_s / max(load_tokens, 1), 1 / self.tokens_per_s
        if not self.overlap:
            return load_tokens if compute_each_s < load_each_s else 0
        return min(max(int((load_s - new_s) / (load_each_s + compute_each_s)), 0), load_tokens)
