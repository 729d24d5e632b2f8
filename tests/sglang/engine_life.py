"""A whole engine of SGLang's on the CPU, with storage or without: `engine_life.py stepwell|none|model DIRECTORY`.

Says in one line of JSON what it answered to a prompt, and how much of it was computed. Children of the engine load this module
too, and so have the same stand-ins.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks" / "peers")]
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import sglang_kernels  # noqa: E402

sglang_kernels.install()

import sglang_copies  # noqa: E402
import torch  # noqa: E402
from stack import PAGE, PATIENCE_S, Backend  # noqa: E402

torch.set_num_threads(1)
sglang_copies.install()

PROMPT, ANSWER = 1500, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "torch_dtype": "float32", "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "head_dim": 32,
}  # fmt: skip


def model_in(directory: Path) -> Path:
    """A tiny Llama with random weights, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(directory)
    return directory


def answer(storage: str, root: Path) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine

    options: dict[str, Any] = {}
    if storage != "none":
        name, extra = Backend(name=storage, directory=root / storage).settings()
        options = {
            "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct", "hicache_write_policy": "write_through", "hicache_storage_backend": name,
            "hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_backend_extra_config": json.dumps(extra),
        }  # fmt: skip
    engine = Engine(
        model_path=str(model_in(root / "model")), skip_tokenizer_init=True, device="cpu", attention_backend="torch_native",
        page_size=PAGE, max_total_tokens=8192, mem_fraction_static=0.5, disable_cuda_graph=True, disable_overlap_schedule=True,
        random_seed=1, log_level="error", sampling_backend="pytorch", dtype="float32", **options,
    )  # fmt: skip
    prompt = [(at * 37 + 11) % 900 + 3 for at in range(PROMPT)]
    given = {"temperature": 0.0, "max_new_tokens": ANSWER, "ignore_eos": True}
    said = engine.generate(input_ids=prompt, sampling_params=given, return_logprob=True)
    saved = wait_for_storage(root / storage) if storage != "none" else 0
    meta = said["meta_info"]
    logprobs = [round(float(each[0]), 5) for each in meta["output_token_logprobs"]]
    engine.shutdown()
    return {
        "tokens": said["output_ids"], "logprobs": logprobs, "saved": saved,
        "cached": meta["cached_tokens"], "details": meta.get("cached_tokens_details"),
    }  # fmt: skip


def wait_for_storage(directory: Path) -> int:
    """How many pages the store has, once it has all of the prompt: the engine says nothing of its backups."""
    from stepwell.store.log.disk.files import Disk
    from stepwell.store.log.inspect import stat_directory

    deadline = time.monotonic() + PATIENCE_S
    while (pages := stat_directory(directory / "rank0", Disk()).values) < PROMPT // PAGE:
        assert time.monotonic() < deadline, f"only {pages} pages were stored"
        time.sleep(0.1)
    return pages


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    out = {"model": str(model_in(where / "model"))} if what == "model" else answer(what, where)
    sys.stdout.write("\n" + json.dumps(out) + "\n")
