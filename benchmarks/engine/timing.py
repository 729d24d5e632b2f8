"""What bench_engine.py measures, one function a part. Each makes its own engines and closes them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.driving import first_token, leave_in, run, settle
from engine.models import checkpoint_of, reference_of
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.engine import Ask, Engine, EngineConfig, Limits, Sampling, build_engine

TIERS = ("device", "host", "disk")
LONG, SHORT = 40, 8  # answers whose difference is decoding alone
PROMPT = 128


def make_engine(model: str, device: str, **settings: Any) -> Engine:
    """An engine over a checkpoint, with memory for a few long prompts."""
    memory = "1GiB" if device == "cpu" else "8GiB"
    defaults: dict[str, Any] = {"device": device, "device_memory": memory, "host_memory": memory}
    return build_engine(checkpoint_of(model), EngineConfig(**(defaults | settings)))


def first_token_times(model: str, device: str, prompt: Sequence[int], directory: Path, *, rounds: int) -> dict[str, float]:
    """Seconds to the first token: computed once, then medians from each tier, where the same restore point is in use."""
    waits = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0)
    engine = make_engine(model, device, store=f"log:{directory}", store_options={"budget": "8GiB"}, store_config=waits)
    times: dict[str, list[float]] = {"cold": [], **{tier: [] for tier in TIERS}}
    try:
        first_token(engine, prompt[1:200])  # whatever is slow only once
        cold = first_token(engine, prompt)
        times["cold"].append(cold.seconds)
        for _ in range(rounds):
            for tier in TIERS:
                settle(engine)
                leave_in(engine, tier)
                again = first_token(engine, prompt)
                assert again.tokens == cold.tokens, f"another answer from the {tier}: {again.tokens} instead of {cold.tokens}"
                times[tier].append(again.seconds)
    finally:
        engine.close()
    return {name: statistics.median(each) for name, each in times.items()}


def answer_time(
    model: str, device: str, *, caching: bool, directory: Path, seed: int, requests: int = 6, length: int = 512
) -> float:
    """Seconds for requests that share nothing: prompts of random tokens, two at a time, a short answer each."""
    settings: dict[str, Any] = {"limits": Limits(max_running=2)}
    if caching:
        settings |= {"store": f"log:{directory}", "store_options": {"budget": "1GiB"}}
    else:
        settings |= {"host_memory": 0}
    engine = make_engine(model, device, **settings)
    random = Random(seed)
    asks = [
        Ask(
            tokens=[random.randrange(1000, 30_000) for _ in range(length)],
            sampling=Sampling(max_tokens=24, ignore_eos=True),
            use_cache=caching,
        )
        for _ in range(requests)
    ]
    try:
        started = time.perf_counter()
        run(engine, asks)
        return time.perf_counter() - started
    finally:
        engine.close()


class Products(TorchFunctionMode):
    """Remembers the products with weights that a model asks for, so that they can be made again and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.asked.append((func, args))
        return func(*args, **(kwargs or {}))

    @torch.inference_mode()
    def seconds(self) -> float:
        started = time.perf_counter()
        for func, args in self.asked:
            func(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started


def decode_times(model: str, device: str, *, batch: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of one decode step, ours and of transformers, in turns; and of the products with weights in one of ours, alone."""
    random = Random(0)
    prompts = [[random.randrange(1000, 30_000) for _ in range(PROMPT)] for _ in range(batch)]
    engine, reference = make_engine(model, device, host_memory=0), reference_of(model, device)
    times: dict[str, list[float]] = {"stepwell": [], "transformers": [], "products alone": []}
    try:
        products = _products(engine, prompts)
        for each in range(rounds + 1):
            ours = _ours(engine, prompts, LONG) - _ours(engine, prompts, SHORT)
            theirs = _theirs(reference, prompts, LONG) - _theirs(reference, prompts, SHORT)
            if each:  # the first round only warms up
                times["stepwell"].append(ours / (LONG - SHORT))
                times["transformers"].append(theirs / (LONG - SHORT))
                times["products alone"].append(statistics.median(products.seconds() for _ in range(LONG - SHORT)))
    finally:
        engine.close()
    return times


# ---- inside ---------------------------------------------------------------------------------------


def _ours(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> float:
    started = time.perf_counter()
    run(engine, [Ask(tokens=p, sampling=Sampling(max_tokens=count, ignore_eos=True), use_cache=False) for p in prompts])
    return time.perf_counter() - started


def _products(engine: Engine, prompts: Sequence[Sequence[int]]) -> Products:
    """Of one step in which all of these decode."""
    for prompt in prompts:
        engine.submit(Ask(tokens=prompt, sampling=Sampling(max_tokens=SHORT, ignore_eos=True), use_cache=False))
    made = [0]
    while made[-1] < len(prompts):
        made.append(sum(len(delta.tokens) for delta in engine.step()))
    with Products() as products:
        engine.step()
    while engine.num_open:
        engine.step()
    return products


def _theirs(reference: Any, prompts: Sequence[Sequence[int]], count: int) -> float:
    started = time.perf_counter()
    tokens = torch.tensor(prompts, device=reference.device)
    with torch.inference_mode():
        reference.generate(
            tokens,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            attention_mask=torch.ones_like(tokens),
            pad_token_id=0,
        )
    return time.perf_counter() - started
