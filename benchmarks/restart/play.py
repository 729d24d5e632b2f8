"""One life of an engine over a store: plays the question set, and prints what came of it as a line of JSON.

Run by `bench_restart.py` in a process of its own, since a restart is a new process.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from restart.questions import prompts
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.cache.build import CacheTuning
from stepwell.engine import Ask, Engine, EngineConfig, Limits, Sampling, Usage, build_engine
from stepwell.engine.engine import IDLE_S
from stepwell.engine.loading.checkpoint import open_checkpoint
from stepwell.policy.placement import PlacementRules


def main() -> None:
    order = json.loads(sys.argv[1])
    config = EngineConfig(
        device=order["device"], device_memory="512MiB", host_memory="512MiB", limits=Limits(max_running=8),
        store=order["store"], store_options=order["options"],
        store_config=StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE),
    )  # fmt: skip
    as_before = CacheTuning(placement=PlacementRules(at_branch=False))  # passes end where they did in the life before
    engine = build_engine(open_checkpoint(order["model"]), config, tuning=as_before)
    try:
        measured = engine.footprint
        print(json.dumps({**play(engine, order), "bytes_per_token": float(measured.bytes_per_token),
                          "spec_bytes_per_token": float(engine.cache.spec.bytes_per_token)}))  # fmt: skip
    finally:
        engine.close()  # which waits for what is on its way to the store


def play(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    texts = prompts(order["subjects"], order["questions"], shots=order["shots"])
    sampling = Sampling(max_tokens=order["answer"], ignore_eos=True)
    started = time.perf_counter()
    numbers = [engine.submit(Ask(tokens=list(text.encode()), sampling=sampling)) for text in texts]
    answers: dict[int, list[int]] = {number: [] for number in numbers}
    usages: list[Usage] = []
    while engine.num_open:
        if engine.idle:
            time.sleep(IDLE_S)
        for delta in engine.step():
            assert delta.error is None, delta.error
            answers[delta.request] += delta.tokens
            usages += [delta.usage] if delta.usage is not None else []
    seconds = time.perf_counter() - started
    sources = [asdict(usage.sources) for usage in usages]
    return {
        "seconds": seconds,
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "sources": {tier: sum(each[tier] for each in sources) for tier in sources[0]},
        "first_token_s": statistics.median(usage.first_token_s for usage in usages),
        "answers": [answers[number] for number in numbers],
    }


if __name__ == "__main__":
    main()
