"""`stepwell demo`: a small multi-turn workload through the real cache, with every byte checked.

A few users talk in turns, sharing a system prompt, in a device tier too small for all of them. The model is a stand-in
whose every byte is a digest of what it must depend on, so a wrong page cannot pass. Plays; decides nothing.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from stepwell.base.config import CacheConfig, PlacementConfig
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.base.spec import ModelSpec, Point, Prefix, StateSpec, Window
from stepwell.base.units import format_bytes
from stepwell.cache.build import build_cache, layouts_for, numpy_memories
from stepwell.cache.executor import ThreadExecutor
from stepwell.cache.facade import Cache
from stepwell.cache.lease import Lease
from stepwell.cli.command import Command
from stepwell.testing.digest_engine import DigestEngine
from stepwell.transfer.hands import NumpyHands

SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 96, 40, 24
CHUNK_TOKENS = 64
VOCABULARY = 32_000

SPEC = ModelSpec(
    name="demo-hybrid",
    page_tokens=16,
    states=(
        StateSpec(name="kv", shape=Prefix(), layers=2, row_bytes=64, dtype="u8"),
        StateSpec(name="swa", shape=Window(tokens=32), layers=4, row_bytes=32, dtype="u8"),
        StateSpec(name="ssm", shape=Point(), layers=4, row_bytes=512, dtype="u8"),
    ),
)
CONFIG = CacheConfig(
    device_bytes=144 * 1024,
    host_bytes=2 * 1024 * 1024,
    page_alignment_bytes=64,
    placement=PlacementConfig(interval_tokens=128, decode_interval_tokens=16),
    vocab_size=VOCABULARY,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one request cost, in tokens of its prompt by where they came from."""

    turn: int
    user: str
    prompt_tokens: int
    device: int
    host: int
    computed: int
    bytes_checked: int
    explanation: str


class Play:
    """Some users, a cache, and the stand-in model."""

    def __init__(self, users: int, turns: int, seed: int) -> None:
        memories = numpy_memories(SPEC, layouts_for(SPEC, CONFIG))
        self.engine = DigestEngine(SPEC, [memories])
        self.cache: Cache = build_cache(SPEC, CONFIG, executor=ThreadExecutor([NumpyHands(memories)]), on_free=self.engine.poison)
        self._random = random.Random(seed)
        self._turns = turns
        system = self._draw(SYSTEM_TOKENS)
        self._histories = {f"user {chr(ord('A') + i)}": list(system) for i in range(users)}

    def __len__(self) -> int:
        return self._turns * len(self._histories)

    def turns(self) -> Iterator[Turn]:
        for turn in range(1, self._turns + 1):
            for user, history in self._histories.items():
                history += self._draw(QUESTION_TOKENS)
                yield self._serve(turn, user, history)

    def _serve(self, turn: int, user: str, history: list[int]) -> Turn:
        """One request: look up, lease, check what came back, compute the rest, answer, give back."""
        cache, checked = self.cache, self.engine.bytes_checked
        explanation = str(cache.explain(history))
        prompt_tokens = len(history)
        with cache.acquire(cache.lookup(history), hints=(SYSTEM_TOKENS,)) as lease:
            self._wait(lease)
            self.engine.check(lease)
            while lease.position < prompt_tokens:
                self._compute(lease, min(lease.position + CHUNK_TOKENS, prompt_tokens))
            for token in self._draw(ANSWER_TOKENS):
                cache.append(lease, [token])
                history.append(token)
                self._compute(lease, lease.num_tokens)
            self.engine.check(lease)
            sources = lease.sources
        self._quiet()
        return Turn(
            turn=turn, user=user, prompt_tokens=prompt_tokens, device=sources.device, host=sources.host,
            computed=sources.computed, bytes_checked=self.engine.bytes_checked - checked, explanation=explanation,
        )  # fmt: skip

    def _compute(self, lease: Lease, upto: int) -> None:
        """Computes up to `upto` or to the next stop, whichever is first, and commits it."""
        stop = self.cache.next_stop(lease)
        upto = upto if stop is None else min(upto, stop)
        self.cache.grow(lease, upto)
        self.engine.compute(lease, upto)
        self.cache.commit(lease, upto)
        self._wait(lease)

    def _wait(self, lease: Lease) -> None:
        while not lease.ready:
            self.cache.step()
            assert not lease.failed, f"{lease} could not load"
            time.sleep(0)

    def _quiet(self) -> None:
        """Lets the copies downwards finish, as they would while users read their answers."""
        while self.cache.step().running:
            time.sleep(0)

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("--users", type=int, default=4, help="people talking in turns (default 4)")
    parser.add_argument("--turns", type=int, default=5, help="turns each of them takes (default 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the texts (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")


def _run(args: Namespace) -> int:
    if args.users < 1 or args.turns < 1 or args.users > 26:
        raise ConfigError(f"the demo needs 1 to 26 users and at least one turn, got {args.users} and {args.turns}")
    play = Play(args.users, args.turns, args.seed)
    turns = _watch(play)
    play.cache.audit()
    play.cache.close()
    _show(play, turns)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(turn) for turn in turns], indent=1) + "\n")
    return 0


def _watch(play: Play) -> list[Turn]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return list(track(play.turns(), total=len(play), description="playing", console=console, transient=True))


def _show(play: Play, turns: list[Turn]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="where each prompt's tokens came from", caption="at least one token of a prompt is always computed")
    for column in ("turn", "user", "prompt", "device", "host", "computed", "bytes checked"):
        table.add_column(column, justify="left" if column == "user" else "right")
    for turn in turns:
        cells = (turn.prompt_tokens, turn.device, turn.host, turn.computed)
        table.add_row(str(turn.turn), turn.user, *map(str, cells), format_bytes(turn.bytes_checked))
        if turn.user == turns[-1].user:
            table.add_section()
    console.print(table)
    prompt, computed = sum(t.prompt_tokens for t in turns), sum(t.computed for t in turns)
    cache, counts = play.cache, play.cache.counters
    console.print(
        f"{(prompt - computed) / prompt:.0%} of {prompt:,} prompt tokens were reused; "
        f"{format_bytes(play.engine.bytes_checked)} read back, every byte as it was saved: [bold]yes[/bold]"
    )
    console.print(
        f"device {format_bytes(cache.used_bytes(Tier.DEVICE))} of {format_bytes(CONFIG.device_bytes or 0)} "
        f"({counts['evicted_device_pages']} pages and {counts['evicted_device_checkpoints']} checkpoints moved out), "
        f"host {format_bytes(cache.used_bytes(Tier.HOST))} of {format_bytes(CONFIG.host_bytes or 0)}"
    )
    console.print(f"the last prompt, explained: it {turns[-1].explanation}")


COMMAND = Command(
    name="demo",
    summary="play a small multi-turn workload through the cache and check every byte",
    configure=_configure,
    run=_run,
)
