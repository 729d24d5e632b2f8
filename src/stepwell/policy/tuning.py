"""What bounds the work at a store: values that no operator has a reason to change, each with the reason for it. Pure.

What operators do choose is in `base/config.StoreConfig`. Tests make other tunings, to reach in a few pages what takes millions.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.errors import ConfigError

_ZERO_OR_MORE = ("timeout_base_s", "timeout_per_ki_s", "wait_credit_s", "wait_share", "fallback_share")
_POSITIVE = ("op_timeout_s", "backup_queue", "backup_age_s", "backup_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTuning:
    """One store's bounds. The defaults are what ships."""

    # How long a request waits before it is known how fast prompts are computed. 2,000 tokens a second is slow for prefill, so
    # nobody waits much longer than computing takes; two seconds on top let a cold disk or connection answer once.
    timeout_base_s: float = 2.0
    timeout_per_ki_s: float = 0.5
    # Waiting in vain, beyond the first time: at most half a second, and 1 % of the time spent computing. Less than anybody can
    # measure on a whole workload, and enough to notice a store that has recovered.
    wait_credit_s: float = 0.5
    wait_share: float = 0.01
    # Of the host tier, for fetched pages whose requests have not begun: the other half stays for what is saved from the device.
    host_share: float = 0.5
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
        for name in _ZERO_OR_MORE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.fetch_chunk_bytes is not None and self.fetch_chunk_bytes <= 0:
            raise ConfigError(f"fetch_chunk_bytes must be positive, got {self.fetch_chunk_bytes}; None for the store's own")
        if not 0 < self.host_share <= 1:
            raise ConfigError(f"host_share must be more than 0 and at most 1, got {self.host_share}")

    def wait_s(self, prompt_tokens: int, compute_s: float | None = None) -> float:
        """How long waiting for a store pays: what computing would take instead, where that is known."""
        return self.timeout_base_s + self.timeout_per_ki_s * prompt_tokens / 1024 if compute_s is None else compute_s
