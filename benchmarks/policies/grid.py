"""The cells of a policy report: which trace, model, size and policy each is, and how one is replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.meters import SystemClock
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.presets import load_spec
from stepwell.sim.case import TIERS, Case
from stepwell.sim.ceiling import Ceiling
from stepwell.sim.clairvoyant import Leaving, foresee, step_tokens, working_set_bytes
from stepwell.sim.clairvoyant_tree import PromptTree, tree_of
from stepwell.sim.hardware import Hardware
from stepwell.sim.replay import replay_trace

SPECS = ("deepseek-v4-flash:fp8", "qwen3-next-80b", "kimi-k3", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3.2", "qwen3-8b")
BUDGETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # % of the working set
ONE_TIER = (100.0,)

# The offline references: strong policies, not bounds. What a report calls the reference is the better one.
REFERENCES: Mapping[str, Leaving] = {"clairvoyant": Leaving.SEEN, "clairvoyant-wanted": Leaving.WANTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One replay. `spec` is a name, or a name and how rows are kept, as in `deepseek-v4-flash:fp8`."""

    trace: Path
    spec: str
    budget: float  # % of the working set
    budget_bytes: int
    tiers: tuple[float, ...]  # % of the budget on device, host and store
    policy: str
    requests: int | None

    @property
    def key(self) -> str:
        """What tells its result from others': the same for the same question, wherever the trace lies."""
        tiers = "/".join(f"{share:g}" for share in self.tiers)
        return f"{self.trace.name} {self.requests or 'all'} {self.spec} {self.budget:g}% {tiers} {self.policy}"

    def case(self) -> Case:
        name, _, kv_dtype = self.spec.partition(":")
        sizes = {tier: int(self.budget_bytes * share / 100) for tier, share in zip(TIERS, self.tiers, strict=False)}
        return Case(
            trace=self.trace, spec=name, kv_dtype=kv_dtype or None, sizes=sizes, policy=self.policy, hardware=Hardware(),
            requests=self.requests,
        )  # fmt: skip

    def run(self, on_request: Callable[[], None]) -> dict[str, Any]:
        """The cell with its figures; with an `error` in their place where no cache can be that small."""
        asked, started_s = asdict(self) | {"trace": self.trace.name, "key": self.key}, time.process_time()
        try:
            found = self._foreseen(on_request) if self.policy in REFERENCES else self._replayed(on_request)
        except ConfigError as error:
            found = {"hit_rate": None, "error": str(error)}
        return asked | found | {"cpu_s": time.process_time() - started_s}

    def _replayed(self, on_request: Callable[[], None]) -> dict[str, Any]:
        case = self.case()
        report = replay_trace(case.open_trace(), case.setup(), policy=self.policy, clock=SystemClock(), on_request=on_request)
        names = ("hit_rate", "ceiling", "checkpoints_made", "checkpoints_used", "checkpoints_evicted", "too_large", "wall_s")
        written = {f"{tier.label}_written_bytes": report.tiers[tier].written_bytes for tier in (Tier.HOST, Tier.STORE)}
        return {name: getattr(report, name) for name in names} | written

    def _foreseen(self, on_request: Callable[[], None]) -> dict[str, Any]:
        """One tier of all the bytes, however they are split: the reference is not told to copy anything twice."""
        clock, case = SystemClock(), self.case()
        started_s, trace, spec = clock.now(), case.open_trace(), spec_named(self.spec)
        foreseen = foresee(trace, spec, budget_bytes=self.budget_bytes, leaving=REFERENCES[self.policy], on_request=on_request)
        made = foreseen.checkpoints_made
        return {"hit_rate": foreseen.hit_rate, "checkpoints_made": made, "wall_s": clock.now() - started_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSet:
    """What there is to cache of one trace for one model."""

    size_bytes: int
    requests: int
    ceiling: float


class WorkingSets:
    """Reads each trace once for each size of page."""

    def __init__(self, requests: int | None) -> None:
        self._requests = requests
        self._trees: dict[tuple[Path, int], PromptTree] = {}
        self._ceilings: dict[tuple[Path, int], float] = {}

    def of(self, path: Path, spec_name: str) -> WorkingSet:
        """Raises TraceError, and ConfigError for a trace without a page."""
        spec = spec_named(spec_name)
        key = (path, step_tokens(spec))
        if key not in self._trees:
            trace = _case(path, spec_name, self._requests).open_trace()
            self._trees[key] = tree_of(trace, page_tokens=step_tokens(spec))
            ceiling = Ceiling(spec, trace.block_tokens, whole_blocks=False)
            reusable = sum(ceiling.reusable(each) for each in trace)
            self._ceilings[key] = reusable / max(int(self._trees[key].prompt_tokens_R.sum()), 1)
        tree = self._trees[key]
        if not tree.num_pages:
            raise ConfigError(f"{path} has no prompt of a whole page: there is nothing to cache")
        size_bytes = working_set_bytes(tree, spec)
        return WorkingSet(size_bytes=size_bytes, requests=len(tree.end_R), ceiling=self._ceilings[key])


def cells_of(
    traces: Sequence[Path], specs: Sequence[str], sets: WorkingSets, *, budgets: Sequence[float], tiers: tuple[float, ...],
    policies: Sequence[str], requests: int | None,
) -> Iterator[Cell]:  # fmt: skip
    """Every cell once. Rules that differ only in where they leave checkpoints are one where a model has none."""
    for trace in traces:
        for spec in specs:
            found, needed = sets.of(trace, spec), _distinct(policies, spec_named(spec))
            for budget in budgets:
                for policy in needed:
                    yield Cell(
                        trace=trace, spec=spec, budget=budget, budget_bytes=int(found.size_bytes * budget / 100), tiers=tiers,
                        policy=policy, requests=requests,
                    )  # fmt: skip


def spec_named(name: str) -> ModelSpec:
    preset, _, kv_dtype = name.partition(":")
    return load_spec(preset, kv_dtype=kv_dtype or None)


def _distinct(policies: Sequence[str], spec: ModelSpec) -> list[str]:
    if spec.needs_checkpoint:
        return list(policies)
    same = {name for name in policies if name.startswith("every-")} if "end" in policies else set()
    same |= {"clairvoyant-wanted"} if "clairvoyant" in policies else set()
    return [name for name in policies if name not in same]


def _case(path: Path, spec: str, requests: int | None) -> Case:
    return Case(trace=path, spec=spec, sizes={}, policy="", hardware=Hardware(), requests=requests)
