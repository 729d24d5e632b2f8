"""Every error a caller of Stepwell can meet. A miss is not an error, and is not here.

`StepwellError` catches them all. Our own bugs are asserts, not members of this tree.
"""

from __future__ import annotations


class StepwellError(Exception):
    """The root of everything Stepwell raises on purpose."""


class ConfigError(StepwellError):
    """A setting that cannot work; the message says what would."""


class SpecError(ConfigError):
    """A description of a model's memory that contradicts itself or is not known."""


class BadTokens(StepwellError):
    """A prompt that is not a one-dimensional sequence of valid token ids."""


class LeaseError(StepwellError):
    """A lease used after it was given back, twice, or against its order of calls."""


class LoadFailed(LeaseError):
    """Bytes that a lease needed did not arrive: release it and look the prompt up again, which will miss honestly."""


class WrongThread(StepwellError):
    """A cache was called from a second thread. It belongs to one at a time: see `Cache.hand_over`."""


class NoRoom(StepwellError):
    """A tier cannot hold what was asked for now; nothing was handed out.

    `waiting` is true when room is on its way (a write-back is running): call `step()` and try again.
    """

    def __init__(self, message: str, *, waiting: bool = False) -> None:
        super().__init__(message)
        self.waiting = waiting


class StoreError(StepwellError):
    """A store that cannot be opened, reached or used as a whole. A value it lacks is a miss, not this."""
