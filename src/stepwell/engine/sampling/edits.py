"""The changes that a request's settings make to the logits of its next token. `ops/editing.py` applies them.

Biases, `min_p` and `min_tokens` are known before the token before is: such requests may have passes in flight.
Penalties and grammars are not. Their state follows from a request's tokens alone, and is computed again where it is missing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from stepwell.engine.ops.editing import NO_IDS, NO_NUMBERS, WORD_BITS, Edit, Ids, Numbers
from stepwell.engine.requests.guided import OffGrammar
from stepwell.engine.requests.request import Request, Sampling
from stepwell.engine.requests.seen import Seen

log = logging.getLogger(__name__)

OFF_GRAMMAR = "the grammar became too complex to follow in the middle of the answer; simplify it"


def edit_of(request: Request, guesses: Sequence[int] = (), *, unread: int = 0) -> Edit | None:
    """The changes of the logits after a request's tokens and `guesses`, or after `unread` tokens in flight. None: no change."""
    assert not (unread and request.needs_tokens), f"{request} was computed ahead of a token that it needs"
    if not request.edits:
        return None
    sampling = request.submitted.sampling
    early = request.answer_tokens + len(guesses) + unread < sampling.min_tokens
    if not (early or sampling.edits or request.submitted.guide is not None):
        return None
    used, penalties = _penalties(request, sampling, guesses)
    ends = np.array(sorted(request.ends_on), np.int32) if early else NO_IDS
    allowed = _allowed(request, guesses, ends)
    return Edit(
        biased=np.array([token for token, _ in sampling.logit_bias], np.int32),
        biases=np.array([bias for _, bias in sampling.logit_bias], np.float64),
        repeated=_seen(request).distinct(guesses) if sampling.repetition_penalty != 1 else NO_IDS,
        repetition=sampling.repetition_penalty,
        used=used,
        penalties=penalties,
        forbidden=NO_IDS if len(allowed) else ends,
        allowed=allowed,
        within=-math.log(sampling.min_p) * sampling.temperature if sampling.min_p and sampling.temperature else None,
    )


def _penalties(request: Request, sampling: Sampling, guesses: Sequence[int]) -> tuple[Ids, Numbers]:
    if not (sampling.frequency_penalty or sampling.presence_penalty):
        return NO_IDS, NO_NUMBERS
    counts = _seen(request).answered(guesses)
    used = np.fromiter(counts.keys(), np.int32, len(counts))
    times = np.fromiter(counts.values(), np.float64, len(counts))
    return used, times * sampling.frequency_penalty + sampling.presence_penalty


def _allowed(request: Request, guesses: Sequence[int], ends: Ids) -> Ids:
    """The tokens that a request's grammar allows, without `ends` unless these are all. Empty without a grammar."""
    if request.submitted.guide is None:
        return NO_IDS
    if request.following is None:
        request.following = request.submitted.guide.follow()
    try:
        words = request.following.allowed(request.tokens[request.prompt_tokens :], guesses)
    except OffGrammar as error:  # of this request alone: the others of its pass go on
        log.warning("request %d: %s", request.id, error)
        request.broken = OFF_GRAMMAR
        return NO_IDS
    without = words.copy()
    np.bitwise_and.at(without, ends // WORD_BITS, ~np.left_shift(np.int32(1), ends % WORD_BITS, dtype=np.int32))
    return without if without.any() else words


def _seen(request: Request) -> Seen:
    if request.seen is None:
        request.seen = Seen(request.tokens, request.prompt_tokens)
    return request.seen
