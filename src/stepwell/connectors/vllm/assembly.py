"""Puts one engine's scheduler side together: the cache, the host memory it shares with workers, the store. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from stepwell.base.config import CacheConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.meters import SystemClock
from stepwell.base.spec import ModelSpec
from stepwell.cache.build import build_cache, layouts_for
from stepwell.connectors.vllm.engine_config import model_identity
from stepwell.connectors.vllm.groups import Group, Names, spec_of
from stepwell.connectors.vllm.orders import StepOrders
from stepwell.connectors.vllm.scheduler_side import SchedulerSide
from stepwell.connectors.vllm.settings import Settings
from stepwell.store.api import Store
from stepwell.store.key_file import read_store_key
from stepwell.store.registry import open_store
from stepwell.transfer.copy_engine import PageMemory
from stepwell.transfer.shared_memory import SharedBlock

# How fast prompts are computed, until the first one was: more than most models reach, so that nothing is fetched which would be
# computed sooner. A GPU computes some first prompts that the store has; a CPU hardly ever does.
FIRST_TOKENS_PER_S = {"cpu": 2_000.0}
FIRST_TOKENS_PER_S_ELSEWHERE = 200_000.0
FIRST_PASS_TOKENS = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What an engine's configuration and the settings come to. The same on the scheduler's side and on every rank's."""

    vllm_config: Any
    kv_cache_config: Any
    settings: Settings
    groups: tuple[Group, ...]
    page_tokens: int
    version: str  # of vLLM
    device_type: str

    @property
    def num_ranks(self) -> int:
        return int(self.vllm_config.parallel_config.tensor_parallel_size)

    @property
    def vocab_size(self) -> int:
        return max(int(self.vllm_config.model_config.get_vocab_size()), 1)

    @property
    def host_bytes(self) -> int:
        """Of one rank."""
        return self.settings.host_bytes // self.num_ranks

    @property
    def host_spec(self) -> ModelSpec:
        """For sizes alone: how rows lie in blocks is not known before workers have said so."""
        return spec_of(self.groups, page_tokens=self.page_tokens, row_order="")

    def shared_name(self, rank: int) -> str:
        """Of the host memory that a rank makes and the scheduler's side opens."""
        engine = self.vllm_config.kv_transfer_config.engine_id
        whose = f"{engine} {self.vllm_config.parallel_config.data_parallel_rank}"
        return f"{blake2b(whose.encode(), digest_size=12).hexdigest()}-{rank}"

    def open_shared(self) -> list[SharedBlock]:
        """Every rank's host memory, which workers made before. Raises ConfigError."""
        config = CacheConfig(device_bytes=None, host_bytes=self.host_bytes)
        size = layouts_for(self.host_spec, config)[Tier.HOST].size_bytes
        return [SharedBlock.open(self.shared_name(rank), size) for rank in range(self.num_ranks)]

    def scheduler_side(self, shared: Sequence[SharedBlock]) -> tuple[SchedulerSide, Store | None]:
        """The cache beside the scheduler, and its store, which is the caller's to close. Raises ConfigError."""
        settings = self.settings
        spec = self._spec(shared)
        config = CacheConfig(device_bytes=None, host_bytes=self.host_bytes, placement=settings.placement)
        layout, clock = layouts_for(spec, config)[Tier.HOST], SystemClock()
        memories = [PageMemory(spec, layout, block.view) for block in shared]
        orders = StepOrders(self.num_ranks, clock)
        identity = model_identity(self.vllm_config, settings.identity, version=self.version, device_type=self.device_type)
        cache = build_cache(spec, config, executor=orders, host_pages=memories, clock=clock, model=identity)
        store = None
        if settings.store is not None:
            key = read_store_key(settings.store_key_file) if settings.store_key_file is not None else None
            store = open_store(settings.store, options=settings.store_options)
            cache.store.attach(store, replace(settings.store_config, key=key))
            speed = FIRST_TOKENS_PER_S.get(self.device_type, FIRST_TOKENS_PER_S_ELSEWHERE)
            cache.computed([(0, FIRST_PASS_TOKENS)], FIRST_PASS_TOKENS / speed)
        return SchedulerSide(cache, orders, Names(self.groups, spec), clock, audit=settings.audit), store

    def _spec(self, shared: Sequence[SharedBlock]) -> ModelSpec:
        meanings = {block.meaning for block in shared}
        if len(meanings) > 1:
            raise ConfigError("workers of this engine lay their KV caches out differently: use one attention backend on all")
        row_order = f"vllm {self.kv_cache_config.kv_cache_layout} {meanings.pop()}"
        return spec_of(self.groups, page_tokens=self.page_tokens, row_order=row_order)
