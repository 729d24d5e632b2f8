"""Changes of logits before a token is chosen: biases, penalties, forbidden tokens.

    bias, repetition, frequency and presence, forbidden, allowed, min-p        in this order, as vLLM has it

Every sum is of one row and one token, so a row gets the same result in every batch. Forbidden tokens get a very low but finite
logit: a row that holds something other than numbers comes from a broken model, and stays recognisable. The host never waits.
Plain torch.

Axes: B rows, V tokens of the vocabulary, E rows that are edited, N places in them, W words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from stepwell.engine.passes.numbers import Send, copy, on_device

FORBIDDEN = -3.0e38
WORD_BITS = 32
EDITED_TOGETHER = 2**22  # logits: the memory of edits, apart from one copy, does not grow with the batch

Ids = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.float64]

NO_IDS: Ids = np.empty(0, np.int32)
NO_NUMBERS: Numbers = np.empty(0, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edit:
    """The changes of one row. Ids occur at most once in each field."""

    biased: Ids = field(default_factory=lambda: NO_IDS)
    biases: Numbers = field(default_factory=lambda: NO_NUMBERS)  # added
    repeated: Ids = field(default_factory=lambda: NO_IDS)
    repetition: float = 1.0  # what a positive logit is divided by, and one below 0 multiplied with
    used: Ids = field(default_factory=lambda: NO_IDS)
    penalties: Numbers = field(default_factory=lambda: NO_NUMBERS)  # subtracted
    forbidden: Ids = field(default_factory=lambda: NO_IDS)
    allowed: Ids = field(default_factory=lambda: NO_IDS)  # a bit for each token, the lowest first; empty where all are
    within: float | None = None  # of the highest logit; what lies further below may not come


def words_for(vocab: int) -> int:
    """The number of words of `Edit.allowed`."""
    return -(-vocab // WORD_BITS)


def edited(logits_BV: torch.Tensor, edits: Sequence[Edit | None], send: Send = copy) -> torch.Tensor:
    """Logits (fp32) with the edits made; those that were given stay as they are. `send` is `Kernels.send`."""
    rows = [row for row, edit in enumerate(edits) if edit is not None]
    if not rows:
        return logits_BV
    edited_BV = logits_BV.clone()
    together = max(EDITED_TOGETHER // logits_BV.shape[1], 1)
    for start in range(0, len(rows), together):
        some = rows[start : start + together]
        row_E = on_device(some, logits_BV.device, send)
        made = [edit for row in some if (edit := edits[row]) is not None]
        edited_BV.index_copy_(0, row_E, _edited(logits_BV[row_E], made, send))
    return edited_BV


def _edited(logits_EV: torch.Tensor, edits: Sequence[Edit], send: Send) -> torch.Tensor:
    """In place."""
    put = partial(_put, logits_EV, send=send)
    put([(e.biased, e.biases) for e in edits], lambda logit_N, bias_N: logit_N + bias_N)
    put([(e.repeated, np.full(len(e.repeated), e.repetition)) for e in edits], _repeated)
    put([(e.used, e.penalties) for e in edits], lambda logit_N, penalty_N: logit_N - penalty_N)
    put([(e.forbidden, np.full(len(e.forbidden), FORBIDDEN)) for e in edits], _if_finite)
    _forbid_others(logits_EV, edits, send)
    _forbid_unlikely(logits_EV, edits, send)
    return logits_EV


Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _put(logits_EV: torch.Tensor, places: Sequence[tuple[Ids, Numbers]], change: Change, *, send: Send) -> None:
    counts = [len(ids) for ids, _ in places]
    if not sum(counts):
        return
    row_N = on_device(np.repeat(np.arange(len(places)), counts), logits_EV.device, send)
    id_N = on_device(np.concatenate([ids for ids, _ in places]).astype(np.int64), logits_EV.device, send)
    value_N = on_device(np.concatenate([values for _, values in places]).astype(np.float32), logits_EV.device, send)
    logits_EV[row_N, id_N] = change(logits_EV[row_N, id_N], value_N)


def _repeated(logit_N: torch.Tensor, penalty_N: torch.Tensor) -> torch.Tensor:
    return torch.where(logit_N > 0, logit_N / penalty_N, logit_N * penalty_N)


def _if_finite(logit_N: torch.Tensor, value_N: torch.Tensor) -> torch.Tensor:
    return torch.where(logit_N.isfinite(), value_N, logit_N)


def _forbid_others(logits_EV: torch.Tensor, edits: Sequence[Edit], send: Send) -> None:
    rows = [row for row, edit in enumerate(edits) if len(edit.allowed)]
    if not rows:
        return
    vocab, device = logits_EV.shape[1], logits_EV.device
    words_EW = on_device(np.stack([edits[row].allowed for row in rows]), device, send)
    bit_EWb = (words_EW[:, :, None] >> torch.arange(WORD_BITS, device=device, dtype=torch.int32)) & 1
    allowed_EV = bit_EWb.flatten(1)[:, :vocab].bool()
    row_E = on_device(rows, device, send)
    kept_EV = logits_EV[row_E]
    logits_EV[row_E] = kept_EV.where(allowed_EV | ~kept_EV.isfinite(), FORBIDDEN)


def _forbid_unlikely(logits_EV: torch.Tensor, edits: Sequence[Edit], send: Send) -> None:
    rows = [row for row, edit in enumerate(edits) if edit.within is not None]
    if not rows:
        return
    row_E = on_device(rows, logits_EV.device, send)
    within_E1 = on_device(np.array([edits[row].within for row in rows], np.float32), logits_EV.device, send)[:, None]
    kept_EV = logits_EV[row_E]
    low_EV = kept_EV < kept_EV.amax(dim=-1, keepdim=True) - within_E1
    logits_EV[row_E] = kept_EV.where(~low_EV | ~kept_EV.isfinite(), FORBIDDEN)
