"""vLLM's connector interface over the two sides. The only file that imports vLLM; translates, and decides nothing.

vLLM makes one object for its scheduler and one for each worker, in processes of their own or in one. Every method is called on
the main thread of its process. Written for vLLM 0.32.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
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

from stepwell.base.config import CacheConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.meters import SystemClock
from stepwell.base.prompt import Namespace
from stepwell.cache.build import build_cache, layouts_for
from stepwell.connectors.vllm.engine_config import check_engine, groups_of, model_identity
from stepwell.connectors.vllm.groups import Names, spec_of
from stepwell.connectors.vllm.orders import Answers, Order, StepOrders, merged
from stepwell.connectors.vllm.scheduler_side import Computing, SchedulerSide, Seen, ended_in
from stepwell.connectors.vllm.settings import Settings, read_settings
from stepwell.connectors.vllm.worker_side import Ended, WorkerSide
from stepwell.connectors.weight_files import Adapters
from stepwell.store.api import Store
from stepwell.store.registry import open_store
from stepwell.transfer.copy_engine import PageMemory
from stepwell.transfer.shared_memory import SharedBlock


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """To the workers, with a step."""

    step: int = 0
    loads: list[Order] = field(default_factory=list)
    saves: list[Order] = field(default_factory=list)


@dataclass
class WorkerAnswers(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers, with a step's output."""

    answers: Answers
    step: int  # the last one that was computed

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerAnswers), f"answers of {type(other).__name__}"
        return WorkerAnswers(merged(self.answers, other.answers), min(self.step, other.step))


class StepwellConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A tiered cache with exact resumption for attention, sliding windows and recurrent state."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config, failure_policy=transfer.kv_load_failure_policy)
        check_engine(vllm_config)
        self._groups = groups_of(kv_cache_config, is_cpu=current_platform.is_cpu())
        self._page_tokens, _ = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._num_ranks: int = vllm_config.parallel_config.tensor_parallel_size
        self._worker: WorkerSide | None = None
        self._model: str | None = None  # its name since the cache was reset
        self._computed_step = 0
        self._ended = Ended(answers={}, loaded=frozenset(), failed=frozenset())
        if role is KVConnectorRole.SCHEDULER:
            self._shared = self._open_shared()
            self._scheduler, self._store = self._build(self._settings)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: nobody waits for what is saved

    # ---- the scheduler's side -----------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind(_Pool(gpu_block_pool))

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request.request_id, self._seen(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._scheduler.found(request.request_id, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        table = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.allocated(request.request_id, table, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        stored = min(self._scheduler.sources(request.request_id).store, num_external_tokens)
        found = {CacheHitSource.HOST: num_external_tokens - stored, CacheHitSource.DISK: stored}
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state, requests = scheduler_output.kv_connector_block_state, self._requests
        computing = [
            _computing(requests[name], tokens, state)
            for name, tokens in scheduler_output.num_scheduled_tokens.items()
            if name in requests
        ]
        orders = self._scheduler.step(computing)
        return StepMetadata(
            step=self._scheduler.num_steps,
            loads=[order for order in orders if order.request is not None],
            saves=[order for order in orders if order.request is None],
        )

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, WorkerAnswers):
            self._scheduler.answered(said.answers, step=said.step)

    def request_finished_all_groups(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._scheduler.finished(request.request_id)
        return False, None  # saves have pinned what they read

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.pins_blocks  # waiting a step is cheaper than preempting

    def has_pending_push_work(self) -> bool:
        return self._scheduler.is_busy

    def reset_cache(self) -> bool:
        """The weights may be others from now on: nothing cached or stored before is found again."""
        self._model = f"{self._scheduler.cache.namespace.model} since reset {token_hex(16)}"
        self._scheduler.reset(model=self._model)
        return True

    # ---- a worker's side ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        tensors = {
            name: group_kernel_blocks(kv_caches[name], config.num_blocks) for group in self._groups for name in group.layers
        }
        self._worker = WorkerSide(
            self._groups, spec_of(self._groups, page_tokens=self._page_tokens, row_order=""), tensors,
            host_bytes=self._host_bytes(), name=self._shared_name(self._vllm_config.parallel_config.rank),
        )  # fmt: skip

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._side().start(self._metadata().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads run between steps

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # saves begin when the whole step was computed

    def wait_for_save(self) -> None:
        """Is called in a `finally`: when the step's computation raised, its blocks hold nothing that may be saved."""
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
        return WorkerAnswers(self._ended.answers, self._computed_step)

    # ---- both ---------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.WORKER:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.close()
            return
        shared, self._shared = self._shared, []
        if shared:
            self._scheduler.close(ended_in({rank: block.ended_job for rank, block in enumerate(shared)}))
            if self._store is not None:
                self._store.close()

    # ---- inside -------------------------------------------------------------------------------------

    def _build(self, settings: Settings) -> tuple[SchedulerSide, Store | None]:
        self._requests: dict[str, Any] = {}
        self._adapters = Adapters()
        meanings = {block.meaning for block in self._shared}
        if len(meanings) > 1:
            raise ConfigError("workers of this engine lay their KV caches out differently: use one attention backend on all")
        row_order = f"vllm {self._kv_cache_config.kv_cache_layout} {meanings.pop()}"
        spec = spec_of(self._groups, page_tokens=self._page_tokens, row_order=row_order)
        vocab = self._vllm_config.model_config.get_vocab_size()
        config = CacheConfig(
            device_bytes=None, host_bytes=self._host_bytes(), placement=settings.placement, vocab_size=max(vocab, 1)
        )
        layout, clock = layouts_for(spec, config)[Tier.HOST], SystemClock()
        memories = [PageMemory(spec, layout, block.view) for block in self._shared]
        orders = StepOrders(self._num_ranks, clock)
        cache = build_cache(
            spec, config, executor=orders, host_pages=memories, clock=clock, model=self._identity()
        )  # fmt: skip
        store = None
        if settings.store is not None:
            store = open_store(settings.store, options=settings.store_options)
            cache.store.attach(store, settings.store_config)
        return SchedulerSide(cache, orders, Names(self._groups, spec), clock, audit=settings.audit), store

    def _open_shared(self) -> list[SharedBlock]:
        spec = spec_of(self._groups, page_tokens=self._page_tokens, row_order="")
        config = CacheConfig(device_bytes=None, host_bytes=self._host_bytes())
        size = layouts_for(spec, config)[Tier.HOST].size_bytes
        return [SharedBlock.open(self._shared_name(rank), size) for rank in range(self._num_ranks)]

    def _identity(self) -> str:
        return model_identity(
            self._vllm_config, self._settings, version=vllm.__version__, device_type=current_platform.device_type
        )

    def _host_bytes(self) -> int:
        return self._settings.host_bytes // self._num_ranks

    def _shared_name(self, rank: int) -> str:
        whose = f"{self._kv_transfer_config.engine_id} {self._vllm_config.parallel_config.data_parallel_rank}"
        return f"{blake2b(whose.encode(), digest_size=12).hexdigest()}-{rank}"

    def _side(self) -> WorkerSide:
        assert self._worker is not None, "no KV caches were registered"
        return self._worker

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), f"metadata of {type(metadata).__name__}"
        return metadata

    def _seen(self, request: Any) -> Seen:
        self._requests[request.request_id] = request
        return Seen(
            tokens=lambda start: list(request.all_token_ids[start:]),
            namespace=self._namespace(request),
            may_read=not request.skip_reading_prefix_cache,
        )

    def _namespace(self, request: Any) -> Namespace | None:
        """Who may share what is cached of a request; None where its tokens do not say what its state depends on."""
        if request.mm_features or request.prompt_embeds is not None or request.pooling_params is not None:
            return None
        if request.resumable:  # its tokens are exchanged while it runs, and later ones may bring media
            return None
        lora, adapter = request.lora_request, None
        if lora is not None:
            digest = self._adapters.digest(lora.lora_int_id, lora.lora_path)
            if digest is None:
                return None
            adapter = f"{lora.lora_name} {digest}"
        cache = self._scheduler.cache
        return replace(cache.namespace, model=self._model or cache.namespace.model, adapter=adapter, salt=request.cache_salt)


class _Pool:
    """vLLM's block pool: a touched block has one reference more."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


def _computing(request: Any, tokens: int, state: Any) -> Computing:
    name, computed = request.request_id, request.num_computed_tokens
    offered = {(group, boundary): block for group, block, boundary in state.boundary_state_offloads.get(name, ())}
    return Computing(
        request=name, computed=computed, upto=computed + tokens, known=request.num_tokens,
        table=lambda: state.get_block_ids(name), offered=offered,
    )  # fmt: skip
