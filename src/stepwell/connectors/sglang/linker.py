"""SGLang's external linker (`UnifiedCacheLinker`, 0.5.23): host memory and a verified store right below its device pools.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "StepwellLinker", "linker_module_path": "stepwell.connectors.sglang",
        "linker_extra_config": {"host_memory": "64GiB", "store": "log:/var/cache/stepwell", "store_budget": "500GiB"}}'

SGLang decides what is saved and where it is loaded; the linker reports how much of a prompt can be restored, and keeps those
pages. All calls come on the scheduler's thread, in the same order on every rank. Imports SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import sglang
import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.meters import SystemClock
from stepwell.connectors.sglang.device_pools import KV, MAMBA, SWA, Barrier, DeviceCopies, device_pools, is_replicated, num_layers
from stepwell.connectors.sglang.fetches import Fetches
from stepwell.connectors.sglang.host_tier import HostTier
from stepwell.connectors.sglang.pages import Pages, Want, window_of
from stepwell.connectors.sglang.settings import Ranks, linker_settings_of, open_for_rank, weights_of
from stepwell.connectors.sglang.transfers import LayerProgress, Loads, Saves
from stepwell.verified.store import VerifiedStore

log = logging.getLogger(__name__)
_POOL_OF = {"FULL": KV, "SWA": SWA, "MAMBA": MAMBA}  # components of SGLang's tree


class StepwellLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang may not be installed where types are checked
    """One rank's linker. Raises ConfigError or StoreError that says what to do, which stops SGLang's start."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: dict[str, Any], forward_stream: Any = None
    ) -> None:
        settings, clock = linker_settings_of(extra_config), SystemClock()
        self.forward_stream = forward_stream
        self._device_pools = _pools_of(params, components)
        self._device = self._device_pools[0].buffers[0].pages.device
        self._ranks = _ranks_of(params, replicated=is_replicated(self._device_pools))
        self._may_refuse = not _has_peers(params)
        self._model = str(server_args.served_model_name or "")
        self._identity = weights_of(server_args, settings.store.identity if settings.store else None)
        self._store: VerifiedStore | None = None
        self._host = HostTier(self._device_pools, settings.host_bytes, clock, pinned=self._device.type == "cuda")
        self.pools = self._host.pools
        self.layer_done_counter = LayerProgress(num_layers(self._device_pools))
        if MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._loads = Loads(self._device_pools, self._host, self.layer_done_counter, DeviceCopies(self._device), clock)
        self._saves = Saves(self._device_pools, self._host, DeviceCopies(self._device), clock)
        self._fetches = Fetches(self._host, wait_s=settings.fetch_wait_s, clock=clock)
        self._stored: Pages | None = None
        self._store_s = settings.store.deadline_s if settings.store else 0.0
        self._is_closed = False
        if settings.store is not None:
            self._store = open_for_rank(settings.store, self._ranks, self._identity)
            self._stored = self._pages(self._store, self._identity)

    # ---- a request ----------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Lengths that can be loaded from the host now, after fetching from the store for `fetch_wait_s` at most."""
        by_pool = {str(each.name): each for each in transfers}
        keys = by_pool[KV].keys if KV in by_pool else None
        if not keys or by_pool.keys() != self.pools.keys():
            return []
        wants = [Want(name, window_of(by_pool[name])) for name in self.pools]
        if self._stored is not None and len(keys) not in self._host.lengths(keys, wants):
            self._fetches.wait_for(self._stored, rid, keys, wants)
        return self._host.reserve(rid, keys, wants)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queues a load. If pages are gone, a single rank returns False, and the request is computed; with several ranks, which
        must agree, the request fails later.
        """
        wanted = {str(each.name): list(each.keys) for each in transfers if each.keys}
        indices = {str(each.name): each.device_indices for each in transfers if each.keys}
        if not wanted:
            return False
        self._fetches.drop(rid)
        claim = self._host.claim(rid, wanted)
        if claim is None and self._may_refuse:
            return False
        self._loads.queue(rid, claim, indices)
        return True

    def start_layer_wise_loading(self) -> int:
        return self._loads.start(self._ready())

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._loads.cancel(rid)

    # ---- what was computed --------------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Starts a save, even without space, because all ranks must agree."""
        wanted = {str(each.name): (list(each.keys), each.device_indices) for each in transfers if each.keys}
        if KV not in wanted:
            return False
        self._saves.begin(wanted, self._written(), self._stored)
        return True

    def num_completed_offloads(self) -> int:
        return self._saves.num_ended

    def pop_completed_offload(self) -> bool:
        return self._saves.pop_ended()

    # ---- the rest -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Clears the host, and makes stored pages unreachable for this process: SGLang also resets after a change of weights.

        Stored pages remain for servers that start later.
        """
        self._loads.quiesce()
        self._saves.quiesce()
        self._host.clear()
        self._fetches.clear()
        self.layer_done_counter.reset()
        if self._store is not None:
            self._stored = self._pages(self._store, f"{self._identity} {uuid4().hex}")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loads.quiesce()
        self._saves.quiesce()
        self._saves.close(store_s=self._store_s)
        self._loads.close()
        self._fetches.close()
        log.info("Stepwell's linker: %s", self.stats())
        try:
            if self._store is not None:
                self._store.close()
        except StoreError as error:
            log.warning("%s", error)

    def stats(self) -> dict[str, int]:
        """Counts of pages."""
        pools = self._host.pools.values()
        return {
            "saved": self._saves.pages, "loaded": self._loads.pages, "fetched": self._fetches.pages,
            "evicted": sum(pool.evicted for pool in pools), "to_store": self._saves.num_waiting,
            "not_stored": self._saves.skipped_pages,
            "dropped_reservations": self._host.dropped_reservations, "store_not_asked": self._fetches.not_asked,
        }  # fmt: skip

    def audit(self) -> None:
        """Asserts that every page of host memory is accounted for."""
        self._host.audit()

    # ---- inside -------------------------------------------------------------------------------------

    def _pages(self, store: VerifiedStore, identity: str | None) -> Pages:
        pages = Pages(store, self._ranks, model=self._model, identity=identity, version=sglang.__version__)
        for name, pool in self._host.pools.items():
            pages.learn(name, pool)
        return pages

    def _written(self) -> Barrier:
        """A function that returns when everything computed so far is in the device pools."""
        return _synchronized(self.record_offload_ready() if self._device.type == "cuda" else [])

    def _ready(self) -> Barrier:
        """A function that returns when the device pages for loads are no longer in use."""
        if self._device.type != "cuda":
            return _synchronized([])
        event = torch.cuda.Event()
        event.record()
        return _synchronized([event])


def _synchronized(events: Sequence[Any]) -> Barrier:
    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def _pools_of(params: Any, components: Any) -> list[Any]:
    names = {component.name for component in components}
    if names - _POOL_OF.keys():
        raise ConfigError(
            f"Stepwell's linker supports {', '.join(_POOL_OF)}, and this model's cache also has {names - _POOL_OF.keys()}"
        )
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise ConfigError("Stepwell's linker does not support draft models: serve without speculative decoding")
    if params.pp_size > 1:
        raise ConfigError("SGLang's linkers agree on lengths among ranks of one stage only: serve with --pp-size 1")
    if get_parallel().attn_dcp_size > 1:
        raise ConfigError("Stepwell's linker does not support pages cut by context parallelism: serve with --dcp-size 1")
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    pools = device_pools(kvcache, params.req_to_token_pool, page_tokens=params.page_size, states="MAMBA" in names)
    found, wanted = {pool.name for pool in pools}, {_POOL_OF[name] for name in names}
    if found != wanted:
        raise ConfigError(
            f"SGLang's tree has {sorted(wanted)} for this model, but its pools are {sorted(found)}: this is not supported"
        )
    return pools


def _ranks_of(params: Any, *, replicated: bool) -> Ranks:
    parallel = get_parallel()
    group, rank, size = params.attn_tp_cache_group or params.tp_cache_group, 0, int(parallel.tp_size)
    if group is not None and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    return Ranks(
        tp_rank=rank, tp_size=size, cp_rank=params.attn_cp_rank, cp_size=params.attn_cp_size,
        dp_rank=int(parallel.attn_dp_rank or 0), replicated=replicated,
    )  # fmt: skip


def _has_peers(params: Any) -> bool:
    groups = (params.tp_cache_group, params.attn_tp_cache_group, params.attn_cp_cache_group)
    return any(group is not None and torch.distributed.get_world_size(group=group) > 1 for group in groups)
