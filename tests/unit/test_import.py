"""What importing the package costs: no torch, nothing heavy, and little time."""

from __future__ import annotations

import subprocess
import sys

import pytest

import stepwell

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it now raises ImportError
import stepwell
spec = stepwell.load_spec("qwen3-8b")
kv = stepwell.StateSpec(name="kv", shape=stepwell.Prefix(), layers=1, row_bytes=8, dtype="u8")
cache = stepwell.build_cache(
    stepwell.ModelSpec(name="toy", states=(kv,)),
    stepwell.CacheConfig(device_bytes=1 << 20, host_bytes=1 << 20),
)
with cache.acquire(cache.lookup(range(200))) as lease:
    cache.grow(lease, 200)
    cache.commit(lease, 200)
cache.close()
cache.audit()
print(cache.lookup(range(200)).restore_tokens)
"""

LOADED = """
import sys
before = set(sys.modules)
from stepwell import *
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""

TIMED = """
from time import process_time
start = process_time()
import stepwell
print(process_time() - start)
"""


def _python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_everything_but_the_torch_adapter_works_without_torch() -> None:
    assert _python(WITHOUT_TORCH) == "192"


def test_importing_loads_numpy_and_xxhash_and_nothing_else_that_must_be_installed() -> None:
    assert set(_python(LOADED).split()) <= {"numpy", "stepwell", "xxhash", "__mp_main__"}


def test_every_public_name_is_found_where_it_is_said_to_be() -> None:
    for name in stepwell.__all__:
        assert getattr(stepwell, name) is not None
    assert set(stepwell.__all__) == {*stepwell._HOME_OF, "__version__"}
    assert dir(stepwell) == sorted(stepwell.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = stepwell.nonsense


def test_importing_takes_under_300_milliseconds() -> None:
    best_s = min(float(_python(TIMED)) for _ in range(5))  # processor time: what a machine that is not busy would take
    assert best_s < 0.3, f"importing took {best_s:.3f} s at best"
