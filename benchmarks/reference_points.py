"""Fixed rules on the trace of agents, beside figures of an independent simulator: does the replay count as others do?

    python benchmarks/reference_points.py agentic_dev.jsonl.gz [--jobs N] [--models NAME ...] [--policies NAME ...] [--json FILE]

That simulator keeps an exact LRU over pages and checkpoints that fill memory to the last byte. The replay drives the real
cache, whose memory is in slabs; so each line also tells how much of its memory held something, in the mean over requests.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from stepwell.base.config import CacheConfig
from stepwell.base.ids import Tier
from stepwell.base.spec import ModelSpec, Point, Prefix, StateSpec
from stepwell.sim.files import TraceFile
from stepwell.sim.policies import policy_named
from stepwell.sim.replay import Replay
from stepwell.sim.setup import Setup

ROOT = Path(__file__).parents[1]
PAGE_TOKENS = 64
GB = 10**9


@dataclass(frozen=True, slots=True)
class Sizes:
    token_bytes: int
    checkpoint_bytes: int

    def spec(self, name: str) -> ModelSpec:
        rows = StateSpec(name="rows", shape=Prefix(), layers=1, row_bytes=self.token_bytes, dtype="u8")
        point = StateSpec(name="point", shape=Point(), layers=1, row_bytes=self.checkpoint_bytes, dtype="u8")
        return ModelSpec(name=name, page_tokens=PAGE_TOKENS, states=(rows, point))


MODELS: Mapping[str, Sizes] = {
    "kimi-k3-like": Sizes(27_648, int(0.4 * 2**30)),
    "qwen3-next-like": Sizes(24_576, 77_800_000),
    "deepseek-v4-flash-like": Sizes(3_685, 3_600_000),
}

# Hit rates in percent: of the simulator, by model, budget in GB and policy.
GIVEN: Mapping[str, Mapping[int, Mapping[str, float]]] = {
    "kimi-k3-like": {
        100: {"end": 84.8, "every-8192": 72.2, "every-2048": 28.5},
        300: {"end": 93.4, "every-8192": 93.1, "every-2048": 82.9},
        1000: {"end": 95.2, "every-8192": 95.5, "every-2048": 94.9},
    },
    "qwen3-next-like": {
        50: {"end": 76.0, "every-8192": 71.2, "every-2048": 50.7},
        100: {"end": 90.6, "every-8192": 90.1, "every-2048": 83.6},
        200: {"end": 94.2, "every-8192": 94.6, "every-2048": 93.4},
    },
    "deepseek-v4-flash-like": {
        5: {"end": 60.5, "every-8192": 58.8, "every-2048": 50.6, "every-512": 27.8},
        10: {"end": 85.2, "every-8192": 85.5, "every-2048": 82.2, "every-512": 61.7},
        20: {"end": 93.2, "every-8192": 93.8, "every-2048": 93.2, "every-512": 88.7},
        50: {"end": 95.2, "every-8192": 95.8, "every-2048": 95.7, "every-512": 95.1},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay."""

    trace: str
    model: str
    budget_gb: int
    policy: str

    @property
    def given(self) -> float:
        return GIVEN[self.model][self.budget_gb][self.policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What it came to, in percent."""

    cell: Cell
    ours: float
    memory_used: float
    wall_s: float


def main() -> None:
    args = _arguments()
    wanted = [
        Cell(trace=args.trace.name, model=model, budget_gb=budget, policy=policy)
        for model in args.models
        for budget, policies in GIVEN[model].items()
        for policy in policies
        if policy in args.policies
    ]
    results = {result.cell: result for result in _read(args.json)}
    missing = [cell for cell in wanted if cell not in results]
    with ProcessPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run, cell, args.trace) for cell in missing]
        for done in track(as_completed(futures), "replaying", total=len(missing), console=Console(stderr=True)):
            result = done.result()
            results[result.cell] = result
            _write(args.json, list(results.values()))
    Console(width=None).print(_table([results[cell] for cell in wanted]))


def _arguments() -> argparse.Namespace:
    policies = list(dict.fromkeys(policy for budgets in GIVEN.values() for rules in budgets.values() for policy in rules))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME", help="(default: all)")
    parser.add_argument("--policies", nargs="+", choices=policies, default=policies, metavar="NAME", help="(default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="replays at a time (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-reference-points.json", metavar="FILE",
                        help="every figure; a run that was stopped goes on from there (default: %(default)s)")  # fmt: skip
    return parser.parse_args()


def _read(path: Path) -> list[Result]:
    found = json.loads(path.read_text()) if path.exists() else []
    return [Result(**each | {"cell": Cell(**each["cell"])}) for each in found]


def _write(path: Path, results: Sequence[Result]) -> None:
    """All or nothing, whenever it is stopped."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps([asdict(each) for each in results], indent=1))
    beside.replace(path)


def run(cell: Cell, path: Path) -> Result:
    """Replays a cell and looks at its memory after every request."""
    started_s = time.monotonic()
    setup = Setup(
        spec=MODELS[cell.model].spec(cell.model),
        config=CacheConfig(device_bytes=cell.budget_gb * GB),
        tuning=replace(policy_named(cell.policy), page_alignment_bytes=1),
    )
    trace = TraceFile(path)
    replay = Replay(setup, block_tokens=trace.block_tokens)
    used, served = 0, 0
    for request in trace:
        replay.serve(request)
        used += replay.cache.stats().tier(Tier.DEVICE).used_bytes
        served += 1
    report = replay.tally.report(trace=trace.name, policy=cell.policy, wall_s=time.monotonic() - started_s)
    return Result(
        cell=cell,
        ours=100 * report.hit_rate,
        memory_used=100 * used / served / (cell.budget_gb * GB),
        wall_s=report.wall_s,
    )


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="Hit rates in percent, and how much of the memory held something", title_justify="left")
    for head in ("model", "budget", "policy", "given", "ours", "difference", "memory used"):
        table.add_column(head, justify="left" if head in ("model", "policy") else "right")
    for each in results:
        cell = each.cell
        table.add_row(
            cell.model, f"{cell.budget_gb:,} GB", cell.policy, f"{cell.given:.1f}", f"{each.ours:.1f}",
            f"{each.ours - cell.given:+.1f}", f"{each.memory_used:.1f} %",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
