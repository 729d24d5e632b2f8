"""The library's modules by name: what an operation needs, whether it is compiled, and compiling it.

    attention-fa3-128-bfloat16         a backend, the width of heads, their numbers; `-window` and `-cap` where they have those
    latents-fa3-bfloat16, top-k        these passes wait for

Compiled ones come with the package `flashinfer-jit-cache`, or are in the library's cache directory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from typing import Any

import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.ops.compiling import Compiler, Process

JOBS_OF_ONE = 4  # compilers of one module at a time; a module has four to ten files
NICE = 10  # in the background: serving goes first

_ATTENTION = re.compile(r"attention-(fa2|fa3)-(64|128|256)-(bfloat16|float16)(-window)?(-cap)?")
_LATENTS = re.compile(r"latents-(fa2|fa3)-(bfloat16|float16)")
_TOP_K = "top-k"
_RANK, _ROTATED = 512, 64

# For most models, and those of the benchmarks first. On Hopper prompts use fa3 and single tokens fa2.
USUAL = (
    *(f"attention-{backend}-{width}-bfloat16" for width, backend in product((128, 64, 256), ("fa3", "fa2"))),
    *(f"latents-{backend}-bfloat16" for backend in ("fa3", "fa2")),
    _TOP_K,
    *(f"attention-{backend}-{width}-bfloat16-window" for width, backend in product((64, 128, 256), ("fa3", "fa2"))),
    *(f"attention-{backend}-128-float16{end}" for end, backend in product(("", "-window"), ("fa3", "fa2"))),
)


def attention_module(backend: str, width: int, dtype: torch.dtype, *, window: bool, cap: bool) -> str:
    number = str(dtype).removeprefix("torch.")
    return f"attention-{backend}-{width}-{number}{'-window' * window}{'-cap' * cap}"


def is_compiled(name: str) -> bool:
    """Whether the library would load a module without compiling anything. Raises ConfigError for a name that is not known."""
    return bool(_spec(name).is_compiled)


def progress(name: str) -> tuple[int, int]:
    """Files of a module that are compiled, and how many there are."""
    paths = _spec(name).get_object_paths()
    return sum(path.exists() for path in paths), len(paths)


def build(name: str, *, verbose: bool = False) -> None:
    """Compiles a module where it is not compiled yet, also while other processes do. Raises what the library raises."""
    spec = _spec(name)
    if not spec.is_aot:
        spec.build(verbose=verbose, need_lock=True)


def architectures() -> str:
    """The GPUs that the library compiles for here, as its environment variable names them."""
    from flashinfer.compilation_context import CompilationContext

    given = os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    return given or " ".join(f"{major}.{minor}" for major, minor in sorted(CompilationContext().TARGET_CUDA_ARCHS))


def in_background() -> Compiler:
    """A process of `stepwell build-kernels` for each module, for the GPUs of this process."""
    jobs = min(JOBS_OF_ONE, max((os.cpu_count() or 1) - 1, 1))
    environment = {"MAX_JOBS": str(jobs)} | os.environ | {"FLASHINFER_CUDA_ARCH_LIST": architectures()}

    def start(name: str) -> Process:
        command = [sys.executable, "-m", "stepwell", "build-kernels", "--nice", str(NICE), name]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    return Compiler(is_compiled=is_compiled, start=start, progress=progress)


def _spec(name: str) -> Any:
    from flashinfer.jit.attention.modules import gen_batch_mla_module, gen_batch_prefill_module
    from flashinfer.jit.topk import gen_topk_module

    if found := _ATTENTION.fullmatch(name):
        backend, width, dtype = found[1], int(found[2]), getattr(torch, found[3])
        no_rotation, full_sums, window, cap = 0, False, bool(found[4]), bool(found[5])
        return gen_batch_prefill_module(
            backend, dtype, dtype, dtype, torch.int32, width, width, no_rotation, window, cap, full_sums
        )  # fmt: skip
    if found := _LATENTS.fullmatch(name):
        dtype = getattr(torch, found[2])
        return gen_batch_mla_module(found[1], dtype, dtype, dtype, torch.int32, _RANK, _ROTATED, False)
    if name == _TOP_K:
        return gen_topk_module()
    raise ConfigError(f"no kernels are called {name!r}; known are, for example, {', '.join(USUAL[:4])}")
