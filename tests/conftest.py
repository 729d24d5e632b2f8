"""How hard the random tests try: the same examples every time, more of them with STEPWELL_EXAMPLES=1000.

And one thread of arithmetic for each process: models are tiny here, and workers share the cores. Without a GPU, kernels run in
Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from deep import is_quick, mark_deep
from not_run import NUM_DEEP, pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa: F401 - hooks

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
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=15, stateful_step_count=25)
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


# Folders that need a device, another engine, weights or a browser: `make test` does not even collect them.
ELSEWHERE = {"gpu", "real", "routers", "sglang", "ui", "vllm"}


def pytest_configure(config: pytest.Config) -> None:
    if is_quick(config) and "STEPWELL_EXAMPLES" not in os.environ:
        settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    elsewhere = collection_path.parent == Path(__file__).parent and collection_path.name in ELSEWHERE
    return True if elsewhere and is_quick(config) and os.environ.get("TRITON_INTERPRET") == "1" else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_deep(items)
    if is_quick(config):
        config.stash[NUM_DEEP] = sum(item.get_closest_marker("deep") is not None for item in items)
