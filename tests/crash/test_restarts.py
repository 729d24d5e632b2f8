"""A cache over a log, with the defaults of a server: what a restart finds after `kill -9`, and after a clean stop.

The store has at most four times the memory, so that the default write policy is `exclusive`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepwell import Cache, CacheConfig, LeaseState, build_cache, open_store
from stepwell.base.config import StoreConfig, WritePolicy
from stepwell.base.meters import ManualClock
from stepwell.jobs.children import start_child
from stepwell.policy.write_choice import choose_write
from toys import HYBRID, NO_INTERVALS, PAGE, SMALL_PAGES, text

MEMORY_BYTES, STORE_BYTES = 1 << 20, 8 << 20  # of device and host each
TURNS, TURN_S, TURN_PAGES = 40, 5.0, 3
TALK = text(1, (TURNS + 1) * TURN_PAGES * PAGE)


@dataclass
class Life:
    """One process's cache over the log in a directory."""

    cache: Cache
    clock: ManualClock

    def turn(self, number: int) -> int:
        """A request that repeats all that was said before; how many of its tokens the store had."""
        tokens, cache = TALK[: number * TURN_PAGES * PAGE + 1], self.cache
        ticket = cache.prefetch(cache.lookup(tokens))
        cache.wait(ticket)
        with cache.acquire(cache.lookup(tokens), ticket=ticket) as lease:
            cache.wait(lease)
            while lease.position < len(tokens):
                upto = min(cache.next_stop(lease) or len(tokens), len(tokens))
                cache.grow(lease, upto)
                cache.commit(lease, upto)
                cache.wait(lease) if lease.state is LeaseState.LOADING else None
        self.settle()
        return lease.sources.store

    def settle(self) -> None:
        """Until nothing is on its way; what is deferred stays deferred."""
        report = self.cache.step()
        while report.running or report.storing:
            report = self.cache.step()


def begin(directory: Path, *, durable: bool = True) -> Life:
    chosen = choose_write(
        None, device_bytes=MEMORY_BYTES, host_bytes=MEMORY_BYTES, has_store=True, store_bytes=STORE_BYTES
    )  # fmt: skip
    assert chosen.write is WritePolicy.EXCLUSIVE
    config = CacheConfig(
        device_bytes=MEMORY_BYTES, host_bytes=MEMORY_BYTES, write=chosen.write, placement=NO_INTERVALS, durable=durable
    )
    clock = ManualClock()
    cache = build_cache(HYBRID, config, model="toy weights", tuning=SMALL_PAGES, clock=clock)
    store = open_store(f"log:{directory}", options={"budget": str(STORE_BYTES), "direct": "off"})
    cache.store.attach(store, StoreConfig(recompute_tokens_per_s=1.0))  # so that what is there is always worth its time
    return Life(cache, clock)


def loop(life: Life) -> None:
    """An agent's turns. None comes late enough for the checkpoint before it to be stored first."""
    for number in range(1, TURNS + 1):
        life.turn(number)
        life.clock.advance(TURN_S)


def found_after(directory: Path) -> int:
    """Tokens that a new process finds of the loop."""
    life = begin(directory)
    link = life.cache._store_tier.link
    assert link is not None
    with closing(link.store):
        found = life.turn(TURNS)
        life.cache.close()
    return found


CHILD = """
import sys
from pathlib import Path
from test_restarts import begin, loop
life = begin(Path(sys.argv[1]))
loop(life)
print(life.cache.store.resumable_after_s, flush=True)
sys.stdin.read()
"""


def test_after_a_kill_everything_older_than_the_start_says_is_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{CHILD}", str(directory)]
    with start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        after_s = float(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL and after_s == 60.0
    old_turns = TURNS - int(after_s / TURN_S)
    assert found_after(directory) >= old_turns * TURN_PAGES * PAGE


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "exclusive"])
def test_after_a_clean_stop_everything_is_resumed(durable: bool, tmp_path: Path) -> None:
    life = begin(tmp_path / "store", durable=durable)
    link = life.cache._store_tier.link
    assert link is not None
    with closing(link.store):
        loop(life)
        assert life.cache.close()
    assert found_after(tmp_path / "store") == TURNS * TURN_PAGES * PAGE
