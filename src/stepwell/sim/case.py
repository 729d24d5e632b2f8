"""One replay as names and numbers alone, so that another process can run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from stepwell.base.config import CacheConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.spec.presets import load_spec
from stepwell.policy.write_choice import choose_write
from stepwell.sim.files import TraceFile
from stepwell.sim.hardware import Hardware
from stepwell.sim.policies import policy_named
from stepwell.sim.setup import Setup
from stepwell.sim.trace import Trace, TraceRequest

TIERS = (Tier.DEVICE, Tier.HOST, Tier.STORE)
Sizes = Mapping[Tier, int]  # bytes; tiers that are missing do not exist


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to replay, and on what."""

    trace: Path
    spec: str
    sizes: Sizes
    policy: str
    hardware: Hardware
    kv_dtype: str | None = None
    checkpoint_dtype: str | None = None
    page_tokens: int | None = None
    requests: int | None = None  # of the trace, from its start; all where None
    max_model_len: int | None = None  # longer requests are left out, as a server refuses them
    write: WritePolicy | None = None  # None: by the sizes of the tiers
    durable: bool = True
    whole_blocks: bool = False

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise ConfigError(f"`requests` must be 1 or more, got {self.requests}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"--max-model-len must be 1 or more, got {self.max_model_len}")

    def setup(self) -> Setup:
        """The model, the tiers and the machine. Raises ConfigError and SpecError."""
        spec = load_spec(self.spec, kv_dtype=self.kv_dtype, page_tokens=self.page_tokens)
        chosen = choose_write(
            self.write, device_bytes=self.sizes.get(Tier.DEVICE, 0), host_bytes=self.sizes.get(Tier.HOST),
            has_store=Tier.STORE in self.sizes, store_bytes=self.sizes.get(Tier.STORE),
        )  # fmt: skip
        return Setup(
            spec=spec.with_checkpoint_dtype(self.checkpoint_dtype),
            config=CacheConfig(
                device_bytes=self.sizes.get(Tier.DEVICE),
                host_bytes=self.sizes.get(Tier.HOST),
                write=chosen.write,
                durable=self.durable,
            ),
            tuning=policy_named(self.policy),
            store_bytes=self.sizes.get(Tier.STORE),
            hardware=self.hardware,
            whole_blocks=self.whole_blocks,
        )

    def open_trace(self) -> Trace:
        """The requests to serve. Raises TraceError."""
        return self.part_of(TraceFile(self.trace))

    def part_of(self, trace: Trace) -> Trace:
        """The part of the opened trace that is served."""
        return Part(trace, self.requests, self.max_model_len)


class Part:
    """The first `most` requests of a trace, without those of more than `longest` tokens; all where None."""

    def __init__(self, trace: Trace, most: int | None, longest: int | None) -> None:
        self._trace = trace
        self._most = most
        self._longest = longest

    @property
    def name(self) -> str:
        return self._trace.name

    @property
    def block_tokens(self) -> int:
        return self._trace.block_tokens

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in islice(iter(self._trace), self._most):
            if self._longest is None or request.prompt_tokens + request.output_tokens <= self._longest:
                yield request
