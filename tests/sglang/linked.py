"""SGLang's own tree and device pools with Stepwell's linker below them: a prompt saved, and resumed as the scheduler does it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.server_args import ServerArgs
from stack import PAGE, WINDOW, Stack, caches, index_of, insert, rows_of, state_of


@contextmanager
def linked(
    kind: str,
    directory: Path | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (2, 64),
    host_memory: str = "64MiB",
    **more: object,
) -> Iterator[Stack]:
    """A cache with a linker, and closed afterwards."""
    args = ServerArgs(model_path="dummy", served_model_name="tiny", page_size=PAGE)
    extra: dict[str, object] = {"host_memory": host_memory, "fetch_wait_s": 60.0, **more}
    if directory is not None:
        extra |= {"store": f"log:{directory}", "store_budget": "1GiB", "identity": "tiny"}
    config = {"linker": "StepwellLinker", "linker_module_path": "stepwell.connectors.sglang", "linker_extra_config": extra}
    with caches(args, kind, dtype, heads=heads) as (made, params):
        linker = create_unified_cache_linker(args, params, backend="dynamic", config=config, components=set(made.tree.components))
        made.tree.init_cache_linker(linker)
        made.pool.register_layer_transfer_counter(linker.layer_done_counter)
        try:
            yield made
            linker.audit()
        finally:
            made.tree.release_host_resources()


def linker_of(made: Stack) -> Any:
    return made.tree.linker.cache_linker


def save(made: Stack, tokens: array[int]) -> None:
    """A prompt, computed and saved: on the host, and in the store where there is one."""
    insert(made, tokens)
    made.settle(lambda: not made.tree.linker.pending_offloads and not linker_of(made).stats()["to_store"])


def evict(made: Stack) -> None:
    """Nothing is left of it on the device."""
    made.tree.evict(EvictParams(num_tokens=1 << 20, swa_num_tokens=1 << 20, mamba_num=1 << 20))
    for _, layer, _ in made.buffers():
        layer.zero_()
    for _, tensor in made.states():
        tensor.zero_()
    if made.kind == "dsa":
        for layer in made.pool.index_k_with_scale_buffer:
            layer.zero_()


def found(made: Stack, tokens: array[int], rid: str = "request") -> int:
    """How many tokens SGLang learns of."""
    return int(_match(made, tokens, _request(rid)).host_hit_length)


def resume(made: Stack, tokens: array[int], rid: str = "request") -> tuple[int, bool, bool]:
    """Tokens that were loaded, whether SGLang takes them as loaded, and whether every byte is the one that was saved."""
    request = _request(rid)
    match = _match(made, tokens, request)
    if not match.host_hit_length:
        return 0, True, True
    request.last_node = match.last_device_node
    tree, hit = made.tree, match.host_hit_length
    params = InitLoadBackParams(best_match_node=match.best_match_node, host_hit_length=hit, req=request)
    loaded, _ = tree.init_load_back(params)
    slots = tree.linker.private_load_indices[rid]
    counter = linker_of(made).layer_done_counter
    counter.set_consumer(tree.ready_to_load_host_cache())
    for layer in range(counter.num_layers):
        counter.wait_until(layer)  # as pools do before they are read
    failed = tree.linker.finish_loads()
    assert loaded == len(slots)
    return loaded, not failed, _is_same(made, slots, request)


def _request(rid: str) -> Any:
    return SimpleNamespace(rid=rid, last_node=None, kv=ReqKvInfo(), session=None, swa_branching_seqlen=None)


def _match(made: Stack, tokens: array[int], request: Any) -> Any:
    match = made.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens), req=request))
    assert match.device_prefix_len == 0
    return match


def _is_same(made: Stack, slots: torch.Tensor, request: Any) -> bool:
    end = len(slots)
    for name, layer, window in made.buffers():
        first = max(0, end - WINDOW) if window else 0
        if not torch.equal(layer[made.slots(slots, window)][first:], rows_of(name, layer)[first:end]):
            return False
    if made.kind == "dsa":
        for at, layer in enumerate(made.pool.index_k_with_scale_buffer):
            if not torch.equal(layer[slots[::PAGE] // PAGE], index_of(at, layer)[: end // PAGE]):
                return False
    slot = request.kv.mamba_pool_idx
    return all(torch.equal(tensor[:, slot : slot + 1], state_of(name, tensor, end)) for name, tensor in made.states())
