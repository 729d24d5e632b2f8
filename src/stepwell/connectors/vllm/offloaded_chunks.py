"""Names of vLLM's offloaded chunks in a store, and the facts that identify their contents. Imports no vLLM.

vLLM's key   block hash (tokens before it, salt, media, embeddings, an adapter's name) and number of the group
our name     the same with the adapter's weights, inside a space of model, layout and settings
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from stepwell.base.errors import ConfigError
from stepwell.connectors.vllm.chunk_store import Chunk
from stepwell.connectors.vllm.engine_config import model_identity, must_load_and_save
from stepwell.store.api import NO_PARENT

TIER = "StepwellTier"
GROUP_BYTES = 4  # at the end of vLLM's keys


@dataclass(slots=True)
class _Request:
    adapter: str | None  # digest, empty without an adapter; None: not cached
    names: dict[tuple[int, int], bytes] = field(default_factory=dict)  # names of its chunks, by group and end


class OffloadedChunks:
    """Names for the chunks of open requests. One thread at a time."""

    def __init__(self, config: Any) -> None:
        """`config` is vLLM's OffloadingConfig."""
        per_chunk = config.cache.blocks_per_chunk
        self._tokens = {group.group_id: group.tokens_per_block * per_chunk for group in config.groups}
        self._requests: dict[str, _Request] = {}
        self.num_refused = 0

    def arrived(self, request: str, adapter: str | None) -> None:
        """A new request with the digest of its adapter's weights; None if they cannot be identified."""
        self._requests[request] = _Request(adapter)
        self.num_refused += adapter is None

    def refuse_open(self) -> None:
        """Stops caching for open requests, whose weights may have changed."""
        for request in self._requests.values():
            request.adapter = None

    def finished(self, request: str) -> None:
        self._requests.pop(request, None)

    def name(self, key: bytes, context: Any) -> bytes | None:
        """The name of a chunk of a request (vLLM's ReqContext), from vLLM's key; None if it must not be cached."""
        request = self._requests.get(context.req_id)
        if request is None or request.adapter is None:
            return None
        name = blake2b(key, digest_size=32, person=b"stepwell-chunk", key=request.adapter.encode()).digest()
        end = context.get_offload_key_position(key)
        if end is not None:
            request.names[_group(key), end] = name
        return name

    def chunks(self, keys: Collection[bytes], rows: Sequence[int], context: Any) -> list[Chunk] | None:
        """Chunks in rows of the host tier, with their parents; None if they must not be cached."""
        named = [(key, self.name(key, context), row) for key, row in zip(keys, rows, strict=True)]
        chunks = [self._chunk(key, name, row, context) for key, name, row in named if name is not None]
        return chunks if len(chunks) == len(named) else None

    def _chunk(self, key: bytes, name: bytes, row: int, context: Any) -> Chunk:
        end = context.get_offload_key_position(key)
        if end is None:
            return Chunk(name, row)
        group = _group(key)
        tokens, names = self._tokens.get(group, 1), self._requests[context.req_id].names
        return Chunk(name, row, names.get((group, end - tokens), NO_PARENT), max(end - 1, 0) // tokens)


def _group(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def must_be_offloadable(vllm_config: Any) -> None:
    """Raises ConfigError for settings without effect, or under which chunks would get wrong names."""
    must_load_and_save(vllm_config)
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    tiers = extra.get("secondary_tiers")
    if "spec_name" not in extra or not isinstance(tiers, list) or TIER not in [_type(tier) for tier in tiers]:
        raise ConfigError(
            'StepwellOffloadingConnector needs "spec_name": "TieringOffloadingSpec" and "secondary_tiers": [{"type": '
            '"StepwellTier", "module_path": "stepwell.connectors.vllm", "store": "log:/var/cache/stepwell", "store_budget": '
            '"1TiB"}] in kv_connector_extra_config, next to "cpu_bytes_to_use"'
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256"):
        raise ConfigError(
            f"vLLM's hashes by {algorithm} can be made to collide, and may differ from start to start: "
            "use --prefix-caching-hash-algo sha256 or sha256_cbor, since chunks are stored under them"
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError("Stepwell does not support speculative decoding yet: leave speculative_config out")


def _type(tier: Any) -> Any:
    return tier.get("type") if isinstance(tier, dict) else None


def engine_facts(vllm_config: Any, kv_cache_config: Any, identity: str | None, *, version: str, device_type: str) -> str:
    """The weights, settings and layers that must agree before chunks may be shared. Raises ConfigError."""
    model = model_identity(vllm_config, identity, version=version, device_type=device_type)
    groups = [(list(group.layer_names), repr(group.kv_cache_spec)) for group in kv_cache_config.kv_cache_groups]
    order = [list(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors]
    hashes, runner = vllm_config.cache_config.prefix_caching_hash_algo, vllm_config.use_v2_model_runner
    return repr((model, groups, order, kv_cache_config.kv_cache_layout, kv_cache_config.kv_tp_replicas, hashes, runner))


def tier_facts(config: Any, row_bytes: int) -> str:
    """The layout of chunks in a row of the host tier, from vLLM's OffloadingConfig."""
    groups = [(group.group_id, group.tokens_per_block, list(group.layer_names)) for group in config.groups]
    parallel = config.parallel
    ranks = (parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    layout = (config.kv_cache_layout, config.canonical_layout, config.replicated_layout, config.worker_kv_bytes_per_block)
    cache = (config.cache.tokens_per_hash, config.cache.blocks_per_chunk)
    return repr(("chunks-1", config.model.dtype, groups, ranks, layout, cache, row_bytes))
