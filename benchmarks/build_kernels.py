"""Compiles the kernels of FlashInfer that `make bench-gpu` and `tests/gpu` use, side by side on all cores.

    make build-kernels       some minutes on 16 cores, once; FlashInfer keeps them in its cache

Without it each is compiled when it is first used, one after the other, for a minute and a half each.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from typing import Any

import torch

JOBS_OF_ONE = 4  # compilers of one module at a time; a module has four to ten files


def modules() -> Iterator[Any]:
    """Those of the benchmarks first: widths without a window, latents, the largest values of a row."""
    from flashinfer.jit.attention.modules import gen_batch_mla_module, gen_batch_prefill_module
    from flashinfer.jit.topk import gen_topk_module

    def attention(backend: str, width: int, dtype: torch.dtype, *, window: bool) -> Any:
        no_rotation, no_cap, full_sums = 0, False, False
        return gen_batch_prefill_module(
            backend, dtype, dtype, dtype, torch.int32, width, width, no_rotation, window, no_cap, full_sums
        )

    half, other_half = torch.bfloat16, torch.float16
    for width, backend in product((128, 64, 256), ("fa3", "fa2")):
        yield attention(backend, width, half, window=False)
    for backend in ("fa3", "fa2"):
        yield gen_batch_mla_module(backend, half, half, half, torch.int32, 512, 64, False)
    yield gen_topk_module()
    for width, backend in product((64, 128, 256), ("fa3", "fa2")):
        yield attention(backend, width, half, window=True)
    for window, backend in product((False, True), ("fa3", "fa2")):
        yield attention(backend, 128, other_half, window=window)


def main() -> int:
    cores = os.cpu_count() or 1
    os.environ.setdefault("MAX_JOBS", str(min(JOBS_OF_ONE, cores)))
    began, failed = time.monotonic(), 0
    with ThreadPoolExecutor(max(cores // JOBS_OF_ONE, 1) + 1) as pool:  # each only waits for its ninja
        made = {pool.submit(each.build, verbose=False): each.name for each in modules()}
        for count, done in enumerate(as_completed(made), start=1):
            error = done.exception()
            failed += error is not None
            how = "built" if error is None else f"FAILED: {error}"
            print(f"{time.monotonic() - began:5.0f} s  {count}/{len(made)}  {made[done]}: {how}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
