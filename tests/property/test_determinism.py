"""Same calls, same completions, same decisions: down to every page id, in this process and in one that hashes otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from lives import digest, live, live_with_store
from world import World

HERE = Path(__file__).parent
SEEDS = (3, 11, 19)
STEPS = 120


@cache
def once(life: Callable[[int, int], World], seed: int) -> list[str]:
    """What was decided in a life, lived once for all tests."""
    return life(seed, STEPS).trace


@pytest.mark.parametrize("seed", SEEDS)
def test_two_runs_of_one_life_decide_the_same(seed: int) -> None:
    first, second = once(live, seed), live(seed, STEPS).trace
    assert first == second
    assert any(line.startswith("free device") for line in first), "nothing was evicted or freed: the life was too quiet"


@pytest.mark.parametrize("seed", SEEDS)
def test_two_runs_of_one_life_over_a_store_decide_the_same(seed: int) -> None:
    first, second = once(live_with_store, seed), live_with_store(seed, STEPS).trace
    assert first == second
    assert any("PutPages" in line for line in first), "nothing was stored: the life was too quiet"


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_a_process_that_hashes_otherwise_decides_the_same(hash_seed: int) -> None:
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / "lives.py"), str(STEPS), *(str(seed) for seed in SEEDS)]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert there == [digest(once(life, seed)) for seed in SEEDS for life in (live, live_with_store)]
