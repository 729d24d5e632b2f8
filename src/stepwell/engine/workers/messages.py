"""The messages between the scheduler's process and its workers. They carry page ids and numbers, never bytes of pages.

    scheduler    setup, memory          what to load, and how much memory for device pages
                 run, copy              a pass, a plan of copies
    worker       loaded, ready          replies to the first two
                 chosen, copied         replies to the others; only rank 0 sends tokens. Each carries the number of the
                                        pass and of the collectives called so far: ranks whose numbers differ are out of step
                 broke                  a pass failed; the rank can continue if all are in step
                 failed                 the rank cannot continue, and exits

Messages are checked as they are read: counts add up, page ids are within their memory. Otherwise ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from stepwell.base.ids import CACHED_KINDS, JobId, Kind, Tier
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.engine.ops.drawing import NAN_LOGITS
from stepwell.engine.requests.request import TokenLogprob
from stepwell.engine.sampling.choices import Chosen
from stepwell.engine.workers.pass_arrays import Counts, must_be_below
from stepwell.jobs.channel import Array, Message

SETUP, MEMORY, COPY = "setup", "memory", "copy"  # and RUN
LOADED, READY, CHOSEN, BROKE, COPIED, FAILED = "loaded", "ready", "chosen", "broke", "copied", "failed"

# ---- what was chosen ----------------------------------------------------------------------------


class SampledTokens(Protocol):
    """What was chosen from rows of logits, such as the `Choices` of a model."""

    @property
    def tokens(self) -> Sequence[int]:
        """NAN_LOGITS for a row with NaN logits."""
        ...

    @property
    def tokens_alone(self) -> bool:
        """Whether the tokens are all there is to send."""
        ...

    def of(self, row: int) -> Chosen | None: ...


class ChosenTokens:
    """The same as read from a message; logprobs by row if any were requested."""

    def __init__(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None = None) -> None:
        self.tokens = tokens
        self._logprobs = logprobs

    @property
    def tokens_alone(self) -> bool:
        return self._logprobs is None

    def of(self, row: int) -> Chosen | None:
        """None for a row with NaN logits: nothing can be chosen from it."""
        token = self.tokens[row]
        if token == NAN_LOGITS:
            return None
        return Chosen(token) if self._logprobs is None else Chosen(token, self._logprobs[row])


def pack_chosen(choices: SampledTokens) -> list[Array]:
    """Each array has one entry per row of logits, except the alternatives."""
    if choices.tokens_alone:
        return [np.array(choices.tokens, np.int32)]
    chosen = [choices.of(row) for row in range(len(choices.tokens))]
    found = [None if each is None else each.logprob for each in chosen]
    tops = [() if each is None else each.top for each in found]
    return [
        np.array([NAN_LOGITS if each is None else each.token for each in chosen], np.int32),
        np.array([float("nan") if each is None else each.logprob for each in found], np.float64),
        np.array([0 if each is None else each.rank for each in found], np.int32),
        np.array([len(top) for top in tops], np.int32),
        np.array([token for top in tops for token, _ in top], np.int32),
        np.array([value for top in tops for _, value in top], np.float64),
    ]


def read_chosen(message: Message, *, vocab_size: int) -> ChosenTokens:
    """With logprobs if any request wants them."""
    arrays, kinds = message.arrays, [each.dtype.str for each in message.arrays]
    if kinds not in (["<i4"], ["<i4", "<f8", "<i4", "<i4", "<i4", "<f8"]):
        raise ValueError(f"an answer with arrays of unexpected dtypes: {kinds}")
    tokens = arrays[0].tolist()
    if tokens and not NAN_LOGITS <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"tokens outside the vocabulary of {vocab_size}: {tokens[:8]}")
    return ChosenTokens(tokens, None if len(arrays) == 1 else _logprobs(tokens, arrays[1:], vocab_size))


def _logprobs(tokens: Sequence[int], arrays: Sequence[Array], vocab_size: int) -> list[TokenLogprob | None]:
    must_be_below(arrays[1], vocab_size + 1, "ranks of tokens")
    must_be_below(arrays[2], vocab_size + 1, "alternatives")
    must_be_below(arrays[3], vocab_size, "tokens")
    values, ranks, counts, top_tokens, top_values = (each.tolist() for each in arrays)
    lengths_agree = len(tokens) == len(values) == len(ranks) == len(counts)
    if not lengths_agree or sum(counts) != len(top_tokens) or len(top_tokens) != len(top_values):
        raise ValueError("an answer whose parts are not of equal length")
    found: list[TokenLogprob | None] = []
    start = 0
    for token, value, rank, count in zip(tokens, values, ranks, counts, strict=True):
        top = tuple(zip(top_tokens[start : start + count], top_values[start : start + count], strict=True))
        is_sent = value == value  # NaN where no logprob was requested
        found.append(TokenLogprob(token=token, logprob=value, rank=rank, top=top) if is_sent else None)
        start += count
    return found


def read_kernels(message: Message, name: str) -> dict[str, str]:
    """Strings by operation name. Empty if the message has no such field."""
    given = message.fields.get(name, {})
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise ValueError(f"{message.kind}.{name} must map operation names to strings")
    return given


# ---- copies -------------------------------------------------------------------------------------


def pack_plan(plan: Plan) -> Message:
    sides = [[copy.source.tier.value, copy.target.tier.value, copy.source.kind.value] for copy in plan.copies]
    return Message(
        kind=COPY,
        fields={"job": int(plan.job), "purpose": plan.purpose.value, "awaited": plan.awaited, "copies": sides},
        arrays=[span.ids.astype(np.int32, copy=False) for copy in plan.copies for span in (copy.source, copy.target)],
    )


def read_plan(message: Message, *, pages: Mapping[Tier, Counts]) -> Plan:
    sides = message.fields.get("copies")
    if not isinstance(sides, list) or len(message.arrays) != 2 * len(sides):
        raise ValueError("a copy plan whose arrays are not of equal length")
    copies = []
    for at, side in enumerate(sides):
        match side:
            case [int(source), int(target), int(kind)]:
                spans = [
                    _span(Tier(tier), Kind(kind), ids, pages)
                    for tier, ids in zip((source, target), message.arrays[2 * at : 2 * at + 2], strict=True)
                ]
            case _:
                raise ValueError(f"a copy between {side!r:.80}")
        if len(spans[0].ids) != len(spans[1].ids) or {Tier.HOST} == {span.tier for span in spans}:
            raise ValueError("a copy that ranks cannot run")
        copies.append(Copy(source=spans[0], target=spans[1]))
    awaited = message.fields.get("awaited")
    return Plan(
        job=JobId(message.number("job")), purpose=Purpose(message.text("purpose")), copies=tuple(copies), awaited=awaited is True
    )


def _span(tier: Tier, kind: Kind, ids: Array, pages: Mapping[Tier, Counts]) -> Span:
    if tier not in pages or kind not in CACHED_KINDS:
        raise ValueError(f"a copy of {kind.label} pages of a tier that the rank does not have")
    must_be_below(ids, pages[tier].get(kind, 0), f"{kind.label} pages")
    return Span(tier=tier, kind=kind, ids=ids)
