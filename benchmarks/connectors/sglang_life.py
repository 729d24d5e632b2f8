"""One SGLang engine on the CPU and some prompts, computed or resumed. Prints JSON.

    sglang_life.py '{"family": ..., "tokens": ..., "prompts": ..., "cache": ..., "directory": ...}'

    cache    none        SGLang alone
             stepwell    Stepwell below its host tier
             linker      Stepwell's linker below its device pools
             peer        its own files below its host tier

Runs with the interpreter that SGLang is installed for; children of the engine load this module too. The same directory again is
the next process. Kernels that need a GPU are plain torch, for all (`benchmarks/peers`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import sglang_kernels

sglang_kernels.install()

import sglang_copies  # noqa: E402

sglang_copies.install()

import sglang_attention  # noqa: E402

sglang_attention.install()

from engine_lives import Answer, asked, chill, settled  # noqa: E402
from models import prompt, saved  # noqa: E402

PAGE, HOST_MEMORY = 64, "1GiB"


def storage(cache: str, directory: Path) -> dict[str, Any]:
    if cache == "none":
        return {}
    if cache == "linker":
        settings = {"host_memory": HOST_MEMORY, "store": f"log:{directory}", "store_budget": "8GiB", "fetch_wait_s": 60}
        named = {"linker": "StepwellLinker", "linker_module_path": "stepwell.connectors.sglang"}
        return {
            "enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": named | {"linker_extra_config": settings},
        }  # fmt: skip
    common: dict[str, Any] = {"prefetch_threshold": PAGE, "hicache_storage_pass_prefix_keys": True}
    name, extra = "file", {"file_storage_path": str(directory)}
    if cache == "stepwell":
        name, extra = "dynamic", {
            "backend_name": "stepwell", "module_path": "stepwell.connectors.sglang", "class_name": "StepwellHiCache",
            "interface_v1": 1, "store": f"log:{directory}", "store_budget": "8GiB",
        }  # fmt: skip
    return {
        "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct", "hicache_write_policy": "write_through", "hicache_storage_backend": name,
        "hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_backend_extra_config": json.dumps(extra | common),
    }  # fmt: skip


def live(family: str, tokens: int, prompts: int, cache: str, root: Path) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine

    stored = root / cache
    stored.mkdir(exist_ok=True)
    engine = Engine(
        model_path=str(saved(family, root / "model")), skip_tokenizer_init=True, device="cpu", attention_backend="torch_native",
        page_size=PAGE, max_total_tokens=(tokens + 1024) * (prompts + 1), mem_fraction_static=0.5, disable_cuda_graph=True,
        disable_overlap_schedule=True, random_seed=1, log_level="error", sampling_backend="pytorch", dtype="float32",
        chunked_prefill_size=2048, **storage(cache, stored),
    )  # fmt: skip
    given = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}

    def ask(ids: list[int]) -> Answer:
        said = engine.generate(input_ids=ids, sampling_params=given, return_logprob=True)
        about = said["meta_info"]
        return about["cached_tokens"], said["output_ids"], float(about["output_token_logprobs"][0][0])

    ask(prompt(200, seed=0))
    found = asked([prompt(tokens, seed=10 + number) for number in range(prompts)], ask)
    size = settled(stored, lambda: None)
    engine.shutdown()
    chill(stored)
    return found | {"bytes": size}


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    order["root"] = Path(order.pop("directory"))
    print("\n" + json.dumps(live(**order)))
