"""`python -m sglang.launch_server` on a machine without a GPU: takes the same arguments, runs the same module.

Children that SGLang spawns load this file too, and so have the same stand-ins for its kernels.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "benchmarks" / "peers")]
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import sglang_kernels  # noqa: E402

sglang_kernels.install()

import sglang_copies  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
sglang_copies.install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
