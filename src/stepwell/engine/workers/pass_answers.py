"""The answers of all ranks to one pass. Never blocks."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.engine.workers.messages import BROKE
from stepwell.jobs.channel import Message


class PassAnswers:
    """Holds one pass at a time, by number. `open` from when it is sent until every rank has answered."""

    __slots__ = ("_answers", "_size", "number", "open")

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: dict[int, Message] = {}
        self.number = 0  # of the latest pass
        self.open = False

    def begin(self) -> None:
        """Opens the next pass, which is being sent now."""
        self._answers, self.open = {}, True

    def drop(self) -> None:
        """Closes the pass without answers: it was not sent, or its ranks have ended."""
        self._answers, self.open = {}, False

    def add(self, rank: int, message: Message) -> None:
        """Raises ValueError for an answer to any other pass."""
        number, _ = message.counts(2)  # the second is the number of collective calls
        if number != self.number or not self.open or rank in self._answers:
            raise ValueError(f"an answer to pass {number} during pass {self.number}")
        self._answers[rank] = message
        self.open = len(self._answers) < self._size

    def of(self, rank: int) -> Message:
        return self._answers[rank]

    @property
    def first_missing(self) -> int:
        return next(rank for rank in range(self._size) if rank not in self._answers)

    @property
    def broke(self) -> Sequence[int]:
        """Ranks on which the pass failed."""
        return [rank for rank, each in sorted(self._answers.items()) if each.kind == BROKE]

    @property
    def in_step(self) -> bool:
        """Whether all ranks called the same number of collectives: only then can they run the next pass."""
        return len({each.numbers[1] for each in self._answers.values()}) == 1
