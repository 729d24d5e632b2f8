"""Hit rates of the cache's own policy and of simple ones on one tier, over traces, models and sizes.

    make policy-report                              generated traces, one of each kind
    make policy-report TRACES="a.jsonl.gz b.jsonl"  recorded ones; JOBS=4 at a time, ARGS="--requests 5000" the first of each

    value         what ships: learned values and our placement of checkpoints
    lru           our placement, evicted by last use
    greedy        our placement, evicted by recompute saved per byte and second since last use, without any learning
    end           checkpoints at ends of prompts alone, evicted by last use, as most systems do
    every-8192    the same, and at multiples of 8,192 tokens

Budgets are shares of a trace's working set, which is all its distinct pages. Every cell is written to JSON as soon as it is done;
a run that was stopped continues there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from math import log2
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import Clock
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.presets import load_spec
from stepwell.cache.build import CacheTuning
from stepwell.policy.placement import PlacementRules
from stepwell.policy.value import LEVELS_PER_OCTAVE
from stepwell.sim.case import Case
from stepwell.sim.files import write_trace
from stepwell.sim.generate import Shape, generate
from stepwell.sim.hardware import Hardware
from stepwell.sim.policies import DEFAULT, POLICIES, LeastRecent
from stepwell.sim.pool import run_all
from stepwell.sim.replay import Replay

ROOT = Path(__file__).parents[1]
GENERATED = {"chat": 400, "agents": 80, "rag": 1500}  # sessions: some thousand requests of each kind
SPECS = ("deepseek-v4-flash:fp8", "qwen3-next-80b", "kimi-k3", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3.2", "qwen3-8b")
BUDGETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # % of the working set
GREEDY_S = 10.0  # added to the age of every object
ENDS = PlacementRules(interval_tokens=0, most_added=None, decode_interval_tokens=0, at_branch=False)


class Greedy(LeastRecent):
    """Recompute saved per byte, over the seconds since last use."""

    def __init__(self) -> None:
        self.clock: Clock | None = None  # of the replay

    def level(self, saved_tokens: int, size_bytes: int, next_distance: int, distance: int, *, deferred: bool) -> int:
        return round(LEVELS_PER_OCTAVE * log2(max(saved_tokens, 1) / size_bytes))

    def worth(self, group: int, level: int, since: float) -> float:
        assert self.clock is not None
        return float(2.0 ** (level / LEVELS_PER_OCTAVE) / (max(self.clock.now() - since, 0.0) + GREEDY_S))


RIVALS = {
    "greedy": lambda: CacheTuning(eviction=Greedy(), placement=PlacementRules()),
    "end": lambda: CacheTuning(eviction=LeastRecent(), placement=ENDS),
    "every-8192": lambda: CacheTuning(eviction=LeastRecent(), placement=replace(ENDS, interval_tokens=8192)),
}
NAMES = (*POLICIES, *RIVALS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay. `spec` is a preset, and the dtype of its rows if it is not the model's, as in `deepseek-v4-flash:fp8`."""

    trace: Path
    spec: str
    budget: float  # % of the working set
    budget_bytes: int
    policy: str
    requests: int | None

    @property
    def key(self) -> str:
        """The same for the same question, wherever the trace lies."""
        return f"{self.trace.name} {self.requests or 'all'} {self.spec} {self.budget:g}% {self.policy}"

    def case(self) -> Case:
        name, _, kv_dtype = self.spec.partition(":")
        return Case(
            trace=self.trace, spec=name, kv_dtype=kv_dtype or None, sizes={Tier.DEVICE: self.budget_bytes}, policy=DEFAULT,
            hardware=Hardware(), requests=self.requests,
        )  # fmt: skip

    def run(self, on_request: Callable[[], None]) -> dict[str, Any]:
        """Figures, or an `error` where no cache can be that small."""
        about = {"key": self.key, "trace": self.trace.name, "spec": self.spec, "budget": self.budget, "policy": self.policy}
        case = self.case()
        tuning = RIVALS[self.policy]() if self.policy in RIVALS else POLICIES[self.policy]
        trace = case.open_trace()
        try:
            replay = Replay(replace(case.setup(), tuning=tuning), block_tokens=trace.block_tokens)
        except ConfigError as error:
            return about | {"hit_rate": None, "error": str(error)}
        if isinstance(tuning.eviction, Greedy):
            tuning.eviction.clock = replay.clock
        for request in trace:
            replay.serve(request)
            on_request()
        report = replay.tally.report(trace=trace.name, policy=self.policy, wall_s=0.0)
        counts = {name: getattr(report, name) for name in ("hit_rate", "ceiling", "checkpoints_made", "too_large")}
        return about | {"budget_bytes": self.budget_bytes} | counts


def spec_named(name: str) -> ModelSpec:
    preset, _, kv_dtype = name.partition(":")
    return load_spec(preset, kv_dtype=kv_dtype or None)


@cache
def num_pages(path: Path, page_tokens: int, requests: int | None) -> int:
    """Distinct whole pages of a trace's prompts without their last token, which is always computed."""
    trace = Case(trace=path, spec="", sizes={}, policy="", hardware=Hardware(), requests=requests).open_trace()
    seen: set[int] = set()
    for request in trace:
        tokens = min(request.prompt_tokens - 1, len(request.blocks) * trace.block_tokens)
        last_P = np.arange(1, max(tokens, 0) // page_tokens + 1) * page_tokens - 1  # the last token of each page
        names_P = request.blocks[last_P // trace.block_tokens] * trace.block_tokens + last_P % trace.block_tokens
        low, high = 0, len(names_P)
        while low < high:  # equal ids have equal history: no page is known below one that is not
            middle = (low + high) // 2
            low, high = (middle + 1, high) if int(names_P[middle]) in seen else (low, middle)
        seen.update(names_P[low:].tolist())
    return len(seen)


def cells_of(args: argparse.Namespace, traces: Sequence[Path]) -> Iterator[Cell]:
    """Every cell once. A model without checkpoints has no intervals."""
    for trace in traces:
        for spec_name in args.specs:
            spec = spec_named(spec_name)
            step = spec.free_step or spec.boundary_step
            page_bytes = step // spec.page_tokens * spec.object_bytes(Kind.PREFIX)
            size_bytes = num_pages(trace, step, args.requests) * page_bytes
            if not size_bytes:
                raise ConfigError(f"{trace} has no prompt of a whole page: there is nothing to cache")
            for budget in args.budgets:
                for policy in NAMES:
                    if spec.needs_checkpoint or not policy.startswith("every-"):
                        yield Cell(
                            trace=trace, spec=spec_name, budget=budget, budget_bytes=int(size_bytes * budget / 100),
                            policy=policy, requests=args.requests,
                        )  # fmt: skip


def tables(cells: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Hit rates by trace and model, a row for each budget."""
    for (trace, spec), group in groupby(cells, key=lambda cell: (cell["trace"], cell["spec"])):
        found = list(group)
        ceiling = max((cell["ceiling"] for cell in found if "ceiling" in cell), default=0.0)
        table = Table(title=f"{spec} on {trace}: hit rates, % of prompt tokens; at most {ceiling:.1%}", title_justify="left")
        for head in ("budget", *NAMES):
            table.add_column(head, justify="right")
        for budget, row in groupby(found, key=lambda cell: cell["budget"]):
            rates = {cell["policy"]: cell["hit_rate"] for cell in row}
            shown = ("-" if rates.get(name) is None else f"{100 * rates[name]:.1f}" for name in NAMES)
            table.add_row(f"{budget:g} %", *shown)
        yield table


def _generated(directory: Path) -> list[Path]:
    paths = []
    for kind, sessions in GENERATED.items():
        shape = Shape(sessions=sessions, duration_s=4 * 3600)
        paths.append(directory / f"generated-{kind}.jsonl.gz")
        write_trace(paths[-1], generate(kind, shape), block_tokens=shape.block_tokens, source=f"generated {kind}")
    return paths


def report(console: Console, args: argparse.Namespace, traces: Sequence[Path]) -> None:
    cells = list(cells_of(args, traces))
    found = {cell["key"]: cell for cell in (json.loads(args.json.read_text()) if args.json.exists() else [])}
    missing = [cell for cell in cells if cell.key not in found]
    console.print(f"{len(cells)} cells, {len(cells) - len(missing)} of them done before")

    def take(place: int, result: dict[str, Any]) -> None:
        found[result["key"]] = result
        part = args.json.with_suffix(".part")
        part.write_text(json.dumps([*found.values()], indent=1) + "\n")
        part.replace(args.json)
        console.print(f"{missing[place].key}: {result['hit_rate']}", markup=False, highlight=False)

    run_all(Cell.run, missing, jobs=args.jobs, on_result=take, on_progress=lambda served: None)
    for table in tables([found[cell.key] for cell in cells]):
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="*", type=Path, default=[], help="files (default: generated ones)")
    parser.add_argument("--specs", nargs="+", default=list(SPECS), metavar="NAME[:KV_DTYPE]", help="(default: %(default)s)")
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS), metavar="PERCENT", help="of the working set")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="replays at a time (default: one a core)")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of each trace (default: all)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-policies.json", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    console = Console(width=150 if not sys.stdout.isatty() else None, highlight=False)
    with TemporaryDirectory(prefix="policy-report-") as directory:
        report(console, args, args.traces or _generated(Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
