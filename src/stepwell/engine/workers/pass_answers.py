"""What ranks have answered to one pass, and what that comes to. Waits for nobody."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.engine.workers.messages import BROKE
from stepwell.jobs.channel import Message


class PassAnswers:
    """Of one pass after the other, by number. `open` from when one is given out until every rank has answered it."""

    __slots__ = ("_answers", "_size", "number", "open")

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: dict[int, Message] = {}
        self.number = 0  # of the last pass
        self.open = False

    def begin(self) -> None:
        """The last pass is given out now."""
        self._answers, self.open = {}, True

    def drop(self) -> None:
        """Nobody will answer it: it was not given out, or to ranks that are no more."""
        self._answers, self.open = {}, False

    def add(self, rank: int, message: Message) -> None:
        """Raises ValueError for an answer to something else."""
        number, _ = message.counts(2)  # and calls of collectives
        if number != self.number or not self.open or rank in self._answers:
            raise ValueError(f"what came of pass {number}, and it is at {self.number}")
        self._answers[rank] = message
        self.open = len(self._answers) < self._size

    def of(self, rank: int) -> Message:
        return self._answers[rank]

    @property
    def first_missing(self) -> int:
        return next(rank for rank in range(self._size) if rank not in self._answers)

    @property
    def broke(self) -> Sequence[int]:
        """Ranks on which it failed."""
        return [rank for rank, each in sorted(self._answers.items()) if each.kind == BROKE]

    @property
    def in_step(self) -> bool:
        """Whether all called equally many collectives: then they can go on with the next pass."""
        return len({each.numbers[1] for each in self._answers.values()}) == 1
