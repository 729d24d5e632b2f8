"""vLLM's connector interface over the two sides, and the metadata that vLLM carries between processes. Decides nothing.

vLLM creates one object for its scheduler and one per worker, in the same process or in several. Every method is called on the
main thread of its process. Written for vLLM 0.32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import group_kernel_blocks
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.connectors.vllm.block_events import BlockEvents
from stepwell.connectors.vllm.engine_config import Assembly, check_engine, groups_of, publishes_events
from stepwell.connectors.vllm.metrics import Meter, StepwellPromMetrics, StepwellStats
from stepwell.connectors.vllm.orders import Answers, Order, WeightsAnswer, merged
from stepwell.connectors.vllm.requests import PageNames, Requests, explanation_for
from stepwell.connectors.vllm.scheduler_side import ended_in
from stepwell.connectors.vllm.settings import read_settings
from stepwell.connectors.vllm.weights import CurrentWeights, Held, Weights
from stepwell.connectors.vllm.worker_side import Ended, WorkerSide


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Sent to the workers with a step."""

    step: int = 0
    loads: list[Order] = field(default_factory=list)
    saves: list[Order] = field(default_factory=list)
    weights_question: int = 0  # number of a query for the workers' weights, or 0


@dataclass
class WorkerAnswers(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Sent by the workers with a step's output."""

    answers: Answers
    step: int  # the last one that was computed
    weights: dict[int, WeightsAnswer] = field(default_factory=dict)  # by rank

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerAnswers), f"answers of {type(other).__name__}"
        step = min(self.step, other.step)
        return WorkerAnswers(merged(self.answers, other.answers), step, self.weights | other.weights)


MULTI = "MultiConnector.__init__"  # which makes its connectors
PAUSE = "_reset_caches"  # vLLM's EngineCore calls it whenever it pauses
HIT_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.STORE: CacheHitSource.DISK}


class StepwellConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A tiered cache with exact resumption for attention, sliding windows and recurrent state."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if sys._getframe(1).f_code.co_qualname.endswith(MULTI):
            raise ConfigError(
                "StepwellConnector does not run inside MultiConnector, where it could save blocks that another connector failed "
                "to load: make it the only kv_connector"
            )
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config, failure_policy=transfer.kv_load_failure_policy)
        check_engine(vllm_config)
        page_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._assembly = Assembly(
            vllm_config=vllm_config, kv_cache_config=kv_cache_config, settings=settings,
            groups=groups_of(kv_cache_config, is_cpu=current_platform.is_cpu()), page_tokens=page_tokens,
            version=vllm.__version__, device_type=current_platform.device_type,
        )  # fmt: skip
        self._worker: WorkerSide | None = None
        self._computed_step = 0
        self._weights: CurrentWeights | None = None
        self._weights_answer: dict[int, WeightsAnswer] = {}
        self._ended = Ended(answers={}, loaded=frozenset(), failed=frozenset())
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler_side(hash_tokens)

    def _start_scheduler_side(self, hash_tokens: int) -> None:
        self._shared = self._assembly.open_shared()
        self._scheduler, self._store = self._assembly.scheduler_side(self._shared)
        self._model = self._scheduler.cache.namespace.model  # with the weights at start-up
        cache, groups = self._scheduler.cache, self._assembly.groups
        self._requests = Requests(
            cache.namespace, explains=self._assembly.settings.explain, page_tokens=self._assembly.page_tokens,
            vocab_size=self._assembly.vocab_size, counters=cache.counters,
        )  # fmt: skip
        self._meter = Meter(cache)
        self._events: BlockEvents | None = None
        if publishes_events(self._vllm_config):
            names = PageNames(page_tokens=self._assembly.page_tokens, hash_tokens=hash_tokens)
            specs = [group.kv_cache_spec for group in self._kv_cache_config.kv_cache_groups]
            self._events = BlockEvents(cache.listen(), groups, specs, names)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: no request waits for saves

    # ---- the scheduler's side -----------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind(_Pool(gpu_block_pool))

    def on_new_request(self, request: Any) -> None:
        seen = self._requests.add(request)
        self._scheduler.arrived(request.request_id, seen)
        if self._events is not None:
            self._events.arrived(request, seen)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._scheduler.found(request.request_id, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        table = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.allocated(request.request_id, table, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        found = self._scheduler.loaded_from(request.request_id, num_external_tokens)
        return {HIT_SOURCES[tier]: tokens for tier, tokens in found.items()}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        computing = self._requests.computing(scheduler_output.num_scheduled_tokens, state)
        if self._events is not None:
            for request, _ in computing:
                self._events.grown(request)
        orders = self._scheduler.step([each for _, each in computing])
        return StepMetadata(
            step=self._scheduler.num_steps,
            loads=[order for order in orders if order.request is not None],
            saves=[order for order in orders if order.request is None],
            weights_question=self._scheduler.weights_question(),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, WorkerAnswers):
            self._scheduler.answered(said.answers, step=said.step)
            weights = self._scheduler.weights_answered(said.weights)
            if weights is not None:
                self._adopt_weights(weights)

    def get_kv_connector_stats(self) -> StepwellStats | None:
        return self._meter.take(self._scheduler.take_loaded()) if self._role is KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StepwellStats:
        return StepwellStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> StepwellPromMetrics:
        return StepwellPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        return list(self._events.take()) if self._events is not None else ()

    def request_finished_all_groups(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.remove(request)
        if self._events is not None:
            self._events.finished(request)
        seen = self._scheduler.finished(request.request_id)
        return False, explanation_for(seen)  # saves have pinned their blocks

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.pins_blocks  # waiting a step is cheaper than preempting

    def has_pending_push_work(self) -> bool:
        return self._scheduler.is_busy

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any = None) -> bool:
        """Called by vLLM 0.33. After `wake_up` with the same weights, host memory and store are found again; with others they are
        not. Blocks keep their addresses, and no copy is in flight during sleep, because vLLM does not pause while blocks are
        pinned.
        """
        return True

    def reset_cache(self) -> bool:
        """Weights may have changed: workers report theirs before the next request is looked up. A pause, including `sleep`, keeps
        cached pages; `reset_prefix_cache(reset_connector=True)` empties host memory.
        """
        self._scheduler.recheck_weights(keeps_contents=_is_pausing())
        self._announce_requests(clears=True)
        return True

    def _adopt_weights(self, weights: Weights) -> None:
        """Switches to the namespace of the weights that workers hold, so that pages cached with them are found again."""
        model, unknown = self._model, weights.held is Held.UNKNOWN
        if weights.held is Held.OTHER:
            model = f"{model} with weights {weights.digest}"
        elif unknown:
            model = f"{model} since reset {token_hex(16)}"
        is_renamed = self._requests.rename_model(model)
        self._scheduler.rename_model(model, clears=unknown)
        self._announce_requests(clears=is_renamed)

    def _announce_requests(self, *, clears: bool) -> None:
        if self._events is not None:
            if clears:
                self._events.reset()
            for request in self._requests:
                self._events.arrived(request, self._scheduler.seen(request.request_id))

    # ---- a worker's side ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, assembly = self._kv_cache_config, self._assembly
        tensors = {
            name: group_kernel_blocks(kv_caches[name], config.num_blocks) for group in assembly.groups for name in group.layers
        }
        modules = self._vllm_config.compilation_config.static_forward_context
        self._weights = CurrentWeights(modules[name] for name in tensors if name in modules)
        self._worker = WorkerSide(
            assembly.groups, assembly.host_spec, tensors,
            host_bytes=assembly.host_bytes, name=assembly.shared_name(self._vllm_config.parallel_config.rank),
        )  # fmt: skip

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._metadata()
        self._side().start(metadata.loads)
        if metadata.weights_question:
            assert self._weights is not None, "no KV caches were registered"
            rank = int(self._vllm_config.parallel_config.rank)
            self._weights_answer[rank] = (metadata.weights_question, self._weights.name())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads run between steps

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # saves begin when the whole step was computed

    def wait_for_save(self) -> None:
        """vLLM calls this in a `finally`: if the step raised an exception, its blocks must not be saved."""
        metadata = self._metadata()
        if sys.exc_info()[0] is not None:
            self._side().refuse(metadata.saves, "the step that should have computed it failed")
            return
        self._side().start(metadata.saves)
        self._computed_step = metadata.step

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._ended = ended = self._side().poll()
        return KVConnectorTransferResults(finished_recving=set(ended.loaded), failed_recving=set(ended.failed))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        weights, self._weights_answer = self._weights_answer, {}
        return WorkerAnswers(self._ended.answers, self._computed_step, weights)

    # ---- both ---------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.WORKER:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.close()
            return
        shared, self._shared = self._shared, []
        if shared:
            if self._events is not None:
                self._events.close()
            self._scheduler.close(ended_in({rank: block.ended_job for rank, block in enumerate(shared)}))
            if self._store is not None:
                self._store.close()

    # ---- inside -------------------------------------------------------------------------------------

    def _side(self) -> WorkerSide:
        assert self._worker is not None, "no KV caches were registered"
        return self._worker

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), f"metadata of {type(metadata).__name__}"
        return metadata


def _is_pausing() -> bool:
    """Whether vLLM pauses, for `sleep` or a change of weights. Only a function on the stack distinguishes that call of
    `reset_cache` from an explicit reset.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == PAUSE and frame.f_globals.get("__name__", "").startswith("vllm."):
            return True
    return False


class _Pool:
    """vLLM's block pool. Touching a block adds a reference."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
