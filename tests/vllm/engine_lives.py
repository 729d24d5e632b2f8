"""Runs vLLM engines one after the other in this process, in the order of standard input, and says what each of them answered.

A life: {"model": folder, "llm": {...}, "kv": {...} or null,
"rounds": [[{"tokens": [...], "salt": ..., "lora": folder}]], "max_tokens": n, "events": whether to report KV events}.
The last line of the output is a list with one report for each life, in JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import psutil
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

from stepwell.connectors.vllm import StepwellOffloadingConnector

LLM_DEFAULTS = {
    "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 256, "block_size": 32,
    "skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False,
}  # fmt: skip


class Watched:
    """An engine's scheduler, with its steps counted and the cache audited, where it is in this process."""

    def __init__(self, llm: LLM) -> None:
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self.scheduler = core.scheduler if core is not None else None
        self.scheduled = self.preemptions = 0
        self.hits: Counter[str] = Counter()  # tokens, by where vLLM says they come from
        self.events: list[dict[str, Any]] = []
        if self.scheduler is not None:
            self.scheduler.kv_event_publisher.publish = self._hear
            self._wrap(self.scheduler, "schedule", self._count)
            self._wrap(self.scheduler, "_preempt_request", self._count_preemption)
            if self.scheduler.connector is not None:
                self._wrap(self.scheduler.connector, "get_external_cache_hit_sources", self._count_hits)

    @staticmethod
    def _wrap(of: Any, name: str, count: Any) -> None:
        inner = getattr(of, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            out = inner(*args, **kwargs)
            count(out)
            return out

        setattr(of, name, wrapper)

    def _hear(self, batch: Any) -> None:
        """Blocks by kind of event, medium and group."""
        for event in batch.events:
            hashes = list(event.block_hashes)
            told = {"what": type(event).__name__, "medium": event.medium, "group": event.group_idx, "hashes": hashes}
            tokens, size = list(getattr(event, "token_ids", ())), getattr(event, "block_size", 0)
            self.events.append(told | {"tokens": tokens, "block_tokens": size})

    def _count(self, output: Any) -> None:
        self.scheduled += output.total_num_scheduled_tokens

    def _count_hits(self, sources: Any) -> None:
        self.hits.update({source.value: tokens for source, tokens in sources.items()})

    def _count_preemption(self, _: Any) -> None:
        self.preemptions += 1

    def counters(self) -> dict[str, float]:
        connector = self.scheduler.connector if self.scheduler is not None else None
        if connector is None:
            return {}
        if isinstance(connector, StepwellOffloadingConnector):
            return dict(sum((Counter(tier._store.stats()) for tier in connector._own_tiers), Counter()))
        cache = connector._scheduler.cache
        cache.audit()
        return dict(cache.counters.snapshot())


def live(life: dict[str, Any]) -> dict[str, Any]:
    transfer = {}
    if life["kv"] is not None:
        settings = {
            "kv_connector": "StepwellConnector", "kv_connector_module_path": "stepwell.connectors.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }  # fmt: skip
        transfer = {"kv_transfer_config": KVTransferConfig(**(settings | life["kv"]))}
    if life.get("events"):
        transfer["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    llm = LLM(model=life["model"], **(LLM_DEFAULTS | life.get("llm", {})), **transfer)
    watched, rounds = Watched(llm), []
    sampling = SamplingParams(temperature=0, max_tokens=life.get("max_tokens", 16), ignore_eos=True, detokenize=False, logprobs=0)
    for prompts in life["rounds"]:
        asked = [{"prompt_token_ids": each["tokens"]} | _salt(each) for each in prompts]
        before, answers = watched.scheduled, []
        adapters = [_adapter(each) for each in prompts]
        for out in llm.generate(asked, sampling, use_tqdm=False, lora_request=adapters if any(adapters) else None):
            first = out.outputs[0]
            answers.append(
                {"tokens": list(first.token_ids), "logprob": first.cumulative_logprob, "cached": out.num_cached_tokens}
            )
        rounds.append({"answers": answers, "scheduled": watched.scheduled - before})
    report = {
        "rounds": rounds, "preemptions": watched.preemptions, "counters": watched.counters(), "events": watched.events,
        "hits": dict(watched.hits),
    }  # fmt: skip
    with suppress(psutil.NoSuchProcess):  # vLLM kills what is left, and on a busy machine that may have ended meanwhile
        llm.llm_engine.engine_core.shutdown()
    del llm, watched
    gc.collect()
    cleanup_dist_env_and_memory()
    return report


def _salt(prompt: dict[str, Any]) -> dict[str, str]:
    return {"cache_salt": prompt["salt"]} if prompt.get("salt") else {}


def _adapter(prompt: dict[str, Any]) -> LoRARequest | None:
    """An adapter is named by its folder, and numbered by the digits its name ends in."""
    path = prompt.get("lora")
    return LoRARequest(path.rpartition("/")[2], int(path[-1]), path) if path else None


def main() -> None:
    reports = [live(life) for life in json.load(sys.stdin)]
    print("\nREPORT " + json.dumps(reports))  # noqa: T201


if __name__ == "__main__":
    main()
