"""Loads whose layers arrive one by one, as a test decides: a stand-in for a GPU's events, over the host's memory.

A load's pages hold no numbers until something waits for one of their layers; then that layer is copied. What is read without
waiting is therefore seen in the answer. A load ends, or fails, when the cache asks for outcomes after a pass has begun on it, or
when the test lets it end before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stepwell.base.ids import JobId, Kind, Tier
from stepwell.base.spec import Part
from stepwell.base.tasks import Completion, Plan, Purpose
from stepwell.engine import Engine
from stepwell.engine.passes.pages import DevicePages
from stepwell.jobs.executors import attempt_copy, begin_copy
from stepwell.jobs.jobs import DoneAtOnce

NO_NUMBER = 0xFF  # in every byte


class ArrivingLoad:
    """One load. A pass calls `wait`, which on this machine makes the copy that the pass waits for."""

    def __init__(self, plan: Plan, pages: dict[Tier, DevicePages], waits: list[tuple[str, int]]) -> None:
        self.plan = plan
        self.begun = False
        self.asked = 0  # how often outcomes were asked for since a pass began on it
        self._pages = pages
        self._waits = waits
        self._came: set[tuple[str, int]] = set()

    def wait(self, state: str, layer: int) -> None:
        self.begun = True
        self._waits.append((state, layer))
        self._bring(state, layer)

    def spoil(self) -> None:
        for kind, _, target in self._copies():
            for part in self._parts(kind):
                self._pages[Tier.DEVICE].bytes_PLRB(part.state)[torch.from_numpy(target)] = NO_NUMBER

    def finish(self) -> None:
        for kind in {kind for kind, _, _ in self._copies()}:
            for part in self._parts(kind):
                for layer in range(part.layers):
                    self._bring(part.state, layer)

    def _parts(self, kind: Kind) -> list[Part]:
        """What is copied to pages of a kind: of states, and nothing that the device keeps for itself."""
        spec = self._pages[Tier.DEVICE].spec
        known = {state.name for state in spec.states}
        return [part for part in spec.device_parts(kind) if part.state in known]

    def _bring(self, state: str, layer: int) -> None:
        """Once: the request may have changed a point since."""
        if (state, layer) in self._came:
            return
        self._came.add((state, layer))
        for copy in self.plan.copies:
            if state in [part.state for part in self._parts(copy.target.kind)]:
                source, target = self._pages[copy.source.tier], self._pages[Tier.DEVICE]
                read, write = (torch.from_numpy(span.ids.astype(np.int64)) for span in (copy.source, copy.target))
                target.bytes_PLRB(state)[write, layer] = source.bytes_PLRB(state)[read, layer]

    def _copies(self) -> list[tuple[Kind, Any, Any]]:
        return [(c.target.kind, c.source.ids.astype(np.int64), c.target.ids.astype(np.int64)) for c in self.plan.copies]


class ArrivingLoads(DoneAtOnce[Completion]):
    """Put into an engine in place of its copy threads. Loads arrive layer by layer, all else is copied at once.

    `fails` is asked before a load ends, `ends_early` whenever outcomes are asked for, of loads that no pass has begun on.
    """

    num_ranks = 1

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        copies: Any = engine.cache._state.copies
        self._copy_engine = copies._executor._ranks[0]
        copies._executor.close()
        copies._executor, copies._arrivals = self, self.arriving
        self._pages: dict[Tier, DevicePages] = {}
        for tier, memory in self._copy_engine._memories.items():
            spec = engine.cache.spec if tier is Tier.DEVICE else replace(engine.cache.spec, spill=None)
            rows = {kind: torch.from_numpy(memory.rows(kind)) for kind in Kind if spec.device_parts(kind)}
            self._pages[tier] = DevicePages(spec, rows)
        self.loads: dict[JobId, ArrivingLoad] = {}
        self.waits: list[tuple[str, int]] = []  # in the order in which passes waited
        self.num_begun = 0  # loads that a pass began on
        self.late = 0  # how often outcomes are asked for in vain after a pass has begun on a load
        self.queued: Callable[[Plan], bool] = lambda plan: True  # whether a pass may begin on it
        self.fails: Callable[[Plan], bool] = lambda plan: False
        self.ends_early: Callable[[Plan], bool] = lambda plan: False

    def submit(self, plan: Plan) -> None:
        if plan.purpose is Purpose.LOAD:
            self.loads[plan.job] = ArrivingLoad(plan, self._pages, self.waits)
            self.loads[plan.job].spoil()
        else:
            self._done.append(Completion(job=plan.job, error=attempt_copy(0, begin_copy(self._copy_engine, plan))))

    def arriving(self, job: JobId) -> ArrivingLoad | None:
        load = self.loads.get(job)
        return load if load is not None and self.queued(load.plan) else None

    def answers(self) -> list[Completion]:
        for job, load in list(self.loads.items()):
            load.asked += load.begun
            if load.asked > self.late or (not load.begun and self.ends_early(load.plan)):
                self.end(job)
        return super().answers()

    def end(self, job: JobId) -> None:
        load = self.loads.pop(job)
        self.num_begun += load.begun
        error = "fails on purpose" if self.fails(load.plan) else None
        if error is None:
            load.finish()
        self._done.append(Completion(job=job, error=error))

    def drain(self, timeout_s: float) -> None:
        for job in list(self.loads):
            self.end(job)
