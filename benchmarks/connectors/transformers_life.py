"""One process of a prompt under Transformers: the first computes it and leaves it behind, the second resumes it. Prints JSON.

Beside it, what people do without a prompt cache: `torch.save` of the cache object, whole and for this very prompt.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from models import model as model_of
from models import prompt
from stored_files import forget

from stepwell import PrefetchPolicy, StoreConfig
from stepwell.connectors.transformers import PromptCache

PEER = "past.pt"


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
    ids = torch.tensor([prompt(tokens, seed=1)], device=device)
    model = model_of(family, device)
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
            forget(directory)
            found["alone_s"], _ = timed(lambda: alone(prompts, ids), device)
        found["host_s"], (_, found["cached_in_memory"]) = timed(lambda: prompts.prefill(ids), device)
    return found


def alone(prompts: PromptCache, ids_BT: torch.Tensor) -> None:
    """The model without a prompt cache, in passes of the same size."""
    past = prompts._passes.new_past()
    for part in ids_BT[:, : prompts.covers(ids_BT.shape[1])].split(2048, 1):
        prompts._passes.run(part, past)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    order = json.loads(sys.argv[1])
    print(json.dumps(live(order["family"], order["device"], order["tokens"], Path(order["directory"]))))
