"""One engine that serves contexts of one length, under a cap of device memory: how many requests run at once, and how fast.

The contexts are not computed: they are put into the cache (`traced.py`). From there on requests do what they do on a server. They
find their prompts cached, are admitted by what fits, load, spill, and decode in steps that are recorded and go ahead unread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from engine.driving import settle, step
from engine.models import held
from gpu.device_time import Span, longest, profiled
from gpu.requests import LEAST_SHARE
from gpu.shapes import Made
from report import KernelTime
from sparse.trace import STEADY, Latent
from sparse.traced import Contexts, TracedSelect, Traces
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families import from_config
from stepwell.cache.build import CacheTuning
from stepwell.engine import EngineConfig, GenerateRequest, Limits, Sampling, build_engine
from stepwell.engine.ops.kernels import choose_kernels
from stepwell.engine.passes.spilling import SpillReport
from stepwell.memory.layout import PAGE_ALIGNMENT_BYTES

ALL_LAYERS = 61
CAP_BYTES = 60_000_000_000  # of device memory for the cache, were there all layers
SMALL_BATCHES = (1, 8, 16)
STILL = 8  # steps without a request that starts or ends, after which the batch counts as steady
MORE = 1.06  # times as many requests are asked for as should fit
TRIES = 4
MOST_S = 300.0  # until everybody runs who will: kernels may have to be compiled
SPARE_PAGES = 32  # of the host for each request: answers of all its runs
FETCH, RESOLVE = "_fetch_kernel", ("_claim_kernel", "_assign_kernel")


class Preempted(Exception):
    """A request was preempted."""


class Unsteady(Exception):
    """Why steps could not be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    contexts: tuple[int, ...] = (16 << 10, 32 << 10, 64 << 10, 128 << 10)
    batches: tuple[int, ...] = SMALL_BATCHES
    hot_rows: int = 4096
    cap_bytes: int = CAP_BYTES
    page_tokens: int = 64
    chunk_tokens: int = 8192
    latent: Latent = STEADY
    begin: int = 120  # steps until everybody runs who will
    warm: int = 16  # steps until hot rows are what they will be
    timed: int = 32
    profiled: int = 6
    trace: int = 192  # steps that are made
    answer: int = 512  # tokens: more than any request gets to
    tiny: bool = False

    @property
    def longest(self) -> int:
        return max(self.contexts) + self.page_tokens + self.answer

    @property
    def tuning(self) -> CacheTuning | None:
        """Small pages would be padding for the most part."""
        return CacheTuning(page_alignment_bytes=64) if self.tiny else None


TINY = Sizes(
    contexts=(256, 512), batches=(2,), hot_rows=48, cap_bytes=ALL_LAYERS * 150_000, page_tokens=16, chunk_tokens=64,
    latent=replace(STEADY, last=4), warm=2, timed=4, profiled=0, trace=40, answer=96, tiny=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Microseconds of kernels in a step. They run one after the other; copies by the copy engines do not count."""

    kernels: float
    resolve: float
    fetch: float


def shares_of(spans: Sequence[Span], *, steps: int) -> Shares:
    """Shares of one of `steps` steps. Kernels are recognised by their names."""
    took = [(span.name, (span.stop - span.start) / steps) for span in spans]
    return Shares(
        kernels=sum(us for _, us in took),
        resolve=sum(us for name, us in took if name.startswith(RESOLVE)),
        fetch=sum(us for name, us in took if name.startswith(FETCH)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of steady steps; those of rows are for one step."""

    batch: int
    times_s: Sequence[float]
    tokens: int  # that all requests got in that time: nearly always one in each step
    missing: float = 0.0  # rows of all requests in one layer
    read_through: float = 0.0  # of these, rows without a slot
    fetched_bytes: float = 0.0  # of all layers
    kernels: Shares | None = None  # of one step
    longest: tuple[KernelTime, ...] = ()  # of the same

    @property
    def step_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / len(self.times_s) / self.step_s

    def figures(self, count: int) -> dict[str, float | str]:
        found: dict[str, float | str] = {
            "batch": self.batch, "step, ms": self.step_s * 1e3, "mean, ms": statistics.mean(self.times_s) * 1e3,
            "tokens/s": self.speed, "missing rows a layer": self.missing, "missing, %": 100 * self.missing / self.batch / count,
            "without a slot": self.read_through, "fetched, MB": self.fetched_bytes / 1e6,
        }  # fmt: skip
        if self.kernels is None:
            return found
        times = {"kernels": self.kernels.kernels, "resolve": self.kernels.resolve, "fetch": self.kernels.fetch}
        found |= {f"{name}, ms": took_us / 1e3 for name, took_us in times.items()}
        found["fetch, % of a step"] = self.kernels.fetch / self.step_s / 1e4
        return found


class Served:
    """One engine, and contexts that are put into its cache."""

    def __init__(self, made: Made, sizes: Sizes, device: str, *, spills: bool) -> None:
        """`spills`: rows may be on the host alone."""
        self._sizes = sizes
        config = made.config.to_dict() | {"max_position_embeddings": sizes.longest}
        dtype, sparse = ("fp32" if device == "cpu" else "bf16"), "dsa" if spills else None
        spec = from_config(config, kv_dtype="fp8", model_dtype=dtype, page_tokens=sizes.page_tokens, sparse=sparse)
        self.layers, self.count = made.config.num_hidden_layers, made.config.index_topk
        cap = sizes.cap_bytes * self.layers // ALL_LAYERS
        self.asked = {context: _fitting(spec, context, cap, sizes) for context in sizes.contexts}
        kernels = choose_kernels("auto", device, torch.float32 if device == "cpu" else torch.bfloat16)
        longest = sizes.longest + sizes.trace
        self.select = TracedSelect(kernels.select, steps=sizes.trace, count=self.count, longest=longest, device=device)
        settings = EngineConfig(
            device=device, kv_dtype="fp8", page_tokens=sizes.page_tokens, device_memory=cap,
            host_memory=max(_host_bytes(spec, context, count) for context, count in self.asked.items()),
            limits=Limits(max_running=max(self.asked.values()), chunk_tokens=sizes.chunk_tokens),
            sparse=sparse, hot_rows=sizes.hot_rows if spills else None,
        )  # fmt: skip
        checkpoint = replace(held(made.name, made.model), config=config)
        self.engine = build_engine(checkpoint, settings, kernels=replace(kernels, select=self.select), tuning=sizes.tuning)
        self._contexts = Contexts(self.engine, config)
        self._random = np.random.default_rng(1)
        self._prompts: list[list[int]] = []

    def put(self, context: int, followed: Traces) -> None:
        """Flushes other contexts and puts the number that could run of this length. Each is followed by the token to compute."""
        settle(self.engine)
        self.engine.cache.flush()
        shape = self.asked[context], context + 1
        self._prompts = self._random.integers(0, self.engine.vocab_size, shape).tolist()
        self._contexts.put([prompt[:-1] for prompt in self._prompts])
        self.select.follow(followed, context)

    def run(self, batch: int | None) -> Measured:
        """`batch` requests, or all that fit, until they are measured. Raises Unsteady."""
        engine, sampling = self.engine, Sampling(max_tokens=self._sizes.answer, ignore_eos=True)
        numbers = [engine.submit(GenerateRequest(tokens=prompt, sampling=sampling)) for prompt in self._prompts[:batch]]
        try:
            for _ in range(TRIES):
                running = self._begin()
                self._abort(list(engine.scheduler.waiting))  # they do not fit
                if batch is not None and len(running) < batch:
                    raise Unsteady(f"does not fit: {len(running)} of {batch} run")
                with suppress(Preempted):  # answers grow: now fewer fit
                    return self._measure(running)
                self._abort(list(engine.scheduler.waiting))
            raise Unsteady(f"in each of {TRIES} trials a request was preempted")
        finally:
            self._abort(numbers)
            engine.step()
            settle(engine)

    # ---- inside -----------------------------------------------------------------------------------

    def _abort(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.engine.abort(number)

    def _begin(self) -> frozenset[int]:
        """Steps until no request starts or ends; returns those that run. Raises Unsteady if that takes too long, or if a context
        was evicted and computed."""
        active, still, before = self.engine.scheduler.active, 0, frozenset[int]()
        steps, ends_s = self._sizes.begin, time.monotonic() + MOST_S
        while still < STILL:
            steps -= bool(step(self.engine))
            running = frozenset(number for number, request in active.items() if request.runs)
            steady = running and running == before and len(running) == len(active)
            still, before = still + 1 if steady else 0, running
            if steps < 0 or time.monotonic() > ends_s:
                raise Unsteady(f"requests still come and go: {len(running)} run")
        computed = {request.sources.computed for request in active.values() if request.sources is not None}
        if computed != {1}:
            raise Unsteady(f"contexts were computed: {sorted(computed)} tokens of a prompt")
        return before

    def _measure(self, running: frozenset[int]) -> Measured:
        self._steps(running, self._sizes.warm)
        before = self._found()
        times, tokens = self._steps(running, steps := self._sizes.timed)
        after = self._found()
        measured = Measured(batch=len(running), times_s=times, tokens=tokens)
        if before is not None and after is not None:
            measured = replace(
                measured,
                missing=(after.misses - before.misses) / steps / self.layers,
                read_through=(after.read_through - before.read_through) / steps / self.layers,
                fetched_bytes=(after.fetched_bytes - before.fetched_bytes) / steps,
            )
        return self._with_profile(measured, running)

    def _steps(self, running: frozenset[int], steps: int) -> tuple[list[float], int]:
        """How long each took, and the tokens that came of them. Raises Preempted, or Unsteady where many tokens are missing."""
        stamps, tokens = [time.perf_counter()], 0
        for _ in range(steps):
            tokens += sum(len(delta.tokens) for delta in step(self.engine))
            stamps.append(time.perf_counter())
        if running - self.engine.scheduler.active.keys():
            raise Preempted
        if tokens < LEAST_SHARE * steps * len(running):
            raise Unsteady(f"{tokens} tokens came in {steps} steps of {len(running)} requests: some wait")
        return [later - earlier for earlier, later in pairwise(stamps)], tokens

    def _found(self) -> SpillReport | None:
        """What is known of rows on the host; waits for the device."""
        self.engine.spilling  # noqa: B018  asks for figures, which are there once the device is done
        if self.engine.on_cuda:
            torch.cuda.synchronize()
        return self.engine.spilling

    def _with_profile(self, measured: Measured, running: frozenset[int]) -> Measured:
        """The same with what is known of kernels, if the profiler sees any."""
        steps = self._sizes.profiled
        spans = profiled(lambda: self._steps(running, steps)) if steps and self.engine.on_cuda else []
        return (
            replace(measured, kernels=shares_of(spans, steps=steps), longest=longest(spans, steps=steps)) if spans else measured
        )


# ---- how much fits, by arithmetic ---------------------------------------------------------------------


def _fitting(spec: ModelSpec, context: int, cap: int, sizes: Sizes) -> int:
    """Requests to ask for: some more than fit."""
    pages, hot = context // spec.page_tokens + 1, -(-sizes.hot_rows // spec.page_tokens)
    each = pages * spec.device_bytes(Kind.PREFIX)
    if spec.spill is not None:
        each += min(hot, pages) * spec.device_bytes(Kind.ROWS)
    return int(MORE * cap / each) + 2


def _host_bytes(spec: ModelSpec, context: int, requests: int) -> int:
    """For all contexts that are asked for, and answers."""
    page_bytes = -(-spec.object_bytes(Kind.PREFIX) // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
    return requests * (context // spec.page_tokens + SPARE_PAGES) * page_bytes
