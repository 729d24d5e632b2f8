"""Estimated seconds for what a replay only counts. Arithmetic; nothing waits.

The defaults are assumptions for one large accelerator and a model with some tens of billions of active parameters; measure
your own and pass them. Computing slows down with the position, because every token attends to all before it:

    seconds for tokens [a, b) = (b - a) / prefill + (b^2 - a^2) / (2 * half * prefill)

so that at position `half` a token costs twice as much as at the start.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from stepwell.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Speeds and latencies. Bandwidths are in bytes a second."""

    prefill_tokens_per_s: float = 20_000.0  # at the start of a prompt
    prefill_half_tokens: float = 131_072.0  # the position at which that has halved
    request_latency_s: float = 0.02  # scheduling, and the pass that gives the first token
    host_bytes_per_s: float = 50e9  # host to device: what a PCIe 5 x16 link gives
    host_latency_s: float = 0.0001
    store_bytes_per_s: float = 6e9  # store to host, all readers together: one NVMe disk
    store_latency_s: float = 0.001

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0 or (value == 0 and not field.name.endswith("latency_s")) or value == float("inf"):
                raise ConfigError(f"{field.name} must be a positive number, got {value}")

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens `[start, end)` of a prompt."""
        return ((end - start) + (end**2 - start**2) / (2 * self.prefill_half_tokens)) / self.prefill_tokens_per_s

    def load_s(self, size_bytes: int) -> float:
        """Seconds to load bytes from the host to the device."""
        return self.host_latency_s + size_bytes / self.host_bytes_per_s if size_bytes else 0.0

    def fetch_s(self, size_bytes: int, *, readers: int = 1) -> float:
        """Seconds to fetch bytes from the store to the host while `readers` read at once."""
        return self.store_latency_s + size_bytes * readers / self.store_bytes_per_s if size_bytes else 0.0


def hardware_from(settings: list[str]) -> Hardware:
    """The defaults, changed by `name=number` settings. Raises ConfigError."""
    known = {field.name for field in fields(Hardware)}
    changed: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known:
            raise ConfigError(f"hardware has no {name!r:.60}; it has {', '.join(sorted(known))}")
        try:
            changed[name] = float(value)
        except ValueError:
            raise ConfigError(f"{name} must be a number, got {value!r:.40}") from None
    return Hardware(**changed)
