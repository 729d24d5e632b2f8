"""The engine with a real small model: warm compared with cold, the cost of the cache, and decoding compared with transformers.

    make bench-engine        install the weights, measure, print the tables, write bench-engine.json (about 10 minutes)

First token: a prompt of real text, computed, then resumed from the device, from the host (the device emptied), and from the disk
(both memories emptied; values verified). Cost: prompts that share nothing, all tiers on, compared with an engine without a cache,
in turns. Decoding: steps a second at batch 8, from the difference of a long and a short answer, compared with `generate` of
transformers on the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from engine.driving import first_token, leave_in, run, settle
from engine.models import checkpoint_of, reference_of
from report import ROOT, Goal, Row, goals_of, machine, table_of, write
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.engine import Engine, EngineConfig, GenerateRequest, Limits, Sampling, build_engine

TIERS, LENGTHS, ROUNDS = ("device", "host", "disk"), (2048, 8192), 3
GOAL_WARM, GOAL_COST, GOAL_DECODE = 5.0, 1.03, 2.0
LONG, SHORT, BATCH, PROMPT = 40, 8, 8, 128  # answers whose difference is decoding alone
REQUESTS, LENGTH = 6, 512  # that share nothing
WAITS = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-270m", help="a checkpoint by path or name (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    args = parser.parse_args()
    console, began_s = Console(width=130), time.monotonic()
    rows: dict[str, list[Row]] = {}
    with TemporaryDirectory(prefix="bench-engine-") as directory:
        for name, part in {"first token": first_tokens, "no reuse at all": cost, "decoding": decoding}.items():
            console.print(f"{name} ...")
            rows[name] = part(args.model, args.device, Path(directory))
            console.print(table_of(f"{args.model}: {name}", rows[name]))
    console.print(goals_of(rows))
    parts = {name: [row.as_json() for row in each] for name, each in rows.items()}
    write(ROOT / "bench-engine.json", {"model": args.model, "machine": machine(args.device), "parts": parts})
    console.print(f"{time.monotonic() - began_s:.0f} s; written to bench-engine.json")
    return 0


def _engine(model: str, device: str, **settings: Any) -> Engine:
    """With memory for a few long prompts."""
    memory = "1GiB" if device == "cpu" else "8GiB"
    defaults: dict[str, Any] = {"device": device, "device_memory": memory, "host_memory": memory}
    return build_engine(checkpoint_of(model), EngineConfig(**(defaults | settings)))


def _text(model: str, count: int) -> list[int]:
    """The first `count` tokens of this project's documents, repeated as needed; random ones for a model without a tokenizer."""
    text = checkpoint_of(model).text
    if text is None:
        return [Random(at).randrange(100_000) for at in range(count)]
    documents = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
    tokens = text.encode("\n\n".join(file.read_text() for file in documents))
    while len(tokens) < count:
        tokens += text.encode("\n\n".join(file.read_text() for file in reversed(documents)), special=False)
    return tokens[:count]


def _random(seed: int, count: int, length: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(1000, 30_000) for _ in range(length)] for _ in range(count)]


def first_tokens(model: str, device: str, directory: Path) -> list[Row]:
    """Seconds: computed once, then medians from each tier. The answers are the same."""
    rows = []
    for length in LENGTHS:
        prompt = _text(model, length)
        store = {"store": f"log:{directory / str(length)}", "store_options": {"budget": "8GiB"}, "store_config": WAITS}
        times: dict[str, list[float]] = {tier: [] for tier in TIERS}
        with _engine(model, device, **store) as engine:
            first_token(engine, prompt[1:200])  # whatever is slow only once
            cold = first_token(engine, prompt)
            for _ in range(ROUNDS):
                for tier in TIERS:
                    settle(engine)
                    leave_in(engine, tier)
                    again = first_token(engine, prompt)
                    assert again.tokens == cold.tokens, f"another answer from the {tier}: {again.tokens}, {cold.tokens}"
                    times[tier].append(again.seconds)
        found = {tier: statistics.median(each) for tier, each in times.items()}
        figures = {"computed, s": cold.seconds, **{f"from the {tier}, s": each for tier, each in found.items()}}
        rows.append(Row(what=f"{length:,} tokens", figures=figures))
        for tier in ("host", "disk"):
            goal = Goal(value=cold.seconds / found[tier], limit=GOAL_WARM)
            rows.append(Row(what=f"{length:,} tokens, times as soon from the {tier}", goal=goal))
    return rows


def cost(model: str, device: str, directory: Path) -> list[Row]:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for each in range(ROUNDS + 1):
        for caching, times in seconds.items():
            took_s = _answers_s(model, device, directory / f"cost-{each}", seed=each, caching=caching)
            times += [took_s] if each else []  # the first round only warms up
    ratios = [on / off for off, on in zip(seconds[False], seconds[True], strict=True)]
    figures = {
        "without, s": statistics.median(seconds[False]), "all tiers on, s": statistics.median(seconds[True]),
        "of each round": " ".join(f"{each:.3f}" for each in ratios),
    }  # fmt: skip
    goal = Goal(value=statistics.median(ratios), limit=GOAL_COST, most=True)
    return [Row(what=f"{REQUESTS} x {LENGTH} tokens", figures=figures, goal=goal)]


def _answers_s(model: str, device: str, directory: Path, *, seed: int, caching: bool) -> float:
    """Seconds for prompts of random tokens, two at a time, with a short answer each."""
    tiers: dict[str, Any] = {"store": f"log:{directory}", "store_options": {"budget": "1GiB"}} if caching else {"host_memory": 0}
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    asks = [GenerateRequest(tokens=each, sampling=sampling, use_cache=caching) for each in _random(seed, REQUESTS, LENGTH)]
    with _engine(model, device, limits=Limits(max_running=2), **tiers) as engine:
        began_s = time.perf_counter()
        run(engine, asks)
        return time.perf_counter() - began_s


def decoding(model: str, device: str, directory: Path) -> list[Row]:
    """Decode steps a second, ours and those of transformers in turns."""
    prompts, reference = _random(0, BATCH, PROMPT), reference_of(model, device)
    times: dict[str, list[float]] = {"stepwell": [], "transformers": []}
    with _engine(model, device, host_memory=0) as engine:
        for each in range(ROUNDS + 1):
            ours = _ours_s(engine, prompts, LONG) - _ours_s(engine, prompts, SHORT)
            theirs = _theirs_s(reference, prompts, LONG) - _theirs_s(reference, prompts, SHORT)
            if each:  # the first round only warms up
                times["stepwell"].append(ours / (LONG - SHORT))
                times["transformers"].append(theirs / (LONG - SHORT))
    rates = {f"{name}, steps/s": 1 / statistics.median(each) for name, each in times.items()}
    ours, theirs = rates.values()
    return [Row(what=f"batch {BATCH}", figures=rates, goal=Goal(value=ours / theirs, limit=GOAL_DECODE))]


def _ours_s(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> float:
    began_s = time.perf_counter()
    run(
        engine,
        [GenerateRequest(tokens=each, sampling=Sampling(max_tokens=count, ignore_eos=True), use_cache=False) for each in prompts],
    )
    return time.perf_counter() - began_s


@torch.inference_mode()
def _theirs_s(reference: Any, prompts: Sequence[Sequence[int]], count: int) -> float:
    tokens = torch.tensor(prompts, device=reference.device)
    exactly = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    began_s = time.perf_counter()
    reference.generate(tokens, attention_mask=torch.ones_like(tokens), **exactly)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    sys.exit(main())
