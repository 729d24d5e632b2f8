"""The copies under the connector for vLLM, without vLLM: blocks of a Qwen3-8B shape to host memory that two processes could map,
and back, as a worker makes them with a step. Beside one large copy of pinned memory.
"""

from __future__ import annotations

import statistics
import time
from itertools import count

import numpy as np
import torch

from bench_copies import limits
from gpu.bench import Bench
from gpu.report import Goal, Row
from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.tasks import Copy, PageIds, Plan, Purpose, Span
from stepwell.connectors.vllm.groups import Group, spec_of
from stepwell.connectors.vllm.orders import Order
from stepwell.connectors.vllm.worker_side import WorkerSide

LAYERS, HEADS, WIDTH = 36, 8, 128
BLOCK_TOKENS = (16, 64)  # vLLM's default, and one that suits copies better
TOKENS = (2048, 32_768)
SHARE, REPEATS = 0.9, 5
LEAST_GOAL_BYTES = 32 << 20


def measure(bench: Bench) -> list[Row]:
    limit = limits(bench.device, (1 << 20) if bench.tiny else (512 << 20), REPEATS)
    rows = []
    for block_tokens in BLOCK_TOKENS:
        for tokens in TOKENS:
            what = f"blocks of {block_tokens}, {bench.tokens(tokens):,} tokens"
            rows += bench.guarded(what, lambda what=what, block=block_tokens, tokens=tokens: [  # type: ignore[misc]
                _row(bench, what, block, bench.tokens(tokens), limit)
            ])  # fmt: skip
    return rows


def _row(bench: Bench, what: str, block_tokens: int, tokens: int, limit: dict[str, float]) -> Row:
    layers = 2 if bench.tiny else LAYERS
    blocks, block_bytes = max(tokens // block_tokens, 1), 2 * block_tokens * HEADS * WIDTH * 2
    names = tuple(f"layer.{number}" for number in range(layers))
    group = Group(number=0, kind=Kind.PREFIX, layers=names, block_tokens=block_tokens, block_bytes=block_bytes, dtype="bfloat16")
    spec = spec_of([group], page_tokens=block_tokens, row_order="NHD")
    shape = (2 * blocks + 1, 2, block_tokens, HEADS, WIDTH)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=bench.device) for name in names}
    size = blocks * layers * block_bytes
    name = f"bench-{time.monotonic_ns():x}"
    worker = WorkerSide([group], spec, tensors, host_bytes=max(int(size * 1.1), 1 << 20), name=name)
    numbers, ids = count(1), np.random.default_rng(0)

    def seconds(*, loads: bool) -> float:
        """Blocks anywhere on the device, pages anywhere on the host."""
        theirs = (ids.permutation(2 * blocks)[:blocks] + 1).astype(np.int32).reshape(-1, 1)
        began = time.perf_counter()
        _copy(worker, JobId(next(numbers)), theirs, ids.permutation(blocks).astype(np.int32), loads=loads)
        return time.perf_counter() - began

    try:
        seconds(loads=False), seconds(loads=True)
        speeds = {way: size / statistics.median(seconds(loads=way == "up") for _ in range(REPEATS)) for way in ("up", "down")}
    finally:
        worker.close()
    shares = {way: speeds[way] / limit[way] for way in speeds}
    figures = {
        "GB": size / 1e9, "load, GB/s": speeds["up"] / 1e9, "save, GB/s": speeds["down"] / 1e9, "load, of limit": shares["up"],
        "save, of limit": shares["down"],
    }  # fmt: skip
    has_goal = size >= LEAST_GOAL_BYTES and not bench.tiny
    return Row(what=what, figures=figures, goal=Goal(value=min(shares.values()), limit=SHARE) if has_goal else None)


def _copy(worker: WorkerSide, job: JobId, blocks: PageIds, pages: PageIds, *, loads: bool) -> None:
    """One order, until its answer. Raises what went wrong."""
    engine, host = Span(tier=Tier.ENGINE, kind=Kind.PREFIX, ids=blocks), Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=pages)
    copy = Copy(source=host, target=engine) if loads else Copy(source=engine, target=host)
    worker.start([Order(plan=Plan(job=job, purpose=Purpose.LOAD if loads else Purpose.SAVE, copies=(copy,)))])
    while (answer := worker.poll().answers.get(int(job))) is None:
        time.sleep(0.00005)
    if answer[1] is not None:
        raise RuntimeError(answer[1])
