"""Longer lives of a prompt cache for Transformers: random prompts that branch, little memory, processes that are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from connectors.tiny_models import logits, opened, prompt, tiny, uncached  # noqa: E402
from stepwell.store.memory import MemoryStore  # noqa: E402

TOLERANCE = 1e-4
TESTS = Path(__file__).parents[1]

KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
from connectors.tiny_models import WAIT, made, prompt
from stepwell.connectors.transformers import PromptCache
from waiting import wait_until
settings = {{"store": "log:{log}", "store_options": {{"budget": "64MiB"}}, "store_config": WAIT, "self_test": False}}
prompts = PromptCache(made("falcon_h1"), host_memory="16MiB", page_tokens=16, **settings)
prompts.prefill(prompt(1, 100))
wait_until(lambda: prompts.stats().storing == 0)
os._exit(9)
"""


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("host_memory", ["192KiB", "2MiB"])
def test_prompts_that_branch_are_right_whatever_is_evicted(family: str, host_memory: str) -> None:
    model, random, store = tiny(family), Random(f"{family} {host_memory}"), MemoryStore(1 << 20)
    trunks = [prompt(seed, 140) for seed in range(3)]
    cached_tokens = 0
    for _ in range(2):  # the second begins with what the store has
        with opened(model, host_memory=host_memory, store=store, chunk_tokens=48) as prompts:
            for turn in range(10):
                trunk = random.choice(trunks)[:, : random.randrange(1, 140)]
                rows = random.choice((1, 1, 2))
                ids = torch.cat([trunk.repeat(rows, 1), prompt(random.randrange(8), random.randrange(1, 40), rows=rows)], 1)
                found, cached = logits(prompts, ids)
                cached_tokens += cached
                assert float((found - uncached(model, ids, found.shape[1])).abs().max()) < TOLERANCE, f"turn {turn}"
                prompts.audit()
    assert cached_tokens > 0


def test_a_killed_process_leaves_what_was_stored(tmp_path: Path) -> None:
    script = KILLED.format(tests=str(TESTS), log=tmp_path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 9, done.stderr
    model, ids = tiny("falcon_h1"), prompt(1, 100)
    with opened(model, store=f"log:{tmp_path}", store_options={"budget": "64MiB"}) as prompts:
        found, cached = logits(prompts, ids)
    assert cached == 96 and float((found - uncached(model, ids, found.shape[1])).abs().max()) < TOLERANCE
