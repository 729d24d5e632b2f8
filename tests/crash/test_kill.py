"""A real process, really killed, at random moments: what it acknowledged is there when the next one opens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from random import Random

from life import BUDGET_BYTES, SEGMENT_BYTES, SPACES, bytes_on_disk

from stepwell.base.meters import SystemClock
from stepwell.jobs.children import start_child
from stepwell.store.log.opening import open_directory
from stepwell.testing.store_contract import fetch, key

ROUNDS = 16
CHILD = """
import sys
from pathlib import Path
from stepwell.base.meters import SystemClock
from stepwell.store.api import Space, WriteOutcome
from stepwell.store.log.opening import open_directory
from stepwell.testing.store_contract import key, offer

directory, round_, budget, segment = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
space = Space(digest=b"A" * 32, label="model 0", tenant="tenant 0")
store = open_directory(Path(directory), clock=SystemClock(), budget_bytes=budget, segment_bytes=segment)
print("open", flush=True)
for turn in range(100_000):
    names = [f"{round_}/{turn}/{at}" for at in range(3)]
    outcomes = store.write_from(space, [offer(space, name, 2000 * (at + 1)) for at, name in enumerate(names)])
    assert outcomes == [WriteOutcome.STORED] * 3
    print("stored", names[0], names[1], names[2], flush=True)
    if turn % 5 == 4:
        print("deleting", names[1], flush=True)
        store.delete(space, [key(names[1])])
        print("deleted", names[1], flush=True)
    if turn % 11 == 10:
        store.snapshot()
"""


def killed_life(directory: Path, number: int, after_words: int, after_s: float) -> list[list[str]]:
    """What a child said until it was killed: some time after it had said so much."""
    arguments = [str(directory), str(number), str(BUDGET_BYTES), str(SEGMENT_BYTES)]
    child = start_child([sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        said = [child.stdout.readline() for _ in range(1 + after_words)]  # the first says that it has opened
        time.sleep(after_s)  # within whatever it does next
        os.kill(child.pid, signal.SIGKILL)
        said += child.stdout.readlines()
    assert child.wait() == -signal.SIGKILL, "the child must not have ended by itself"
    return [line.decode().split() for line in said if line.endswith(b"\n")]


def test_a_process_killed_at_random_moments_keeps_its_word(tmp_path: Path) -> None:
    random, directory = Random(7), tmp_path / "store"
    deleted: set[str] = set()
    for number in range(ROUNDS):
        said = killed_life(directory, number, random.randrange(60), random.uniform(0.0, 0.004))
        stored = {name for word, *names in said if word == "stored" for name in names}
        deleting = {names[0] for word, *names in said if word == "deleting"}
        deleted |= {names[0] for word, *names in said if word == "deleted"}
        with closing(open_directory(directory, clock=SystemClock(), budget_bytes=BUDGET_BYTES)) as store:
            store.audit()
            there = {name for name in stored if fetch(store, SPACES[0], name, 2000 * (int(name[-1]) + 1)) is not None}
            latest = sorted(stored - deleting, key=lambda name: int(name.split("/")[1]))[-6:]
            assert set(latest) <= there, f"round {number}: acknowledged, and lost: {sorted(set(latest) - there)}"
            back = [name for name in deleted if store.contains(SPACES[0], [key(name)]) == [True]]
            assert not back, f"round {number}: deleted, and back: {back}"
            assert bytes_on_disk(directory) <= BUDGET_BYTES
        if number % 3 == 0:
            (directory / "snapshot").unlink()
