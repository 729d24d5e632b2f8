"""Kernels that are compiled in processes of their own, while requests are served without them.

    need       a pass asks for modules: fine, or NotYet, and what lacks them runs in plain torch
    settle     between passes: processes that have ended, modules that can be used from now on, progress for the log

A module is used from the pass after `settle` has said so, never in the middle of one. One thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepwell.base.meters import Clock, SystemClock
from stepwell.engine.ops.guarded import NoKernel, NotYet

LOOK_EVERY_S, SAY_EVERY_S = 0.5, 15.0

log = logging.getLogger(__name__)


def nothing(names: Sequence[str]) -> None:
    """For kernels that passes wait for: the library compiles them when they are first used."""


class Process(Protocol):
    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """How modules are compiled: one process for each."""

    is_compiled: Callable[[str], bool]
    start: Callable[[str], Process]
    progress: Callable[[str], tuple[int, int]]  # files that are done, and all of them


class Compiling:
    def __init__(self, compiler: Compiler, clock: Clock | None = None) -> None:
        self._compiler = compiler
        self._clock = clock or SystemClock()
        self._ready: set[str] = set()
        self._failed: set[str] = set()
        self._running: dict[str, Process] = {}
        self._began_s = self._looked_s = self._said_s = 0.0

    @property
    def pending(self) -> bool:
        """Whether something is being compiled: what runs in its place is not worth recording."""
        return bool(self._running)

    def need(self, names: Sequence[str]) -> None:
        """Raises NotYet while any of them is being compiled, which begins now; NoKernel where that failed."""
        if self._ready.issuperset(names):
            return
        for name in names:
            if name in self._ready or name in self._running:
                continue
            if name in self._failed:
                raise NoKernel(f"{name}, which could not be compiled")
            if self._compiler.is_compiled(name):
                self._ready.add(name)
            else:
                self._begin(name)
        if not self._ready.issuperset(names):
            raise NotYet(", ".join(names))

    def settle(self) -> bool:
        """Whether what passes run has changed: something is ready, or will never be."""
        now = self._clock.now()
        if not self._running or now < self._looked_s + LOOK_EVERY_S:
            return False
        self._looked_s = now
        ended = {name: code for name, process in self._running.items() if (code := process.poll()) is not None}
        for name, code in ended.items():
            del self._running[name]
            (self._failed if code else self._ready).add(name)
            if code:
                log.warning("%s could not be compiled (exit status %d): plain torch runs it, slowly", name, code)
            else:
                log.info("%s is compiled after %.0f s, and used from now on", name, now - self._began_s)
        if self._running and now >= self._said_s + SAY_EVERY_S:
            self._say(now)
        return bool(ended)

    def close(self) -> None:
        """Ends what is still being compiled; the library goes on from there the next time."""
        for process in self._running.values():
            process.terminate()
        self._running.clear()

    def _begin(self, name: str) -> None:
        now = self._clock.now()
        if not self._running:
            self._began_s = self._said_s = self._looked_s = now
        log.info(
            "%s is compiled in the background, once; plain torch runs it until then, slowly (`stepwell build-kernels`)", name
        )
        self._running[name] = self._compiler.start(name)

    def _say(self, now: float) -> None:
        self._said_s = now
        counts = [self._compiler.progress(name) for name in self._running]
        done, files, took_s = sum(each[0] for each in counts), sum(each[1] for each in counts), now - self._began_s
        left = f", about {took_s / done * (files - done):.0f} s to go" if done else ""
        log.info("compiling kernels: %d of %d files after %.0f s%s", done, files, took_s, left)
