"""One vLLM engine and what it answers: without a cache, over StepwellConnector, or over vLLM's own offloading.

    vllm_life.py '{"model": ..., "cache": "none|stepwell|offload", "rounds": [...], ...}'

Imports vLLM, prints {"what": "imported"}, and starts its engine when it reads a line: several can import at once, one runs at a
time. Prints a JSON line for each answer. Before each round but `device`, vLLM's own prefix cache is emptied.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "TRANSFORMERS_VERBOSITY": "error", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip

import torch
import vllm
from prompts import prompts, talks, text
from vllm.config import KVTransferConfig

RESETS = 50  # tries: blocks that are being saved are pinned


def say(**fact: Any) -> None:
    print(json.dumps(fact), flush=True)


def transfer(order: dict[str, Any]) -> dict[str, Any]:
    if order["cache"] == "none":
        return {}
    if order["cache"] == "stepwell":
        named = {"kv_connector": "StepwellConnector", "kv_connector_module_path": "stepwell.connectors.vllm"}
        extra = {"host_memory": order["host_bytes"], "audit": order["audit"], "prefetch": "wait_complete"}
        if order["store"]:
            extra |= {"store": f"log:{order['store']}", "store_budget": "24GiB"}
    else:
        named, extra = {"kv_connector": "OffloadingConnector"}, {"cpu_bytes_to_use": order["host_bytes"]}
    config = KVTransferConfig(**named, kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=extra)
    return {"kv_transfer_config": config}


def start(order: dict[str, Any]) -> vllm.LLM:
    on_gpu = torch.cuda.is_available()
    longest = max(order["lengths"])
    device = (
        {"dtype": "bfloat16", "kv_cache_memory_bytes": order["kv_bytes"]} if on_gpu else {"dtype": "float32", "block_size": 32}
    )
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    compiled = {"compilation_config": graphs} if on_gpu and not order["eager"] else {"enforce_eager": True}
    common = {
        "model": order["model"], "seed": 0, "skip_tokenizer_init": True, "max_model_len": longest + 1024, "max_num_seqs": 8,
        "max_num_batched_tokens": order["chunk"], "enable_prefix_caching": True, "disable_log_stats": False,
    }  # fmt: skip
    return vllm.LLM(**common | device | compiled | order["llm"], **transfer(order))


class Life:
    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._llm = start(order)
        self._sampling = vllm.SamplingParams(
            temperature=0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False, logprobs=0
        )

    def answer(self, ids: list[int], **about: Any) -> None:
        began = time.perf_counter()
        out = self._llm.generate([{"prompt_token_ids": ids}], self._sampling, use_tqdm=False)[0]
        self._report(out, wall_s=round(time.perf_counter() - began, 4), **about)

    def _report(self, out: Any, **about: Any) -> None:
        first = out.outputs[0]
        ttft = getattr(out.metrics, "first_token_latency", None)
        logprobs = [step[token].logprob for step, token in zip(first.logprobs, first.token_ids, strict=True)]
        say(
            what="answer", tokens=len(out.prompt_token_ids), found=out.num_cached_tokens, answer=list(first.token_ids),
            logprobs=logprobs, ttft_s=round(ttft, 4) if ttft else None, **about,
        )  # fmt: skip

    def empty(self) -> None:
        """Empties vLLM's own prefix cache; what the connector has stays. Steps let saves end."""
        for number in range(RESETS):
            self.answer(text(900 + number, 64), round="between", prompt="short")
            if self._llm.reset_prefix_cache():
                return
            time.sleep(0.1)
        say(what="warning", message="vLLM's own prefix cache could not be emptied")

    def rounds(self) -> None:
        for seed, tokens in enumerate((200, max(self._order["lengths"]) // 2)):  # kernels are compiled at their first use
            self.answer(text(seed, tokens), round="between", prompt="warm-up")
        for number, name in enumerate(self._order["rounds"]):
            if number and name != "device":
                time.sleep(self._order["settle_s"])
                self.empty()
            for prompt, ids in prompts(self._order["lengths"], self._order["prompts"]).items():
                self.answer(ids, round=name, prompt=prompt)

    def talk(self) -> None:
        """All conversations of a round at once, one of them cancelled on its way and asked again in the next round."""
        engine = self._llm.llm_engine
        for number, asked in enumerate(talks(3, max(self._order["lengths"]) // 2)):
            names = [f"{number}-{talk}" for talk in range(len(asked))]
            for name, ids in zip(names, asked, strict=True):
                engine.add_request(name, {"prompt_token_ids": ids}, self._sampling)
            engine.add_request(f"{number}-cancelled", {"prompt_token_ids": asked[0][::-1]}, self._sampling)
            steps = 0
            while engine.has_unfinished_requests():
                for out in engine.step():
                    if out.finished and "cancelled" not in out.request_id:
                        self._report(out, round="talk", prompt=out.request_id)
                steps += 1
                if steps == 3:
                    engine.abort_request([f"{number}-cancelled"])

    def end(self) -> None:
        time.sleep(self._order["settle_s"])
        self.answer(text(999, 64), round="between", prompt="short")
        counted = {
            metric.name: metric.value
            for metric in self._llm.get_metrics()
            if metric.name.startswith(("vllm:num_preemptions", "vllm:stepwell_loaded_tokens")) and hasattr(metric, "value")
        }
        say(what="ended", metrics=counted)
        self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    order = json.loads(sys.argv[1])
    say(what="imported")
    if not sys.stdin.readline():
        return
    began = time.perf_counter()
    life = Life(order)
    say(what="engine", version=vllm.__version__, torch=torch.__version__, start_s=round(time.perf_counter() - began, 1))
    life.rounds()
    if order["talks"]:
        life.empty()
        life.talk()
    life.end()
    sys.stdout.flush()
    os._exit(0)  # threads of engines outlive them


if __name__ == "__main__":
    main()
