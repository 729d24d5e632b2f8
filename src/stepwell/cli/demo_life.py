"""One life of the demo: a process with a cache over a store, that plays some turns and says what each cost, a JSON line a turn.

A few users talk in turns, sharing a system prompt, in a device tier too small for all of them. The model is a stand-in
whose every byte is a digest of what it must depend on, so a wrong page cannot pass. It may be killed at any moment.
"""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from stepwell.base.config import CacheConfig, PlacementConfig
from stepwell.base.ids import Tier
from stepwell.base.spec import ModelSpec, Point, Prefix, StateSpec, Window
from stepwell.cache.build import build_cache, layouts_for, numpy_memories
from stepwell.cache.executor import ThreadExecutor
from stepwell.cache.facade import Cache
from stepwell.cache.lease import Lease
from stepwell.store.registry import open_store
from stepwell.testing.digest_engine import DigestEngine
from stepwell.transfer.hands import NumpyHands

SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 96, 40, 24
CHUNK_TOKENS = 64
VOCABULARY = 32_000
STORE_BUDGET = "64MiB"

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
    host_bytes=192 * 1024,
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
    store: int
    computed: int
    bytes_checked: int
    explanation: str


class Life:
    """Some users, a cache over the store in a directory, and the stand-in model."""

    def __init__(self, directory: Path, users: int, seed: int) -> None:
        memories = numpy_memories(SPEC, layouts_for(SPEC, CONFIG))
        self.engine = DigestEngine(SPEC, [memories])
        self.store = open_store(f"log:{directory}", options={"budget": STORE_BUDGET})
        self.cache: Cache = build_cache(
            SPEC, CONFIG, executor=ThreadExecutor([NumpyHands(memories)]), on_free=self.engine.poison,
            model="digests of everything", host_pages=[memories[Tier.HOST]],
        )  # fmt: skip
        self.cache.attach_store(self.store)
        self._random = random.Random(seed)
        system = self._draw(SYSTEM_TOKENS)
        self._histories = {f"user {chr(ord('A') + i)}": list(system) for i in range(users)}

    def turns(self, first: int, last: int) -> Iterator[Turn]:
        """Plays turns `first` to `last`; what was said before is known text, as a client would send it again."""
        for turn in range(1, last + 1):
            for user, history in self._histories.items():
                history += self._draw(QUESTION_TOKENS)
                answer = self._draw(ANSWER_TOKENS)
                if turn >= first:
                    yield self._serve(turn, user, history, answer)
                history += answer

    def close(self) -> None:
        self.cache.audit()
        self.cache.close()
        self.store.close()

    def _serve(self, turn: int, user: str, prompt: list[int], answer: list[int]) -> Turn:
        """One request: look up, wait for the store, lease, check what came back, compute the rest, answer, give back."""
        cache, checked = self.cache, self.engine.bytes_checked
        ticket = cache.prefetch(cache.lookup(prompt))
        while not ticket.ready:
            cache.step()
            time.sleep(0)
        explanation = str(cache.explain(prompt))
        with cache.acquire(cache.lookup(prompt), ticket=ticket, hints=(SYSTEM_TOKENS,)) as lease:
            self._wait(lease)
            self.engine.check(lease)
            while lease.position < len(prompt):
                self._compute(lease, min(lease.position + CHUNK_TOKENS, len(prompt)))
            for token in answer:
                cache.append(lease, [token])
                self._compute(lease, lease.num_tokens)
            self.engine.check(lease)
            sources = lease.sources
        self._quiet()
        return Turn(
            turn=turn, user=user, prompt_tokens=len(prompt), device=sources.device, host=sources.host, store=sources.store,
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
        report = self.cache.step()
        while report.running or report.storing:
            time.sleep(0)
            report = self.cache.step()

    def _draw(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    for name in ("--users", "--seed", "--first", "--last"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    life = Life(args.directory, args.users, args.seed)
    for turn in life.turns(args.first, args.last):
        sys.stdout.write(json.dumps(asdict(turn)) + "\n")
        sys.stdout.flush()
    life.close()


if __name__ == "__main__":
    main()
