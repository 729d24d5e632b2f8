"""What lossless packing would give: bytes of a state apart by their place in a number, a compressor over each of these planes.

A store would write fewer bytes and pack and unpack on the way; a host page has one size, so there it gives nothing. `limit` is
what the planes' own entropy allows, whatever the compressor.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from checkpoints.random_models import checkpoint_of
from stepwell.base.ids import Kind
from stepwell.engine import Ask, EngineConfig, Limits, Sampling, build_engine
from stepwell.engine.requests.request import Chunk

Pack = Callable[[bytes], bytes]
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    state: str
    dtype: str
    compressor: str
    ratio: float
    limit: float
    pack_mb_s: float
    unpack_mb_s: float


def states_of(model: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    """What windows and points of a prompt of whole pages hold where it ends, in fp32."""
    config = EngineConfig(
        device="cpu", page_tokens=64, device_memory="256MiB", host_memory=0, limits=Limits(chunk_tokens=512, max_running=1)
    )
    found: dict[str, torch.Tensor] = {}
    with build_engine(checkpoint_of(model), config) as engine:
        runner, spec = engine._runner, engine.cache.spec
        plain = runner.run

        def noting(chunks: Sequence[Chunk], **more: Any) -> Any:
            logits = plain(chunks, **more)
            lease, pages = chunks[0].request.lease, runner._pages  # type: ignore[attr-defined]
            for kind, ids in ((Kind.WINDOW, lease.window_pages), (Kind.POINT, lease.point_pages)):  # type: ignore[union-attr]
                for part in spec.parts(kind):
                    found[part.state] = pages.state_PLRE(part.state)[torch.from_numpy(ids[ids >= 0].astype("int64"))]
            return logits

        runner.run = noting  # type: ignore[method-assign]
        engine.submit(Ask(tokens=tokens, sampling=Sampling(max_tokens=1, ignore_eos=True)))
        while engine.num_open:
            engine.step()
    return found


def packed(state: str, x: torch.Tensor, dtype: torch.dtype, most_bytes: int = 16 << 20) -> Iterator[Packed]:
    numbers = x.flatten().to(dtype)[: most_bytes // dtype.itemsize].contiguous()
    raw = numbers.view(torch.uint8).numpy()
    planes = [np.ascontiguousarray(raw[at :: dtype.itemsize]) for at in range(dtype.itemsize)]
    limit = len(raw) / max(sum(map(_entropy_bytes, planes)), 1)
    for name, (pack, unpack) in _compressors().items():
        pieces = [pack(plane.tobytes()) for plane in planes]
        back = [unpack(piece) for piece in pieces]
        assert all(plane.tobytes() == each for plane, each in zip(planes, back, strict=True)), name
        yield Packed(
            state=state, dtype=str(dtype).removeprefix("torch."), compressor=name, limit=limit,
            ratio=len(raw) / sum(map(len, pieces)),
            pack_mb_s=_speed(lambda pack=pack: [pack(np.ascontiguousarray(raw[at :: dtype.itemsize]).tobytes())  # type: ignore[misc]
                                                for at in range(dtype.itemsize)], len(raw)),
            unpack_mb_s=_speed(lambda unpack=unpack, pieces=pieces: _joined([unpack(piece) for piece in pieces], len(raw)),  # type: ignore[misc]
                               len(raw)),
        )  # fmt: skip


def disk_mb_s(directory: Path, size_bytes: int = 256 << 20) -> tuple[float, float]:
    """How fast this disk takes bytes that are synced, and gives them back past the page cache where the system allows it."""
    path, block = directory / "bench-checkpoints.tmp", os.urandom(8 << 20)
    try:
        started = perf_counter()
        with path.open("wb") as file:
            for _ in range(size_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = perf_counter() - started
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass
        return size_bytes / written / 1e6, size_bytes / (perf_counter() - started) / 1e6
    finally:
        path.unlink(missing_ok=True)


def _joined(planes: list[bytes], size: int) -> Any:
    out = np.empty(size, np.uint8)
    for at, plane in enumerate(planes):
        out[at :: len(planes)] = np.frombuffer(plane, np.uint8)
    return out


def _compressors() -> dict[str, tuple[Pack, Pack]]:
    """zlib, and what else is installed: neither zstandard nor lz4 is needed by Stepwell."""
    found: dict[str, tuple[Pack, Pack]] = {"zlib 1": (lambda plane: zlib.compress(plane, 1), zlib.decompress)}
    if find_spec("zstandard") is not None:
        zstd = import_module("zstandard")
        for level in (1, 3):
            found[f"zstd {level}"] = (zstd.ZstdCompressor(level=level).compress, zstd.ZstdDecompressor().decompress)
    if find_spec("lz4") is not None:
        lz4 = import_module("lz4.frame")
        found["lz4"] = (lz4.compress, lz4.decompress)
    return found


def _entropy_bytes(plane: np.ndarray[Any, Any]) -> float:
    share = np.bincount(plane, minlength=256) / len(plane)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum()) * len(plane) / 8


def _speed(work: Callable[[], object], size: int) -> float:
    """MB/s of the best of a few tries."""
    best = float("inf")
    for _ in range(REPEATS):
        started = perf_counter()
        work()
        best = min(best, perf_counter() - started)
    return size / best / 1e6
