"""One process of a prompt under Transformers: the first computes it and leaves it behind, the second resumes it. Prints JSON.

Beside it, what people do without a prompt cache: `torch.save` of the cache object, whole and for this very prompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from stepwell import PrefetchPolicy, StoreConfig
from stepwell.connectors.transformers import PromptCache

PEER = "past.pt"
CPU = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
CUDA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHARED = {"head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 1 << 17}
MAMBA = {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}


def model_of(family: str, device: str) -> Any:
    sizes = {**(CUDA if device == "cuda" else CPU), **SHARED}
    classes = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes)),
        "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**sizes, sliding_window=512)),
        "falcon_h1": (transformers.FalconH1ForCausalLM, transformers.FalconH1Config(**sizes, **MAMBA)),
    }
    make, config = classes[family]
    torch.manual_seed(0)
    return make(config).eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def digest(prompts: PromptCache, past: Any) -> str:
    hashed = xxhash.xxh3_128()
    for tensor in prompts._layout.tensors:
        hashed.update(tensor.read(past).contiguous().cpu().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def live(family: str, device: str, tokens: int, directory: Path) -> dict[str, Any]:
    model = model_of(family, device)
    ids = torch.randint(0, SHARED["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    wait = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0)
    store = {"store": f"log:{directory}/log", "store_options": {"budget": "8GiB"}, "store_config": wait}
    found: dict[str, Any] = {}
    found["start_s"], prompts = timed(lambda: PromptCache(model, host_memory="4GiB", self_test=False, **store), device)
    with prompts:
        peer = directory / PEER
        if peer.exists():
            found["peer_s"], _ = timed(lambda: torch.load(peer, map_location=device, weights_only=False), device)
        found["first_s"], (past, found["cached"]) = timed(lambda: prompts.prefill(ids), device)
        found["digest"], found["bytes"] = digest(prompts, past), sum(t.read(past).nbytes for t in prompts._layout.tensors)
        if not peer.exists():
            torch.save(past, peer)
            forget(peer)
            found["alone_s"], _ = timed(lambda: alone(prompts, ids), device)
        found["host_s"], (_, found["cached_in_memory"]) = timed(lambda: prompts.prefill(ids), device)
    return found


def alone(prompts: PromptCache, ids_BT: torch.Tensor) -> None:
    """The model without a prompt cache, in passes of the same size."""
    past = prompts._passes.new_past()
    for part in ids_BT[:, : prompts.covers(ids_BT.shape[1])].split(2048, 1):
        prompts._passes.run(part, past)


def forget(file: Path) -> None:
    """Off the system's memory, so that the next process reads it from the disk, as it does the log."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    order = json.loads(sys.argv[1])
    print(json.dumps(live(order["family"], order["device"], order["tokens"], Path(order["directory"]))))
