"""Why tokens of a prompt were computed: the reasons, and counts of them that add up. Pure.

    tokens   0 ... resumed ... restorable ... anchored ... present ... cached ... reusable ... seen ... prompt
                      |  unused    |  checkpoint  |     no     |  evicted  |  never  | alignment | first |
                      |            |   evicted    | checkpoint |   prefix  | stored  |           |  use  |

Each depth is at least the one before it, so that every computed token has exactly one reason: the first thing it lacked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from itertools import pairwise


class Reason(Enum):
    """What a computed token lacked first."""

    UNUSED = "unused"
    CHECKPOINT_EVICTED = "checkpoint evicted"
    NO_CHECKPOINT = "no checkpoint"
    EVICTED_PREFIX = "evicted prefix"
    NEVER_STORED = "never stored"
    ALIGNMENT = "alignment"
    FIRST_USE = "first use"


MEANING: Mapping[Reason, str] = {
    Reason.UNUSED: "it could have been resumed, but was not: slower to fetch than to compute, or no free memory to load it into",
    Reason.CHECKPOINT_EVICTED: "its pages are there, and so was a checkpoint to resume from, once",
    Reason.NO_CHECKPOINT: "its pages are there, but a checkpoint that deep was never made",
    Reason.EVICTED_PREFIX: "its pages were cached once, and are in no tier now",
    Reason.NEVER_STORED: "seen before, but the cache could not take it: its request did not fit the device",
    Reason.ALIGNMENT: "seen before, but past the last boundary: part of a page, or the token that is always computed",
    Reason.FIRST_USE: "no earlier prompt of the trace had it",
}

ADVICE: Mapping[Reason, str] = {
    Reason.UNUSED: "a faster store helps, or a larger device or host to bring it into",
    Reason.CHECKPOINT_EVICTED: "more memory helps, or a policy that keeps other checkpoints",
    Reason.NO_CHECKPOINT: "another placement helps: see --policy; hints from the caller do too",
    Reason.EVICTED_PREFIX: "more memory helps, or a larger store below it",
    Reason.NEVER_STORED: "a larger device helps",
    Reason.ALIGNMENT: "smaller pages help a little",
    Reason.FIRST_USE: "nothing helps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """How deep into one prompt each condition of resuming held when its request came, in tokens."""

    resumed: int  # where its request began to compute
    restorable: int  # pages and checkpoint were in some tier
    anchored: int  # pages were in some tier, and a checkpoint had been made at some time, or needs none
    present: int  # pages were in some tier
    cached: int  # pages had been cached at some time
    reusable: int  # with endless memory, and a checkpoint wherever one is wanted
    seen: int  # earlier prompts had it
    prompt: int

    def reasons(self) -> Mapping[Reason, int]:
        """Tokens by what they lacked; they add up to what was computed."""
        depths = [getattr(self, field.name) for field in fields(self)]
        counts = [after - before for before, after in pairwise(depths)]
        assert min(counts) >= 0, f"{self} is not in order"
        return dict(zip(Reason, counts, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why one group of requests computed what it did: a whole trace, or one session of it."""

    requests: int
    prompt_tokens: int
    computed_tokens: int
    tokens: Mapping[Reason, int]

    def __post_init__(self) -> None:
        assert sum(self.tokens.values()) == self.computed_tokens, f"{self.tokens} do not add up to {self.computed_tokens}"

    @property
    def again_tokens(self) -> int:
        """Computed although seen before."""
        return self.computed_tokens - self.tokens[Reason.FIRST_USE]

    def as_json(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "computed_again_tokens": self.again_tokens,
            "reasons": {reason.name.lower(): self.tokens[reason] for reason in Reason},
        }


class ReasonCounts:
    """Tokens by reason, and requests, of one group of them: adds them up to a verdict."""

    def __init__(self) -> None:
        self._tokens: Counter[Reason] = Counter()
        self._requests = self._prompt_tokens = self._computed_tokens = 0

    def add(self, reasons: Mapping[Reason, int], *, prompt_tokens: int, computed_tokens: int) -> None:
        self._tokens.update(reasons)
        self._requests += 1
        self._prompt_tokens += prompt_tokens
        self._computed_tokens += computed_tokens

    def verdict(self) -> Verdict:
        return Verdict(
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._computed_tokens,
            tokens={reason: self._tokens[reason] for reason in Reason},
        )
