"""How a store is used: whether it is asked at all, how deep it takes a prompt, and how long a request may wait for it. Pure.

**The breaker** leaves a failing store alone, and tries it again after a while:

    CLOSED --failures in a row--> OPEN --cool-off--> one try --success--> CLOSED
                                    ^------failure, longer cool-off------'

**How deep** is the joint rule over pages and checkpoints:

    pages      |== in memory ==|== in the store ==|  nowhere
    boundary         a             b     c           deepest one with a checkpoint, or that needs none: c

**How long** a request waits is decided by the seconds that computing and fetching are expected to take (`expected.py`):

    fetch >= compute, or computing not measured yet      not at all
    fetch <  compute                                     as long as computing
    fetching not measured yet                            UNMEASURED_SHARE of that

and no longer than the operator's limit. So a store that nothing is known of makes a request a tenth slower at most.

Waits in vain, from which a request got nothing, count as failures of what the store delivers: three in a row open a breaker.

**Tuning** bounds all this by values that no operator has a reason to change, each with the reason for it. What operators do
choose is in `base/config.StoreConfig`. Tests make other tunings, to reach in a few pages what takes millions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from stepwell.base.errors import ConfigError
from stepwell.base.spec import ModelSpec

FAILURES_TO_OPEN = 3
FIRST_COOL_OFF_S, LONGEST_COOL_OFF_S = 1.0, 60.0
MOST_FALLBACKS = 8  # checkpoints fetched in case the deepest is not reached
UNMEASURED_SHARE = 0.1  # of computing: a request waits no longer for a store whose speed is not known
KEPT_OF_MEAN = 0.8  # how much of a running mean the next measurement leaves
_POSITIVE = ("op_timeout_s", "backup_queue", "backup_age_s", "backup_bytes")

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTuning:
    """One store's bounds. The defaults are what ships."""

    # Of the host tier, for fetched pages whose requests have not begun: the other half stays for what is saved from the device.
    host_share: float = 0.5
    # The same for a fetch while there is no other: a long prompt is worth more than what it takes the place of for a while, as
    # it goes on to the device and leaves the host first. Some is left for what the device has to save meanwhile, and for others
    # (`fetch_room_bytes`).
    host_share_alone: float = 15 / 16
    # Of the device tier, what may be evicted for pages that go on to it while others of their prompts are still being fetched.
    # They are wanted as soon as their requests begin; what is evicted may be wanted sooner. Free room they take in any case.
    device_share: float = 0.25
    # One reader's turn. The store knows best (`Traits.turn_bytes`): large enough to be worth a call, small enough to call off.
    fetch_chunk_bytes: int | None = None
    # Bytes spent on checkpoints before the deepest one. A fetch that is stopped early resumes at one of them; one that is not
    # has read a quarter more.
    fallback_share: float = 0.25
    # Without progress for so long, a store has failed: as long as a request waits for one at most, unless an operator says
    # otherwise (`prefetch_timeout_s`). Busy disks stall for less.
    op_timeout_s: float = 30.0
    # Paths in line to be backed up. They hold no memory, so the line may be long; this bounds what is looked through.
    backup_queue: int = 4096
    # After which a path in line is dropped: a store that is a minute behind is slower than what comes, and will not catch up.
    backup_age_s: float = 60.0
    # On their way down at a time; twice that of what would be lost otherwise. It keeps fast disks busy, and a store that hangs
    # holds no more of the host. A sixteenth of the host tier where that is less.
    backup_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        if self.fallback_share < 0:
            raise ConfigError(f"fallback_share must be 0 or more, got {self.fallback_share}")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.fetch_chunk_bytes is not None and self.fetch_chunk_bytes <= 0:
            raise ConfigError(f"fetch_chunk_bytes must be positive, got {self.fetch_chunk_bytes}; None for the store's own")
        for name in ("host_share", "host_share_alone"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be more than 0 and at most 1, got {getattr(self, name)}")
        if not 0 <= self.device_share <= 1:
            raise ConfigError(f"device_share must be at least 0 and at most 1, got {self.device_share}")

    def fetch_room_bytes(self, host_bytes: int, *, held_bytes: int, largest_bytes: int) -> float:
        """How much of the host a fetch may take beside others that hold `held_bytes`, the largest of them `largest_bytes`.

        Beside one that was alone and took more than all may have together, each may take half of what is left: the next finds
        some room too.
        """
        if not held_bytes:
            return self.host_share_alone * host_bytes
        if largest_bytes > self.host_share * host_bytes:
            return (self.host_share_alone * host_bytes - held_bytes) / 2
        return self.host_share * host_bytes - held_bytes


class BreakerState(Enum):
    CLOSED = "closed"  # all is well
    OPEN = "open"  # the store is left alone
    TRYING = "trying"  # one request is out to see whether it is well again


class Breaker:
    """Counts failures in a row. One thread."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._cool_off_s = FIRST_COOL_OFF_S
        self._opened_s = 0.0

    def allows(self, now: float) -> bool:
        """Whether the store may be asked now. Changes nothing."""
        if self.state is BreakerState.OPEN:
            return now >= self._opened_s + self._cool_off_s
        return self.state is BreakerState.CLOSED

    def asked(self, now: float) -> None:
        """A request went out. After a cool-off it is the one that decides."""
        if self.state is BreakerState.OPEN and self.allows(now):
            self.state = BreakerState.TRYING

    def succeeded(self) -> None:
        if self.state is not BreakerState.OPEN:  # a straggler from before does not say that it is well now
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._cool_off_s = FIRST_COOL_OFF_S

    def undecided(self) -> None:
        """A request was called off before it said anything: the next one decides."""
        if self.state is BreakerState.TRYING:
            self.state = BreakerState.OPEN

    def failed(self, now: float) -> bool:
        """Notes a failure; true when it switched the store off."""
        self._failures += 1
        if self.state is BreakerState.TRYING:
            self._cool_off_s = min(2 * self._cool_off_s, LONGEST_COOL_OFF_S)
        elif self.state is BreakerState.OPEN or self._failures < FAILURES_TO_OPEN:
            return False
        self.state = BreakerState.OPEN
        self._opened_s = now
        return True


def reachable(known: int, has_page: Flags) -> int:
    """How many pages are there without a gap, when the first `known` are in memory."""
    beyond = np.flatnonzero(~has_page[known:])
    return known + int(beyond[0]) if len(beyond) else len(has_page)


def restore_points(spec: ModelSpec, *, above: int, upto: int, has_checkpoint: Flags) -> Iterator[int]:
    """Boundaries (in pages) from the deepest to the shallowest, `above` < b <= `upto`, at which a request could resume."""
    for page in range(upto, above, -1):
        tokens = page * spec.page_tokens
        if spec.is_legal(tokens) and (has_checkpoint[page] or not spec.needs_checkpoint_at(tokens)):
            yield page


def fallbacks(points: Sequence[int], *, checkpoint_bytes: int, fetch_bytes: int, share: float) -> list[int]:
    """Of boundaries before the deepest, evenly spread ones whose checkpoints cost at most `share` of the fetch."""
    if not points or not checkpoint_bytes:
        return sorted(points)
    count = min(int(share * fetch_bytes) // checkpoint_bytes, len(points), MOST_FALLBACKS)
    return sorted({points[index * len(points) // count] for index in range(count)}) if count else []


def is_worth_it(fetch_s: float | None, recompute_s: float | None) -> bool:
    """Whether to fetch rather than compute; what has not been measured gets the chance to be."""
    return fetch_s is None or recompute_s is None or fetch_s < recompute_s


class Speed:
    """A running mean of amounts per second, recent ones counting more; None before the first measurement."""

    def __init__(self, known_per_s: float | None = None) -> None:
        self._amount = known_per_s or 0.0
        self._seconds = 1.0 if known_per_s else 0.0

    @property
    def per_s(self) -> float | None:
        return self._amount / self._seconds if self._seconds > 0 else None

    def measure(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        self._amount = KEPT_OF_MEAN * self._amount + amount
        self._seconds = KEPT_OF_MEAN * self._seconds + seconds
