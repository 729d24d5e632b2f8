"""Sums over the requests of a replay, and the hit rate that endless memory would reach."""

from __future__ import annotations

from array import array
from collections import Counter

from stepwell.base.ids import Tier
from stepwell.base.spec import ModelSpec
from stepwell.cache.facade import Cache
from stepwell.sim.executors import Traffic
from stepwell.sim.report import Report, TierReport, percentiles_s
from stepwell.sim.setup import Setup
from stepwell.sim.store import CountingStore
from stepwell.sim.trace import BlockIds, TraceRequest
from stepwell.tiers.lease import Sources

_EVICTED = tuple(f"{why}_{tier}_checkpoints" for why in ("evicted", "superseded") for tier in ("device", "host"))


class Tally:
    """Figures since the last `restart`: requests before it only warm the cache."""

    def __init__(self, setup: Setup, cache: Cache, traffic: Traffic, store: CountingStore | None) -> None:
        self._setup = setup
        self._cache = cache
        self._traffic = traffic
        self._store = store
        self.restart()

    def restart(self) -> None:
        """Starts counting anew."""
        self._sums: Counter[str] = Counter()
        self._ttft_s = array("d")
        self._uncached_s = 0.0
        self._counters_before = self._cache.counters.snapshot()
        self._read_before = self._traffic.read_bytes.copy()
        self._written_before = self._traffic.written_bytes.copy()

    def add(
        self, request: TraceRequest, sources: Sources, *, ttft_s: float, reusable_tokens: int, fits: bool, from_checkpoint: bool
    ) -> None:
        assert sources.total == request.prompt_tokens, f"{sources} does not add up to {request.prompt_tokens}"
        sums = self._sums
        sums["requests"] += 1
        sums["prompt_tokens"] += request.prompt_tokens
        sums["output_tokens"] += request.output_tokens
        sums["device_tokens"] += sources.device
        sums["host_tokens"] += sources.host
        sums["store_tokens"] += sources.store
        sums["computed_tokens"] += sources.computed
        sums["reusable_tokens"] += reusable_tokens
        sums["too_large"] += not fits
        sums["checkpoints_used"] += from_checkpoint
        self._ttft_s.append(ttft_s)
        self._uncached_s += self._setup.hardware.prefill_s(0, request.prompt_tokens)

    def report(self, *, trace: str, policy: str, wall_s: float) -> Report:
        names = ("requests", "prompt_tokens", "output_tokens", "device_tokens", "host_tokens", "store_tokens", "computed_tokens",
                 "reusable_tokens", "too_large", "checkpoints_used")  # fmt: skip
        p50_s, p95_s, p99_s = percentiles_s(self._ttft_s)
        return Report(
            trace=trace,
            spec=self._setup.spec.name,
            policy=policy,
            write=self._setup.config.write.value,
            page_tokens=self._setup.spec.page_tokens,
            hardware=self._setup.hardware,
            **{name: self._sums[name] for name in names},
            checkpoints_made=self._counted("checkpoints_made"),
            checkpoints_evicted=sum(map(self._counted, _EVICTED)),
            tiers={tier: self._tier(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.STORE)},
            ttft_p50_s=p50_s,
            ttft_p95_s=p95_s,
            ttft_p99_s=p99_s,
            prefill_s=sum(self._ttft_s) - len(self._ttft_s) * self._setup.hardware.request_latency_s,
            uncached_prefill_s=self._uncached_s,
            wall_s=wall_s,
        )

    def _counted(self, name: str) -> int:
        return self._cache.counters[name] - self._counters_before.get(name, 0)

    def _tier(self, tier: Tier) -> TierReport:
        config, store = self._setup.config, self._store
        sizes = {Tier.DEVICE: config.device_bytes, Tier.HOST: config.host_bytes, Tier.STORE: self._setup.store_bytes}
        in_store = store.used_bytes if store is not None else 0
        return TierReport(
            size_bytes=sizes[tier] or 0,
            used_bytes=in_store if tier is Tier.STORE else self._cache.stats().tier(tier).used_bytes,
            read_bytes=self._traffic.read_bytes[tier] - self._read_before[tier],
            written_bytes=self._traffic.written_bytes[tier] - self._written_before[tier],
        )


class Ceiling:
    """What endless memory would save of each prompt. Equal ids have equal history, so blocks above a known one are known."""

    def __init__(self, spec: ModelSpec, block_tokens: int, *, whole_blocks: bool) -> None:
        self._spec = spec
        self._block_tokens = block_tokens
        self._whole_blocks = whole_blocks
        self._seen: set[int] = set()

    def reusable(self, request: TraceRequest) -> int:
        """Tokens of the prompt that earlier prompts had, in whole boundaries. Remembers this prompt too."""
        known = self._known(request.blocks)
        self._seen.update(request.blocks[known:].tolist())
        tokens = min(known * self._block_tokens, request.prompt_tokens)
        return tokens if self._whole_blocks else min(self._spec.floor(tokens), self._spec.usable(request.prompt_tokens))

    def _known(self, blocks: BlockIds) -> int:
        """How many leading blocks were seen before, by bisection: no block is known after an unknown one."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if int(blocks[middle]) in self._seen:
                low = middle + 1
            else:
                high = middle
        return low
