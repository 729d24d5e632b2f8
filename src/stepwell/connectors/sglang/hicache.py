"""SGLang's storage interface (`HiCacheStorage`, 0.5.23) over `Pages`. Imports SGLang.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "stepwell", "module_path": "stepwell.connectors.sglang", "class_name": "StepwellHiCache",
        "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "store": "log:/var/cache/stepwell", "store_budget": "100GiB"}'

SGLang decides what is stored and when. It ends its processes without closing anything, so nothing relies on `close`. Called on
its scheduler, prefetch and backup threads.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from stepwell.base.errors import StoreError
from stepwell.connectors.sglang.host_pool import ANCHOR
from stepwell.connectors.sglang.pages import Pages, Want, window_of
from stepwell.connectors.sglang.settings import open_for_rank, ranks_of, settings_of, weights_of

log = logging.getLogger(__name__)
_MOST_MEASURED = 1000  # calls between two reports


class StepwellHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang may not be installed where types are checked
    """One rank's backend. Raises ConfigError or StoreError that says what to do, which stops SGLang's start."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._settings = settings_of(storage_config.extra_config)
        self._identity = weights_of(_server_args(), self._settings.identity)
        self._store = open_for_rank(self._settings, ranks_of(storage_config), self._identity)
        self._pages: Pages | None = None
        self._measuring = bool(storage_config.enable_storage_metrics)
        self._moved: dict[str, deque[tuple[int, float]]] = {verb: deque(maxlen=_MOST_MEASURED) for verb in ("read", "write")}
        self._warned = False

    # ---- memory -----------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        ranks = ranks_of(self._config, getattr(mem_pool_host, "layout", ""))
        model = self._config.model_name or ""
        self._pages = Pages(self._store, ranks, model=model, identity=self._identity, version=sglang.__version__)
        self._learn(ANCHOR, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._learn(str(host_pool_name), host_pool)

    def _learn(self, name: str, pool: Any) -> None:
        learned = self.pages.learn(name, pool)
        if self._config.is_mla_model and self._config.tp_size > 1 and learned.by_rank and name.startswith("draft"):
            log.warning("SGLang saves pool %r on rank 0 only, although it differs by rank: other ranks will not find it", name)

    @property
    def pages(self) -> Pages:
        assert self._pages is not None, "SGLang must register its anchor pool first"
        return self._pages

    # ---- pages of KV: interface v1 ----------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self.pages.leading(ANCHOR, keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._measured("read", ANCHOR, keys, host_indices, ())

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._measured("write", ANCHOR, keys, host_indices, self._before(extra_info))

    # ---- pages of every pool: interface v2 --------------------------------------------------------

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> PoolTransferResult:
        gating = [
            each for each in pool_transfers or () if each.hit_policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)
        ]
        wants = [Want(str(each.name), window_of(each)) for each in gating]
        found = self.pages.find(keys, wants)
        names = {str(each.name): each.name for each in gating}
        hits = {names.get(pool, pool): pages for pool, pages in found.pages.items()}
        return PoolTransferResult(max(found.restorable, default=0), hits, found.restorable)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {each.name: self._measured("read", str(each.name), each.keys or [], each.host_indices, ()) for each in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        before = self._before(extra_info)
        return {
            each.name: self._measured("write", str(each.name), each.keys or [], each.host_indices, before) for each in transfers
        }

    # ---- the rest ---------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError('set "interface_v1": 1 in --hicache-storage-backend-extra-config')

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> None:
        self.get("")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> None:
        self.get(key)

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> None:
        self.get("")

    def clear(self) -> None:
        """Deletes the stored pages of this model as served here, and nothing else in the store.

        Raises StoreError if it cannot; SGLang then reports that the store was not cleared.
        """
        log.info("deleted %d stored values", self.pages.clear())

    def get_stats(self) -> Any:
        """Transfers since the last call, if SGLang's metrics are on. Does not query the store."""
        if not self._measuring or not any(self._moved.values()):
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        read, written = (_drain(self._moved[verb]) for verb in ("read", "write"))
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in read], prefetch_bandwidth=[speed for _, speed in read],
            backup_pgs=[pages for pages, _ in written], backup_bandwidth=[speed for _, speed in written],
        )  # fmt: skip

    def close(self) -> None:
        try:
            self._store.close()
        except StoreError as error:
            log.warning("%s", error)

    # ---- inside -----------------------------------------------------------------------------------

    def _measured(self, verb: str, pool: str, keys: list[str], host_indices: Any, before: Any) -> list[bool]:
        began_s, known = time.monotonic(), self.pages.pool(pool)
        if verb == "read":
            good = self.pages.read(pool, keys, host_indices)
        else:
            good = self.pages.write(pool, keys, host_indices, before)
        if self._measuring and any(good):
            moved = sum(known.sizes) * known.values_per_page * good.count(True)
            self._moved[verb].append((good.count(True), moved / max(time.monotonic() - began_s, 1e-6) / 1e9))
        return good

    def _before(self, extra_info: Any) -> list[str]:
        keys = extra_info.prefix_keys if extra_info is not None else None
        if keys is None and not self._warned:
            self._warned = True
            log.warning(
                'add "hicache_storage_pass_prefix_keys": true to --hicache-storage-backend-extra-config: without it Stepwell '
                "does not know the parents of pages, and may evict the beginning of a prompt before its end"
            )
        return keys or []


def _server_args() -> Any:
    """SGLang's start arguments; None outside of a server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, RuntimeError, ValueError, LookupError, AttributeError):
        return None


def _drain(moved: deque[tuple[int, float]]) -> list[tuple[int, float]]:
    return [moved.popleft() for _ in range(len(moved))]
