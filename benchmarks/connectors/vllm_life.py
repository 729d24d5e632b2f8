"""One vLLM engine and some prompts, computed or resumed: over Stepwell, over vLLM's own offloading to files, or without either.

    vllm_life.py '{"family": ..., "tokens": ..., "prompts": ..., "cache": "none|stepwell|peer", "directory": ...}'   prints JSON

Runs with the interpreter that vLLM is installed for. The same directory again is the next process. A short prompt is asked
first, so that no cache pays for what an engine does once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip

from engine_lives import Answer, asked, chill, settled
from models import prompt, saved
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

HOST_BYTES, BLOCK = 1 << 30, 64
STEPS = {"llama": 2048, "gemma3": 2048, "falcon_h1": 64}  # a CPU's scan leaves states where chunks end: at every block


def transfer(cache: str, directory: Path) -> dict[str, Any]:
    if cache == "none":
        return {}
    if cache == "stepwell":
        named = {"kv_connector": "StepwellConnector", "kv_connector_module_path": "stepwell.connectors.vllm"}
        extra = {"host_memory": HOST_BYTES, "store": f"log:{directory}", "store_budget": "8GiB", "prefetch": "wait_complete"}
    else:
        named = {"kv_connector": "OffloadingConnector"}
        files = {"type": "fs", "root_dir": str(directory)}
        spec = {"spec_name": "OffloadOnCpu", "spec_module_path": "vllm_offload_on_cpu"}
        extra = {**spec, "cpu_bytes_to_use": HOST_BYTES, "secondary_tiers": [files]}  # type: ignore[dict-item]
    config = KVTransferConfig(**named, kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=extra)
    return {"kv_transfer_config": config}


def yield_as_served(llm: LLM) -> None:
    """An engine in this process steps without a pause while it waits for loads, and keeps the threads that load from running.

    One that serves has a process of its own, whose loop sleeps for this time after a step that ran no model.
    """
    core = llm.llm_engine.engine_core.engine_core
    step = core.step_fn

    def stepped() -> Any:
        outputs, executed = step()
        if not executed and core.scheduler.has_requests():
            time.sleep(0.001)
        return outputs, executed

    core.step_fn = stepped


def live(family: str, tokens: int, prompts: int, cache: str, root: Path) -> dict[str, Any]:
    stored = root / cache
    stored.mkdir(exist_ok=True)
    llm = LLM(
        model=str(saved(family, root / "model")), dtype="float32", max_model_len=tokens + 256, max_num_seqs=2, block_size=BLOCK,
        max_num_batched_tokens=STEPS[family], skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=True,
        **transfer(cache, stored),
    )  # fmt: skip
    yield_as_served(llm)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0)

    def ask(ids: list[int]) -> Answer:
        said = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
        return said.num_cached_tokens or 0, list(said.outputs[0].token_ids), said.outputs[0].cumulative_logprob

    ask(prompt(200, seed=0))
    found = asked([prompt(tokens, seed=10 + number) for number in range(prompts)], ask)
    size = settled(stored, lambda: ask(prompt(20, seed=1)))  # an engine saves while it works
    llm.llm_engine.engine_core.shutdown()
    chill(stored)
    return found | {"bytes": size}


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    order["root"] = Path(order.pop("directory"))
    print("\n" + json.dumps(live(**order)))
    sys.stdout.flush()
    os._exit(0)  # threads of engines outlive them
