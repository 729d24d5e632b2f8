"""vLLM's own offloading with Stepwell's verified store below its host tier. Translates, and decides nothing.

    StepwellOffloadingConnector    vLLM's OffloadingConnector, which also identifies weights and adapters to the tiers below
    StepwellTier                   one of its `secondary_tiers`

vLLM does not pass the weights, settings and adapters of a chunk to a tier; its connector knows them. The tier therefore refuses
to start below vLLM's plain connector. vLLM 0.32 calls a tier on the scheduler's thread only, 0.33 also on a polling thread. A
lock makes every method safe on any thread. Written for vLLM 0.32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from secrets import token_hex
from threading import RLock
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from stepwell.base.errors import ConfigError
from stepwell.base.meters import SystemClock
from stepwell.connectors.store_settings import open_verified
from stepwell.connectors.vllm.chunk_store import ChunkStore, Ended
from stepwell.connectors.vllm.offloaded_chunks import TIER, OffloadedChunks, engine_facts, must_be_offloadable, tier_facts
from stepwell.connectors.vllm.settings import read_tier_settings
from stepwell.connectors.weight_files import Adapters

EVENTS = "vllm:stepwell_tier_events"
ENGINE = "engine"  # key in a tier's settings that our connector adds
FOUND = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}
P = ParamSpec("P")
R = TypeVar("R")


class StepwellOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's offloading as it is, with names for weights and adapters."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.SCHEDULER:
            must_be_offloadable(vllm_config)
            transfer = vllm_config.kv_transfer_config
            extra = transfer.kv_connector_extra_config
            tiers = [_with_engine(tier, vllm_config, kv_cache_config) for tier in extra["secondary_tiers"]]
            transfer.kv_connector_extra_config = {**extra, "secondary_tiers": tiers}
        super().__init__(vllm_config, role, kv_cache_config)
        self._adapters = Adapters()
        self._own_tiers: list[StepwellTier] = []
        if role is KVConnectorRole.SCHEDULER:
            self._own_tiers = [tier for tier in self.scheduler.manager.secondary_tiers if isinstance(tier, StepwellTier)]

    def on_new_request(self, request: Any) -> None:
        lora = request.lora_request
        digest = self._adapters.digest(lora.lora_int_id, lora.lora_path) if lora is not None else ""
        for tier in self._own_tiers:
            tier.arrived(request.request_id, digest)
        super().on_new_request(request)

    def reset_cache(self) -> bool | None:
        """Weights may have changed: nothing stored before is found again by this process."""
        done: bool | None = super().reset_cache()
        for tier in self._own_tiers:
            tier.renew()
        return done


def _with_engine(tier: Any, vllm_config: Any, kv_cache_config: Any) -> Any:
    """A tier's settings with the facts that identify this engine's chunks."""
    if not isinstance(tier, dict) or tier.get("type") != TIER:
        return tier
    facts = engine_facts(
        vllm_config, kv_cache_config, tier.get("identity"), version=vllm.__version__, device_type=current_platform.device_type
    )
    return {**tier, ENGINE: facts}


def _locked(method: Callable[Concatenate[StepwellTier, P], R]) -> Callable[Concatenate[StepwellTier, P], R]:
    """Serializes calls; the store's own threads do not take this lock."""

    def call(self: StepwellTier, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[StepwellTier, P], R]", wraps(method)(call))


class StepwellTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks of the host tier in a verified store. Exact or a miss. Any thread."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None,
        locality: str | None = None, engine: str | None = None, **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if engine is None:
            raise ConfigError(
                f'{TIER} must know the weights of its chunks: use "kv_connector": "StepwellOffloadingConnector", '
                '"kv_connector_module_path": "stepwell.connectors.vllm" in place of vLLM\'s OffloadingConnector'
            )
        self.locality = Locality(locality) if locality is not None else None
        settings = read_tier_settings(given)
        self._facts = f"{engine} {tier_facts(offloading_spec.config, self.block_size_bytes)}"
        self._model = str(offloading_spec.config.model.name)
        self._values = open_verified(settings, settings.store)
        space = self._values.space(self._facts.encode(), label=f"{self._model} [vllm offloading]")
        self._store = ChunkStore(self._values, space, primary_kv_view, SystemClock(), readers=settings.readers)
        self._chunks = OffloadedChunks(offloading_spec.config)
        self._lock = RLock()
        self._running: dict[int, TransferJob] = {}
        self._counted: Counter[str] = Counter()

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @_locked
    def arrived(self, request: str, adapter: str | None) -> None:
        """From our connector: a new request, with the digest of its adapter's weights."""
        self._chunks.arrived(request, adapter)

    @_locked
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        name = self._chunks.name(key, req_context)
        return FOUND[self._store.lookup(name, req_context.req_id)] if name is not None else LookupResult.MISS

    @_locked
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Records the parents of chunks. The store itself counts reads as uses."""
        for key in keys:
            self._chunks.name(key, req_context)

    @_locked
    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store.load)

    @_locked
    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store.store)

    def _submit(self, job: TransferJob, begin: Any) -> None:
        self._running[job.job_id] = job
        chunks = self._chunks.chunks(job.keys, [int(row) for row in job.chunk_ids], job.req_context)
        if chunks is None:
            self._store.refuse(job.job_id, len(job.keys))
        else:
            begin(job.job_id, chunks)

    @_locked
    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(ended) for ended in self._store.ended()]

    def _result(self, ended: Ended) -> JobResult:
        job = self._running.pop(ended.job)
        loaded = None
        if job.is_promotion and not all(ended.good):
            loaded = tuple(key for key, good in zip(job.keys, ended.good, strict=True) if good) or None
        return JobResult(
            job_id=ended.job, success=all(ended.good), successful_keys=loaded, transfer_time=ended.took_s,
            transfer_bytes=ended.size_bytes,
        )  # fmt: skip

    @_locked
    def on_schedule_end(self, context: Any) -> None:
        self._store.flush()

    @_locked
    def on_request_finished(self, req_context: Any) -> None:
        self._store.request_finished(req_context.req_id)
        self._chunks.finished(req_context.req_id)

    @_locked
    def drain_jobs(self) -> None:
        """Waits for a hanging store until its deadline. It may still read the host tier afterwards; if that changes meanwhile,
        the value is damaged and becomes a miss.
        """
        self._store.drain()

    @_locked
    def renew(self) -> None:
        """Weights may have changed: open requests neither find nor store anything more."""
        self._chunks.refuse_open()
        facts = f"{self._facts} since reset {token_hex(16)}"
        self._store.renew(self._values.space(facts.encode(), label=f"{self._model} [vllm offloading, after a reset]"))

    @_locked
    def shutdown(self) -> None:
        """Raises StoreError if the store does not close in time: vLLM then keeps the host tier's memory mapped."""
        self._store.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        says = "Events of the verified store below the host tier: values read, written and missed, by cause."
        return {EVENTS: OffloadingCounterMetadata(documentation=says, labelnames=("event",))}

    @_locked
    def get_stats(self) -> OffloadingConnectorStats | None:
        counts = Counter(self._store.stats()) + Counter({"requests_refused": self._chunks.num_refused})
        new, self._counted = counts - self._counted, counts
        if not new:
            return None
        stats = OffloadingConnectorStats()
        for event, count in new.items():
            stats.increase_counter(EVENTS, count, (event,))
        return stats
