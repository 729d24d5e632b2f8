"""Runs an engine's passes on all ranks, as `Runner` does in this process. The engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from stepwell.base.spec import ModelSpec, Point
from stepwell.cache.facade import Cache
from stepwell.engine.ops.guarded import Report
from stepwell.engine.passes.spilling import SpillReport
from stepwell.engine.requests.request import Chunk
from stepwell.engine.running.runner import Facts, RanksReport, Slots, rows_of
from stepwell.engine.sampling.choices import WaitForChoices, choosing_for
from stepwell.engine.workers.pass_arrays import Pass
from stepwell.engine.workers.rank_workers import RankWorkers


class _SlotNumbers:
    """Numbers of the workers' slots: hands out the lowest free one."""

    def __init__(self, spec: ModelSpec) -> None:
        self.needed = any(isinstance(each.shape, Point) and each.shape.period is not None for each in spec.states)
        self._free: list[int] = []
        self._most = 0

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._most += 1
        return self._most - 1

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


@dataclass(slots=True, kw_only=True, eq=False)
class RankedRunner:
    """Runs passes on all ranks."""

    workers: RankWorkers
    spec: ModelSpec
    facts: Facts
    spilling: SpillReport | None = None
    _slots: Slots = field(init=False)

    def __post_init__(self) -> None:
        self._slots = Slots(_SlotNumbers(self.spec))

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self) -> None:
        self.workers.wait()

    def drop_graphs(self) -> bool:
        return False  # ranks capture none

    @property
    def kernels(self) -> Report:
        return self.workers.kernels

    @property
    def ranks(self) -> RanksReport:
        return self.workers.report

    def poll(self) -> bool:
        return self.workers.poll()

    def choose(self, chunks: Sequence[Chunk]) -> WaitForChoices:
        self._slots.sweep()
        given = Pass(
            rows=[rows_of(chunk, self._slots, picks=False) for chunk in chunks],
            choosing=choosing_for(chunks),
        )
        chosen = self.workers.compute(given)
        return lambda: chosen

    def warm_up(self, cache: Cache, max_alone: int) -> None:
        pass  # ranks warm up with their first passes

    def end(self) -> None:
        self._slots = Slots(_SlotNumbers(self.spec))
        self.workers.end()

    def restart(self) -> bool:
        return self.workers.restart()

    def close(self) -> None:
        self.workers.close()
