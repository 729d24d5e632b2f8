"""Names for the things that cross module edges: tiers, kinds of object, and numbered handles."""

from __future__ import annotations

from enum import IntEnum
from typing import NewType

LeaseId = NewType("LeaseId", int)
JobId = NewType("JobId", int)


class Tier(IntEnum):
    """A memory a cached object can be in, nearest to the model first."""

    DEVICE = 0
    HOST = 1
    ENGINE = 2  # memory of an engine that owns its own: a source and target of copies, never cached in
    STORE = 3  # below all memory: values by key, not pages by id

    @property
    def label(self) -> str:
        return self.name.lower()


class Kind(IntEnum):
    """A kind of object. Each is one contiguous run of bytes of one fixed size, the same in every tier unless rows may spill or
    checkpoints are narrow.
    """

    PREFIX = 0  # all Prefix states of one page of tokens
    WINDOW = 1  # all Window states of one window page of tokens
    POINT = 2  # all Point states at one boundary
    ROWS = 3  # on the device alone: those rows of a prefix page that may also be on the host only (`spec/spill.py`)

    @property
    def label(self) -> str:
        return self.name.lower()


class Level(IntEnum):
    """What a stored value is worth, as far as its writer knows. A store that is full forgets the lowest level first."""

    EXPENDABLE = 0  # memory has it too, or something else serves in its place
    NORMAL = 1
    VALUABLE = 2  # somebody said that it matters


CACHED_TIERS = (Tier.DEVICE, Tier.HOST)
CACHED_KINDS = (Kind.PREFIX, Kind.WINDOW, Kind.POINT)  # what hosts and stores hold
