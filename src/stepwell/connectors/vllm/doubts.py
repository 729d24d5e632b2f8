"""Whether weights are known: after a reset they may be others, until every worker has said which it holds. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from stepwell.connectors.vllm.orders import WeightsAnswer


class Held(Enum):
    """Which weights the workers hold."""

    FIRST = "those of the start"
    OTHER = "others, with a digest"
    UNKNOWN = "they could not be read"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    held: Held
    digest: str = ""


@dataclass(slots=True)
class WeightDoubts:
    """One thread, the scheduler's."""

    open: bool = False
    wanted: bool = False  # a request waits for the answer
    _number: int = 0
    _is_asked: bool = False
    _answers: dict[int, str | None] = field(default_factory=dict)

    def begin(self) -> None:
        """What was asked before this does not count: weights may have changed since."""
        self.open, self.wanted, self._is_asked, self._answers = True, False, False, {}
        self._number += 1

    def question(self) -> int:
        if not self.wanted or self._is_asked:
            return 0
        self._is_asked = True
        return self._number

    def answered(self, answers: Mapping[int, WeightsAnswer], num_ranks: int) -> Weights | None:
        """The answer, when the last rank has given its own."""
        self._answers |= {rank: name for rank, (number, name) in answers.items() if self.open and number == self._number}
        if not self.open or len(self._answers) < num_ranks:
            return None
        self.open = self.wanted = False
        names = [self._answers[rank] for rank in sorted(self._answers)]
        if None in names:
            return Weights(held=Held.UNKNOWN)
        if not any(names):
            return Weights(held=Held.FIRST)
        return Weights(held=Held.OTHER, digest=blake2b(repr(names).encode(), digest_size=16).hexdigest())
