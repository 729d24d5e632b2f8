"""Which hot slot is given to another row first: the one in the highest of 256 bins, the earliest slot of those in one bin.

    bin 0      used in this pass: never given away
    bin 255    empty: first
    between    by the score its row has now: the lowest score is in the highest bin

Pure. Axes: H slots of a request.
"""

from __future__ import annotations

import torch

BINS = 256
IN_USE, EMPTY, LAST = 0, 255, 254
LARGEST = 3e38  # finite in fp32


def score_bins(key_H: torch.Tensor, stamp_H: torch.Tensor, now: torch.Tensor, score_H: torch.Tensor) -> torch.Tensor:
    """Equal steps between the lowest and the highest score of slots that are not in use. -inf goes first, inf last."""
    idle_H = (key_H >= 0) & (stamp_H < now)
    known_H = idle_H & score_H.isfinite()
    high = score_H.masked_fill(~known_H, -torch.inf).amax()
    low = score_H.masked_fill(~known_H, torch.inf).amin()
    span = (high - low).clamp(max=LARGEST)
    step = torch.where(high > low, torch.full_like(span, LAST - 1) / span, 0.0).clamp(max=LARGEST)  # rounded once, as kernels do
    below_H = torch.where(known_H, (high - score_H).clamp(max=LARGEST), 0.0)
    bin_H = 1 + (below_H * step).clamp(max=LAST - 1).to(torch.int32)
    bin_H = bin_H.masked_fill(score_H == -torch.inf, LAST)
    return bin_H.masked_fill(~idle_H, IN_USE).masked_fill(key_H < 0, EMPTY)
