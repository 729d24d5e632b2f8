"""Types that several modules share: tiers, kinds of object, and numbered handles."""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

LeaseId = NewType("LeaseId", int)
JobId = NewType("JobId", int)


class Tier(IntEnum):
    """A memory that cached objects can be in, nearest to the model first."""

    DEVICE = 0
    HOST = 1
    ENGINE = 2  # an engine's own memory: a source and target of copies, but not a cache tier
    STORE = 3  # below all memory: values by key, not pages by id

    @property
    def label(self) -> str:
        return self.name.lower()


class Kind(IntEnum):
    """A kind of object: contiguous bytes of a fixed size, the same in every tier unless rows may spill or checkpoints are
    narrow.
    """

    PREFIX = 0  # all Prefix states of one page of tokens
    WINDOW = 1  # all Window states of one window page of tokens
    POINT = 2  # all Point states at one boundary
    ROWS = 3  # only on the device: the rows of a prefix page, if they may spill to the host (`spec/spill.py`)

    @property
    def label(self) -> str:
        return self.name.lower()


class Level(IntEnum):
    """What a stored value is worth, as far as its writer knows. A full store evicts the lowest level first."""

    EXPENDABLE = 0  # memory has it too, or another value serves in its place
    NORMAL = 1
    VALUABLE = 2  # a request or an operator marked it as important


CACHED_TIERS = (Tier.DEVICE, Tier.HOST)
CACHED_KINDS = (Kind.PREFIX, Kind.WINDOW, Kind.POINT)  # what hosts and stores hold
