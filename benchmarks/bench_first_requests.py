"""First tokens after a restart over a store: computed, fetched, and by the way that the engine chose, on several disks.

    make bench-first-requests      about 4 minutes on an H200; writes bench-first-requests.json

A model of 12 layers with the widths of Qwen3-8B and random weights, 49,152 bytes a token. For each disk and length an engine is
started over what an earlier one stored; its start measures what computing and reading take, and the prompt is its first request.
Then one engine more answers all lengths in a row. The goal is 1.1 times the sooner of computing and fetching.
`--tiny` runs the script on a small model, anywhere: no figure of it means anything.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console

from engine.driving import First, first_token, settle
from engine.models import held
from gpu.shapes import SHALLOW, make
from report import Goal, Row, goals_of, machine, table_of
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.engine import Engine, EngineConfig, Limits, build_engine
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.start_pass import measure_speed
from stepwell.store.api import Store
from stepwell.store.registry import open_store
from stepwell.store.wrappers import Slow
from store.page_cache import chill, warm

ROOT = Path(__file__).parents[1]
LENGTHS = (2_048, 8_192, 32_768, 60_000)
CHUNK_TOKENS = 8192
READERS = 4
GOAL = 1.1
ALWAYS = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0, recompute_tokens_per_s=1)
TINY_LENGTHS, TINY_CHUNK, TINY_PAGE = (128, 256), 256, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCase:
    """`bytes_per_s` holds a store down to so much; `cached` leaves what it holds in the machine's page cache."""

    name: str
    bytes_per_s: float | None = None
    cached: bool = False


DISKS = (
    DiskCase(name="disk"), DiskCase(name="disk held to 0.5 GB/s", bytes_per_s=0.5e9), DiskCase(name="page cache", cached=True),
)  # fmt: skip


class Machines:
    """Starts engines over one store."""

    def __init__(self, checkpoint: Checkpoint, directory: Path, *, device: str, lengths: Sequence[int], tiny: bool) -> None:
        self._checkpoint, self._device, self._tiny = checkpoint, device, tiny
        self._log = directory / "log"
        token_bytes = 49_152 if not tiny else 1024
        self._bytes = max(int(sum(lengths) * token_bytes * 1.2), 64 << 20)

    @contextmanager
    def started(self, disk: DiskCase, config: StoreConfig) -> Iterator[Engine]:
        store: Store = open_store(
            f"log:{self._log}", options={"budget": str(4 * self._bytes), "direct": "off" if disk.cached else "auto"}
        )
        files = [path for path in self._log.rglob("*") if path.is_file()]
        (warm if disk.cached else chill)(files)
        if disk.bytes_per_s is not None:
            store = Slow(store, sleep=time.sleep, bytes_per_s=disk.bytes_per_s / READERS)
        engine = build_engine(
            self._checkpoint,
            EngineConfig(
                device=self._device, device_memory=self._bytes, host_memory=2 * self._bytes,
                durable=True, store=f"log:{self._log}",
                store_config=config, limits=Limits(max_running=16, chunk_tokens=TINY_CHUNK if self._tiny else CHUNK_TOKENS),
                page_tokens=TINY_PAGE if self._tiny else None,
            ),
            store=store,
        )  # fmt: skip
        try:
            if engine.on_cuda:
                engine.warm_up()
            measure_speed(engine)
            if not disk.cached:
                chill(files)  # what the start read
            yield engine
        finally:
            engine.close()
            gc.collect()
            if self._device != "cpu":
                torch.cuda.empty_cache()


def measure(machines: Machines, prompts: Sequence[list[int]], say: Callable[[str], None]) -> list[Row]:
    computed, rows = _computed(machines, prompts, say), []
    for disk in DISKS:
        fetched: list[First] = []
        with machines.started(disk, ALWAYS) as engine:
            for prompt in prompts:
                fetched.append(first_token(engine, prompt))
                engine.cache.flush()
                settle(engine)
        chosen: list[First] = []
        for prompt in prompts:
            with machines.started(disk, StoreConfig()) as engine:
                chosen.append(first_token(engine, prompt))
        with machines.started(disk, StoreConfig()) as engine:
            later = [first_token(engine, prompt) for prompt in reversed(prompts)][::-1]
        for prompt, alone, whole, first, after in zip(prompts, computed, fetched, chosen, later, strict=True):
            rows.append(_row(f"{disk.name}, {len(prompt):,}", alone, whole, first, after))
            say(f"{rows[-1].what}: {dict(rows[-1].figures)}")
    return rows


def _computed(machines: Machines, prompts: Sequence[list[int]], say: Callable[[str], None]) -> list[float]:
    """Stores every prompt; seconds that each takes to compute, the second time in the same engine."""
    found = []
    with machines.started(DISKS[0], ALWAYS) as engine:
        for prompt in prompts:
            others = [[(token + shift) % engine.vocab_size for token in prompt] for shift in (1, 2)]
            found.append(statistics.median(first_token(engine, each).seconds for each in (*others, prompt)))
            settle(engine)
            say(f"{len(prompt):,} tokens: computed in {found[-1] * 1e3:.1f} ms, and stored")
    return found


def _row(what: str, computed_s: float, fetched: First, chosen: First, later: First) -> Row:
    sooner_s = min(computed_s, fetched.seconds)
    ratio, ratio_later = chosen.seconds / sooner_s, later.seconds / sooner_s
    figures = {
        "computed, ms": computed_s * 1e3, "fetched, ms": fetched.seconds * 1e3, "chosen first, ms": chosen.seconds * 1e3,
        "of it before computing, ms": chosen.waited_s * 1e3, "of it fetched": chosen.sources.store, "ratio": ratio,
        "chosen later, ms": later.seconds * 1e3, "of it before computing later, ms": later.waited_s * 1e3,
        "ratio later": ratio_later,
    }  # fmt: skip
    note = "" if fetched.sources.store else "nothing was fetched"
    return Row(what=what, figures=figures, note=note, goal=Goal(value=max(ratio, ratio_later), limit=GOAL, most=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where the store is made (default: the temporary directory)")
    parser.add_argument("--tiny", action="store_true", help="a small model and short prompts, on the CPU too")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-first-requests.json")
    args = parser.parse_args(argv)
    console, began_s = Console(width=200), time.monotonic()
    if not args.tiny and not torch.cuda.is_available():
        console.print("bench-first-requests: no CUDA here, nothing was measured (--tiny runs the script on a small model)")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = TINY_LENGTHS if args.tiny else LENGTHS
    made = make(SHALLOW, device, tiny=args.tiny)
    prompts = [np.random.default_rng(each).integers(0, made.config.vocab_size, each + 1).tolist() for each in lengths]

    def say(what: str) -> None:
        console.print(f"  {time.monotonic() - began_s:5.1f} s  {what}", highlight=False)

    with TemporaryDirectory(dir=args.dir, prefix="bench-first-requests-") as directory:
        checkpoint = held(made.name, made.model)
        machines = Machines(checkpoint, Path(directory), device=device, lengths=lengths, tiny=args.tiny)
        rows = measure(machines, prompts, say)
    console.print(table_of("First tokens after a restart", rows), goals_of({"first requests": rows}))
    args.out.write_text(json.dumps({"machine": machine(device), "rows": [row.as_json() for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
