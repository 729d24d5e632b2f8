"""One soak from its first start to its verdict: two servers over one log, clients, troubles, and the end of it all.

known answers -> both start -> clients ask | troubles | memory is read -> audits -> SIGTERM -> the log is checked, repaired
and checked again -> a new server answers every prompt from it
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx

from soaking.asking import Client, Tally, Wish
from soaking.backend import LOG_SUFFIX, PATIENCE_S, Backend
from soaking.growing import JUDGED_FROM_S, WARM_SHARE, Growth, Sample, growth
from soaking.known import Known, Shape, known_answers
from soaking.servers_said import traces, warnings
from soaking.troubles import Troubles
from stepwell.base.units import format_bytes

SAMPLED_S = 0.5
LAST_WORDS = 20_000  # of the log of a server that did not come to rest: what all its threads do
# What a request may leave behind, on average, once everything is warm: half of what a leaked request would, its list
# of tokens (8 bytes a token, some 500 tokens). A leaked page is no growth, for tiers have their size: the audit finds it.
LEFT_BYTES_A_REQUEST = 2048
NOISE_BYTES = 16 << 20  # what allocators keep for a while, however long a process lives
MORE_FILES, MORE_THREADS = 24, 8  # than in the first half of the watch, at the least: connections that happen to stay open


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how hard."""

    seed: int
    seconds: float
    model: str = "random-hybrid"
    device: str = "cpu"
    clients: int = 6
    pause_s: tuple[float, float] = (3.0, 12.0)  # before each trouble
    rounds: int | None = None  # of troubles, after which it ends whatever the time; None for no limit
    shape: Shape = field(default_factory=Shape)
    sizes: tuple[str, ...] = ("--device-memory", "12MiB", "--host-memory", "24MiB", "--max-running", "4")
    store: tuple[tuple[str, str], ...] = (("budget", "96MiB"), ("segment", "4MiB"), ("timeout", "2"))


@dataclass(kw_only=True)
class Verdict:
    """What came of a soak."""

    plan: Plan
    tally: Tally
    troubles: dict[str, int]
    growth: Growth | None
    counters: dict[str, int]  # of the steady server
    answered_after: int  # prompts that the last server answered rightly from what was left
    damaged: int  # values that the check found damaged before the repair
    warned: dict[str, int]  # by servers in their logs: what they said, and how often
    took_s: float
    faults: list[str]

    @property
    def right(self) -> bool:
        return not self.faults

    @property
    def says(self) -> str:
        if self.faults:
            return f"{len(self.faults)} faults"
        judged = self.growth is not None and self.growth.watched_s >= JUDGED_FROM_S
        return f"every answer right, audits clean, memory {'flat' if judged else 'not judged: it was watched too shortly'}"


async def soak(plan: Plan, directory: Path, say: Callable[[str], None]) -> Verdict:
    """Raises StepwellError where a server does not start. What goes wrong otherwise is in the verdict."""
    started = time.monotonic()
    say(f"answers to {plan.shape.count} prompts, computed without a cache")
    known = await asyncio.to_thread(known_answers, plan.model, plan.shape, plan.seed, plan.device)
    store = directory / "store"
    unlucky, steady = (_backend(plan, name, directory, store) for name in ("unlucky", "steady"))
    tally, samples = Tally(), list[Sample]()
    troubles = Troubles(steady, unlucky, store, Random(f"{plan.seed} troubles"), say)
    try:
        say("two servers start over one log")
        await unlucky.start()  # first: the log is its own
        await steady.start()
        await _play(plan, (steady, unlucky), known, tally, troubles, samples)
        say("audits, and the end of both servers")
        await _until_idle(steady, unlucky)
        await troubles.audit()
        counters = (await steady.state())["counters"]
        faults = [f"{each.name} ended with {status} at SIGTERM" for each in (steady, unlucky) if (status := await each.stop())]
        say("the log is checked and repaired")
        damaged, unsound = await asyncio.to_thread(_check, store)
        say("a new server answers every prompt from what was left")
        answered = await _ask_all(plan, directory, store, known, tally)
    finally:
        for backend in (steady, unlucky):
            await backend.close()
    grown, logs = growth(samples), logs_in(directory)
    requests = tally.outcomes.total()
    faults += [*tally.faults, *troubles.faults, *unsound, *traces(logs), *grown_too_much(grown, requests)]
    if not tally.outcomes["right"] or not tally.tokens["store"]:
        faults.append(f"nothing was proven: {dict(tally.outcomes)}, {dict(tally.tokens)}")
    return Verdict(
        plan=plan, tally=tally, troubles=dict(troubles.made), growth=grown, counters=counters, answered_after=answered,
        damaged=damaged, warned=dict(warnings(logs)), took_s=time.monotonic() - started, faults=faults,
    )  # fmt: skip


def logs_in(directory: Path) -> list[Path]:
    """Logs of all servers of the soak in this directory, one for each life."""
    return sorted(directory.glob(f"*{LOG_SUFFIX}"))


def _backend(plan: Plan, name: str, directory: Path, store: Path) -> Backend:
    arguments = ["--model", plan.model, "--device", plan.device, "--dtype", "fp32", "--served-model-name", "soak"]
    arguments += [*plan.sizes, "--drain", "60"]
    return Backend(name, arguments, directory, (f"shared-log:{store}", dict(plan.store)))


async def _play(
    plan: Plan, backends: tuple[Backend, Backend], known: list[Known], tally: Tally, troubles: Troubles, samples: list[Sample]
) -> None:  # fmt: skip
    """Until the time is over, or the rounds are."""
    ends, over = time.monotonic() + plan.seconds, asyncio.Event()

    def going() -> bool:
        return time.monotonic() < ends and not over.is_set()

    async def trouble() -> None:
        rounds = 0
        try:
            while going() and rounds != plan.rounds:
                await troubles.round(plan.pause_s, going)
                rounds += 1
        finally:
            over.set()

    async def sample() -> None:
        while not over.is_set():
            samples.append(Sample(at_s=time.monotonic(), found=backends[0].footprint()))
            await asyncio.sleep(SAMPLED_S)

    clients = [Client(backends, known, tally, Random(f"{plan.seed} client {each}")) for each in range(plan.clients)]
    await asyncio.gather(trouble(), sample(), *(client.run(going) for client in clients))


async def _until_idle(*backends: Backend) -> None:
    """Until nothing is asked and nothing is under way between tiers; a store that was ended may leave that for a while."""
    deadline = time.monotonic() + PATIENCE_S
    for backend in backends:
        while (state := await backend.state())["pending"] or any(state["requests"].values()):
            if time.monotonic() > deadline:
                log = (await backend.abort()).read_text(errors="replace")
                raise TimeoutError(f"{backend.name} did not come to rest: {json.dumps(state)}\n{log[-LAST_WORDS:]}")
            await asyncio.sleep(0.05)


async def _ask_all(plan: Plan, directory: Path, store: Path, known: list[Known], tally: Tally) -> int:
    """Every prompt once more, to a server that has nothing but the log; how many were answered rightly."""
    last = _backend(plan, "last", directory, store)
    try:
        await last.start()
        before = tally.outcomes["right"]
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http:
            client = Client([last], known, tally, Random(plan.seed))
            for each in known:
                await client.ask(http, last, Wish(known=each, salt=None, leaves_after=None, leaves_within_s=None))
        says = await last.audit()
        if says is not None:
            tally.fault(f"the audit of {says}")
        return tally.outcomes["right"] - before
    finally:
        await last.close()


def _check(store: Path) -> tuple[int, list[str]]:
    """How many values were damaged, as bits were flipped; and what is wrong after a repair, which must be nothing."""
    damaged = _store_command("check", str(store), "--repair", "--json")
    after = _store_command("check", str(store), "--json")
    found = json.loads(damaged.stdout)["damaged_values"] if damaged.returncode in (0, 1) else 0
    return found, [] if after.returncode == 0 else [f"the log after its repair: {after.stdout}{after.stderr}"[:2000]]


def _store_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepwell", "store", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def grown_too_much(grown: Growth | None, requests: int) -> list[str]:
    if grown is None or grown.watched_s < JUDGED_FROM_S:
        return []
    found = []
    most = NOISE_BYTES + LEFT_BYTES_A_REQUEST * requests * (1 - WARM_SHARE)
    if grown.grown_bytes > most:
        found.append(
            f"memory grew by {format_bytes(int(grown.grown_bytes))} in {grown.watched_s:.0f} s, over {format_bytes(int(most))}"
        )
    for what, more, allowed in (("files", grown.files, MORE_FILES), ("threads", grown.threads, MORE_THREADS)):
        if more > allowed:
            found.append(f"{more} more {what} than when it was warm, over {allowed}")
    return found
