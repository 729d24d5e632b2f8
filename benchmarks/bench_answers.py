"""What answers in the cache are worth to agents: a made-up loop in which the next prompt repeats the answer. No GPU needed.

    make bench-answers       print the tables, write bench-answers.json (some minutes)

    prompt    | tools | task | answer | result | answer | result | ...        one answer and one result more each turn

Lengths are lognormal, sessions share one of four sets of tools, and turns of many sessions come in between. Answers are committed
to the production cache as an engine does, token ids and all; nothing is computed, and copies take no time. `least` is what no
cache can spare: tokens that no earlier request has computed. Memory is plenty, or a share of what plenty came to use.
With `drops`, clients send back the last third of every answer alone, as they do who drop the reasoning.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import log
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from engine.machine import machine
from stepwell.base.config import CacheConfig
from stepwell.base.errors import NoRoom
from stepwell.base.ids import Tier
from stepwell.base.meters import ManualClock
from stepwell.base.spec.presets import load_spec
from stepwell.cache.build import CacheTuning, build_cache
from stepwell.cache.facade import Cache
from stepwell.policy.placement import PlacementRules
from stepwell.sim.executors import CountingExecutor, Traffic
from stepwell.tiers.lease import Lease

ROOT = Path(__file__).parents[1]
SPECS = ("qwen3-next-80b", "gpt-oss-120b", "kimi-linear-48b", "gemma-3-27b")
INTERVALS = {"none": 0, "256": 256, "every boundary": 1}
PLENTY_BYTES, CHUNK_TOKENS = 2 << 40, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    at_s: float
    prompt: npt.NDArray[np.int32]
    answer: Sequence[int]
    new_tokens: int  # of the prompt, that no earlier request has computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    model: str
    memory: str
    answers: str  # whether clients send them back whole
    checkpoints: str
    turns: int
    prompt_tokens: int
    computed: int
    least: int
    used_bytes: int


def turns_of(*, sessions: int, seed: int, drops: bool) -> Iterator[Turn]:
    """All sessions' turns by time. The same seed gives the same loop."""
    random, numbers = Random(seed), count()

    def text(median: float, sigma: float) -> list[int]:
        """Tokens that nobody else has."""
        return list(islice(numbers, max(round(random.lognormvariate(log(median), sigma)), 2)))

    tools = [text(8000, 0.3) for _ in range(4)]
    chosen = [random.randrange(len(tools)) for _ in range(sessions)]
    history = [[*tools[each], *text(1000, 0.5)] for each in chosen]
    computed = [0] * sessions  # tokens of each history that a turn before has left behind it
    used = set[int]()  # tools
    waiting = [(random.uniform(0, 600.0), session, random.randint(4, 40)) for session in range(sessions)]
    heapify(waiting)
    while waiting:
        at_s, session, left = heappop(waiting)
        prompt, answer = history[session], text(180, 0.9)
        known = computed[session] or (len(tools[chosen[session]]) if chosen[session] in used else 0)
        yield Turn(at_s=at_s, prompt=np.array(prompt, np.int32), answer=answer, new_tokens=len(prompt) - known)
        used.add(chosen[session])
        computed[session] = len(prompt) + (0 if drops else len(answer) - 1)  # the last token is chosen, and not computed
        prompt += (answer[-len(answer) // 3 :] if drops else answer) + text(500, 1.0)
        if left > 1:
            heappush(waiting, (at_s + random.lognormvariate(log(12.0), 1.0), session, left - 1))


def play(name: str, turns: Sequence[Turn], interval: int, size_bytes: int) -> tuple[int, int]:
    """Tokens of prompts that were computed, and the bytes that are used in the end."""
    spec, clock = load_spec(name), ManualClock()
    rules = PlacementRules(decode_interval_tokens=interval)
    cache = build_cache(
        spec, CacheConfig(device_bytes=size_bytes), executor=CountingExecutor(spec, Traffic()), clock=clock, model=name,
        tuning=CacheTuning(placement=rules),
    )  # fmt: skip
    computed = 0
    for turn in turns:
        clock.advance(max(turn.at_s - clock.now(), 1e-6))
        try:
            lease = cache.acquire(cache.lookup(turn.prompt))
        except NoRoom:
            computed += len(turn.prompt)
            continue
        with lease:
            _settle(cache, lease)
            computed += lease.sources.computed
            _compute(cache, lease, lease.prompt_tokens)
            cache.append(lease, turn.answer)
            _compute(cache, lease, lease.num_tokens - 1)
        _settle(cache, None)
    return computed, cache.stats().tier(Tier.DEVICE).used_bytes


def _compute(cache: Cache, lease: Lease, end: int) -> None:
    """In passes that end at stops, as far as there is room."""
    while lease.position < end:
        stop = cache.next_stop(lease)
        upto = min(end, lease.position + CHUNK_TOKENS, end if stop is None else stop)
        try:
            cache.grow(lease, upto)
        except NoRoom:
            return
        cache.commit(lease, upto)
        _settle(cache, lease)


def _settle(cache: Cache, lease: Lease | None) -> None:
    while cache.step().running or not (lease is None or lease.ready):
        pass


def measure(name: str, turns: Sequence[Turn], *, answers: str, shares: Sequence[float]) -> Iterator[Found]:
    total, least = sum(len(turn.prompt) for turn in turns), sum(turn.new_tokens for turn in turns)
    used = 0
    for memory, share in (("plenty", None), *((f"{share:.0%}", share) for share in shares)):
        for label, interval in INTERVALS.items():
            size = PLENTY_BYTES if share is None else max(int(used * share), 1)
            computed, now = play(name, turns, interval, size)
            used = max(used, now) if share is None else used
            yield Found(
                model=name, memory=memory, answers=answers, checkpoints=label, turns=len(turns), prompt_tokens=total,
                computed=computed, least=least, used_bytes=now,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--specs", nargs="+", default=list(SPECS), help="(default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.2], help="of what plenty used (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-answers.json", help="(default: %(default)s)")
    args = parser.parse_args()
    found = []
    for drops in (False, True):
        turns = list(turns_of(sessions=args.sessions, seed=args.seed, drops=drops))
        for name in args.specs:
            found += list(measure(name, turns, answers="drops" if drops else "whole", shares=args.shares))
    Console(width=120).print(_table(found))
    args.json.write_text(json.dumps({"machine": machine("cpu"), "rows": [asdict(each) for each in found]}, indent=1) + "\n")


def _table(found: Sequence[Found]) -> Table:
    heads = ("model", "answers", "memory", "checkpoints of answers", "computed a turn", "above the least", "hit rate")
    table = Table(title=f"{found[0].turns} turns", title_justify="left")
    for head in heads:
        table.add_column(head, justify="left" if head in heads[:4] else "right")
    for each in found:
        table.add_row(
            each.model, each.answers, each.memory, each.checkpoints, f"{each.computed / each.turns:,.0f}",
            f"{(each.computed - each.least) / each.turns:,.0f}", f"{1 - each.computed / each.prompt_tokens:.2%}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
