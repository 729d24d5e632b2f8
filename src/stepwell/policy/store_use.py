"""How a store is used: whether it is called at all, how deep a prompt it provides, and how long a request may wait for it. Pure.

**The breaker** stops calls to a failing store, and tries it again after a while:

    CLOSED --failures in a row--> OPEN --cool-off--> one try --success--> CLOSED
                                    ^------failure, longer cool-off------'

**How deep** depends on pages and checkpoints together:

    pages      |== in memory ==|== in the store ==|  nowhere
    boundary         a             b     c           deepest one with a checkpoint, or that needs none: c

**How long** a request waits depends on the predicted seconds for computing and fetching (`expected.py`):

    fetch >= compute, or computing not measured yet      not at all
    fetch <  compute                                     as long as computing
    fetching not measured yet                            UNMEASURED_SHARE of that

and never longer than the operator's limit. A store that was never measured therefore slows a request down by a tenth at most.

Waits that gained a request nothing count as failures of the store to deliver: three in a row open a breaker.

**Tuning** has bounds that operators have no reason to change, each with its reason. The operators' settings are in
`base/config.StoreConfig`. Tests use other tunings, to reach with a few pages what otherwise takes millions.
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
UNMEASURED_SHARE = 0.1  # of the time to compute: the longest wait for a store whose speed is not known
KEPT_OF_MEAN = 0.8  # the weight of earlier measurements in a running mean
_POSITIVE = ("op_timeout_s", "backup_queue", "backup_age_s", "backup_bytes")

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTuning:
    """One store's bounds. The defaults are used in production."""

    # The share of the host tier for fetched pages whose requests have not begun. The other half is for saves from the device.
    host_share: float = 0.5
    # The same for a fetch that is the only one. A long prompt is worth more than what it displaces for a while, since it moves on
    # to the device and is evicted from the host first. The rest is for saves from the device, and for other fetches
    # (`fetch_capacity_bytes`).
    host_share_alone: float = 15 / 16
    # The share of the device tier that may be evicted for pages whose prompts are still being fetched. They are needed only when
    # their requests begin, and the evicted pages may be needed sooner. Free memory is used in any case.
    device_share: float = 0.25
    # The bytes of one read call: large enough to be efficient, small enough to cancel. None for `Traits.turn_bytes` of the store.
    fetch_chunk_bytes: int | None = None
    # The share of bytes spent on checkpoints before the deepest one. A fetch that is stopped early resumes at one of them; any
    # other fetch reads a quarter more than necessary.
    fallback_share: float = 0.25
    # Without progress for this long, a store has failed. It equals the longest wait of a request for a store, unless the operator
    # sets another (`prefetch_timeout_s`). Busy disks stall for less.
    op_timeout_s: float = 30.0
    # Paths waiting to be backed up. They hold no memory, so the queue may be long; this bounds the time to search it.
    backup_queue: int = 4096
    # A path that waited this long is dropped: a store that is a minute behind is too slow for the load, and will not catch up.
    backup_age_s: float = 60.0
    # Bytes being written at a time, and twice this for data that would otherwise be lost. It is enough to keep fast disks busy,
    # and limits the host memory that a hanging store can hold. At most a sixteenth of the host tier.
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

    def fetch_capacity_bytes(self, host_bytes: int, *, held_bytes: int, largest_bytes: int) -> float:
        """The host memory that a fetch may take while others hold `held_bytes`, the largest of them `largest_bytes`.

        If the largest was alone when it began and took more than `host_share`, each further fetch may take half of the rest, so
        that some is left for the next.
        """
        if not held_bytes:
            return self.host_share_alone * host_bytes
        if largest_bytes > self.host_share * host_bytes:
            return (self.host_share_alone * host_bytes - held_bytes) / 2
        return self.host_share * host_bytes - held_bytes


class BreakerState(Enum):
    CLOSED = "closed"  # all is well
    OPEN = "open"  # the store is not called
    TRYING = "trying"  # one call is in flight to test whether the store works again


class Breaker:
    """Counts failures in a row. One thread."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._cool_off_s = FIRST_COOL_OFF_S
        self._opened_s = 0.0

    def allows(self, now: float) -> bool:
        """Whether the store may be called now. Changes nothing."""
        if self.state is BreakerState.OPEN:
            return now >= self._opened_s + self._cool_off_s
        return self.state is BreakerState.CLOSED

    def asked(self, now: float) -> None:
        """Notes a call. After a cool-off, its outcome decides."""
        if self.state is BreakerState.OPEN and self.allows(now):
            self.state = BreakerState.TRYING

    def succeeded(self) -> None:
        if self.state is not BreakerState.OPEN:  # a late answer to an earlier call does not mean that the store works now
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._cool_off_s = FIRST_COOL_OFF_S

    def undecided(self) -> None:
        """Notes that a call was cancelled before it had an outcome: the next one decides."""
        if self.state is BreakerState.TRYING:
            self.state = BreakerState.OPEN

    def failed(self, now: float) -> bool:
        """Notes a failure; true if it switched the store off."""
        self._failures += 1
        if self.state is BreakerState.TRYING:
            self._cool_off_s = min(2 * self._cool_off_s, LONGEST_COOL_OFF_S)
        elif self.state is BreakerState.OPEN or self._failures < FAILURES_TO_OPEN:
            return False
        self.state = BreakerState.OPEN
        self._opened_s = now
        return True


def reachable(known: int, has_page: Flags) -> int:
    """The number of leading pages without a gap, if the first `known` are in memory."""
    beyond = np.flatnonzero(~has_page[known:])
    return known + int(beyond[0]) if len(beyond) else len(has_page)


def restore_points(spec: ModelSpec, *, above: int, upto: int, has_checkpoint: Flags) -> Iterator[int]:
    """Boundaries (in pages) from the deepest to the shallowest, `above` < b <= `upto`, at which a request could resume."""
    for page in range(upto, above, -1):
        tokens = page * spec.page_tokens
        if spec.is_legal(tokens) and (has_checkpoint[page] or not spec.needs_checkpoint_at(tokens)):
            yield page


def fallbacks(points: Sequence[int], *, checkpoint_bytes: int, fetch_bytes: int, share: float) -> list[int]:
    """Evenly spaced boundaries among `points` whose checkpoints cost at most `share` of the bytes of the fetch."""
    if not points or not checkpoint_bytes:
        return sorted(points)
    count = min(int(share * fetch_bytes) // checkpoint_bytes, len(points), MOST_FALLBACKS)
    return sorted({points[index * len(points) // count] for index in range(count)}) if count else []


def is_worth_it(fetch_s: float | None, recompute_s: float | None) -> bool:
    """Whether to fetch rather than compute; true if either was not measured yet, so that it can be."""
    return fetch_s is None or recompute_s is None or fetch_s < recompute_s


class Speed:
    """A running mean of amounts per second that weights recent ones more; None before the first measurement."""

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
