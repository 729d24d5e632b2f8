"""The tokens that a request has so far, for penalties. Knows no request."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Seen:
    """The distinct tokens of a request, and their counts in its answer. Reads a list that only grows."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        self._tokens = tokens
        self._prompt_tokens = prompt_tokens
        self._read = 0
        self._known: set[int] = set()
        self._ids = array("i")  # each once, as they came
        self._answered: Counter[int] = Counter()

    def distinct(self, guesses: Sequence[int]) -> npt.NDArray[np.int32]:
        """Tokens of prompt, answer and guesses, each once."""
        self._catch_up()
        more = [each for each in dict.fromkeys(guesses) if each not in self._known]
        return np.concatenate([np.frombuffer(self._ids, np.int32), np.array(more, np.int32)])

    def answered(self, guesses: Sequence[int]) -> Counter[int]:
        self._catch_up()
        return self._answered + Counter(guesses) if guesses else self._answered

    def _catch_up(self) -> None:
        new = self._tokens[self._read :]
        more = [token for token in dict.fromkeys(new) if token not in self._known]  # prompts may be long: not token by token
        self._known.update(more)
        self._ids.extend(more)
        self._answered.update(self._tokens[max(self._read, self._prompt_tokens) :])
        self._read += len(new)
