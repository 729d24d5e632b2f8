"""Requests as they are measured: prompts until their first tokens, and requests that do nothing but decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

from engine.driving import run, step
from gpu.bench import Bench
from stepwell.engine import Engine, GenerateRequest, Sampling
from stepwell.engine.requests.guided import Guide

WARM_STEPS = 8  # a shape of a pass is recorded when it is met again
SPARE_TOKENS = 256  # what the first may have said while the last still begin

LEAST_SHARE = 0.9  # of requests that get a token in a step: some may wait for a copy of their state

Prompts = Sequence[Sequence[int]]


def prefill_s(bench: Bench, engine: Engine, prompts: Prompts) -> float:
    """From the first submission to the first token of the last."""
    sampling = Sampling(max_tokens=1, ignore_eos=True)
    bench.wait()
    started = time.perf_counter()
    run(engine, [GenerateRequest(tokens=prompt, sampling=sampling) for prompt in prompts])
    return time.perf_counter() - started


def warm_up(bench: Bench, engine: Engine, *, length: int = 512) -> None:
    """Whatever is slow only once: kernels that are compiled, workspaces, recordings. Not counted as time of the part."""
    with bench.budget.uncounted():
        began = time.monotonic()
        length, sampling = max(bench.tokens(length), 8), Sampling(max_tokens=4, ignore_eos=True)
        prompts = [*bench.prompts(1, length, engine.vocab_size), *bench.prompts(2, 2 * length, engine.vocab_size)]
        run(engine, [GenerateRequest(tokens=prompt, sampling=sampling) for prompt in prompts])
        bench.say(f"first use of the engine took {time.monotonic() - began:.1f} s")


class Steady:
    """Requests that decode together, until the end of the `with`. What their prompts have in the cache is not computed again."""

    def __init__(
        self, bench: Bench, engine: Engine, prompts: Prompts, *, steps: int, guide: Guide | None = None
    ) -> None:  # fmt: skip
        sampling = Sampling(max_tokens=steps + WARM_STEPS + SPARE_TOKENS, ignore_eos=True)
        self._bench, self._engine = bench, engine
        self._numbers = [engine.submit(GenerateRequest(tokens=prompt, sampling=sampling, guide=guide)) for prompt in prompts]

    def __enter__(self) -> Steady:
        waits = set(self._numbers)
        while waits:
            waits -= {delta.request for delta in step(self._engine)}
        for _ in range(WARM_STEPS):
            step(self._engine)
        return self

    def times(self, steps: int) -> list[float]:
        """Wall time of each of `steps` consecutive steps. Raises RuntimeError where many requests got no token."""
        self._bench.wait()
        stamps, made = [time.perf_counter()], 0
        for _ in range(steps):
            made += sum(len(delta.tokens) for delta in step(self._engine))
            stamps.append(time.perf_counter())
        if made < LEAST_SHARE * (asked := steps * len(self._numbers)):
            raise RuntimeError(f"{made} tokens came in {steps} steps, not {asked}: a request was preempted, or waits")
        return [after - before for before, after in pairwise(stamps)]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in self._numbers:
            self._engine.abort(number)
        self._engine.step()
