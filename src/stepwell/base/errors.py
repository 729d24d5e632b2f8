"""All errors that callers of Stepwell can get. A miss is not an error.

`StepwellError` catches them all. Bugs in Stepwell fail assertions instead.
"""

from __future__ import annotations


class StepwellError(Exception):
    """The base class of all errors that Stepwell raises on purpose."""


class ConfigError(StepwellError):
    """A setting that cannot work; the message says what can."""


class SpecError(ConfigError):
    """A description of a model's memory that is unknown or contradicts itself."""


class BadTokens(StepwellError):
    """A prompt that is not a one-dimensional sequence of valid token ids."""


class LeaseError(StepwellError):
    """A lease was used after its release, released twice, or used with calls in the wrong order."""


class LoadFailed(LeaseError):
    """Bytes that a lease needed did not arrive: release it and look the prompt up again, which then misses them."""


class WrongThread(StepwellError):
    """A cache was called from a second thread. It belongs to one thread at a time: see `Cache.hand_over`."""


class NoRoom(StepwellError):
    """A tier has no memory for a request now; nothing was allocated.

    `waiting` is true if memory will be freed soon (a write-back is running): call `step()` and try again.
    """

    def __init__(self, message: str, *, waiting: bool = False) -> None:
        super().__init__(message)
        self.waiting = waiting


class StoreError(StepwellError):
    """A store cannot be opened, reached or used as a whole. A missing value is a miss, not an error."""
