"""How hard the random tests try: the same examples every time, more of them with STEPWELL_EXAMPLES=1000.

And one thread of arithmetic for each process: models are tiny here, and workers share the cores. Without a GPU, kernels run in
Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import os

from hypothesis import HealthCheck, Phase, settings

from not_run import pytest_terminal_summary  # noqa: F401 - a hook

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before anything imports NumPy or torch; programs that tests start inherit it
try:
    ctypes.CDLL("libcuda.so.1")  # the driver
except OSError:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],  # explaining a failing life takes minutes
    suppress_health_check=SLOW_IS_FINE,
)
settings.load_profile("repeatable")
if "STEPWELL_EXAMPLES" in os.environ:
    settings.register_profile(
        "thorough",
        settings.get_profile("repeatable"),
        derandomize=False,
        print_blob=True,
        max_examples=int(os.environ["STEPWELL_EXAMPLES"]),
    )
    settings.load_profile("thorough")
