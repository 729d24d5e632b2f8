"""What the hardware allows: bytes that a decode step must read, and what the bus and a file give when nothing else is done."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

import torch

from gpu.shapes import Made
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.shapes import Point, Prefix, Window
from store.page_cache import chill

MEMORY_BYTES_PER_S = 4.0e12  # of an H200, as far as kernels reach
_BLOCK = 8 << 20
_REPEATS = 5


def step_limit_s(weights: float, spec: ModelSpec, picked: dict[str, int], *, batch: int, context: int) -> float:
    """The least time of a decode step: `weights` bytes of weights and all contexts read once."""
    return (weights + batch * state_bytes(spec, context, picked)) / MEMORY_BYTES_PER_S


def weight_bytes(made: Made, batch: int) -> float:
    """Read in one step: all but the embedding, and the experts that some request is expected to visit."""
    config, seen, total = made.config, set[int](), 0.0
    tied = config.tie_word_embeddings
    top = getattr(config, "num_experts_per_tok", None) or getattr(config, "num_experts_per_token", None) or 0
    for name, tensor in made.model.state_dict().items():
        if tensor.data_ptr() in seen or not tensor.is_floating_point() or (name.endswith("embed_tokens.weight") and not tied):
            continue
        seen.add(tensor.data_ptr())
        share = 1 - (1 - top / len(tensor)) ** batch if ".experts." in name and tensor.ndim == 3 else 1.0
        total += tensor.nbytes * share
    return total


def state_bytes(spec: ModelSpec, context: int, picked: dict[str, int]) -> float:
    """State of one request in one step. A recurrent state is read and written; open groups of a compressor are not counted."""
    total = 0.0
    for state in spec.states:
        rows: float = 0
        match state.shape:
            case Prefix(ratio=ratio):
                rows = min(context // ratio, picked.get(state.name, context))
            case Window(tokens=tokens):
                rows = min(context, tokens)
            case Point(period=None):
                rows = 2
        total += rows * state.row_bytes * state.layers
    return total


def bus_bytes_per_s(device: str, size: int) -> float:
    """From pinned host memory to the device, in one copy."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu").fill_(1)
    target = torch.empty(size, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(host, non_blocking=True)
        if device != "cpu":
            torch.cuda.synchronize()

    return size / _median_s(copy)


def file_bytes_per_s(directory: Path, size: int) -> dict[str, float]:
    """One file, read plainly: past the page cache where the file system can, by one thread and by four; else from cold files."""
    path = directory / "plain.bin"
    try:
        with path.open("wb") as file:
            noise = os.urandom(_BLOCK)
            for _ in range(-(-size // _BLOCK)):
                file.write(noise)
        chill([path])
        size = path.stat().st_size
        if not hasattr(os, "O_DIRECT") or not _opens_direct(path):
            return {"page cache dropped, 1 thread": size / _read_s(path, os.O_RDONLY, 1)}
        return {f"O_DIRECT, {threads} thread(s)": size / _read_s(path, os.O_RDONLY | os.O_DIRECT, threads) for threads in (1, 4)}
    finally:
        path.unlink(missing_ok=True)


def _opens_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def _read_s(path: Path, flags: int, threads: int) -> float:
    starts = range(0, path.stat().st_size, _BLOCK)

    def read(first: int) -> None:
        fd, buffer = os.open(path, flags), mmap(-1, _BLOCK)  # a map begins at a page, as O_DIRECT wants it
        try:
            for start in starts[first::threads]:
                os.preadv(fd, [buffer], start)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(read, range(threads)))
        return time.perf_counter() - started


def _median_s(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
