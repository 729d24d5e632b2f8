"""The shared log as a process has it that does not own it: driven like the log, with the owner in a process of its own.

CPU time is of this process; what the owner does for it (it verifies what it writes) is not in it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from stepwell.jobs.children import start_child
from stepwell.store.registry import open_store
from stepwell.store.shared.store import SharedLog
from store.load import Load, Took, timed
from store.stepwell_log import SEGMENT_BYTES, Driver, ask_all

OWNER = """
import sys
from stepwell.store.registry import open_store
store = open_store(sys.argv[1], options={"budget": sys.argv[2], "segment": sys.argv[3]})
assert store.owns
print("open", flush=True)
sys.stdin.read()
store.close()
"""


class SharedLogClient:
    """Every segment was written before, as the log's were."""

    name = "shared log, client"

    def __init__(self, load: Load, directory: Path) -> None:
        self._load, self._directory = load, directory / "shared"
        where, budget_bytes = f"shared-log:{self._directory}", load.total_bytes + 5 * SEGMENT_BYTES
        command = [sys.executable, "-c", OWNER, where, str(budget_bytes), str(SEGMENT_BYTES)]
        self._owner = start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._owner.stdout is not None and self._owner.stdout.readline() == b"open\n"
        self._store = open_store(where)
        assert isinstance(self._store, SharedLog) and not self._store.owns
        self._driver = Driver(self._store, load)
        self._life: int | None = None
        for life in range(-budget_bytes // load.total_bytes - 1, 0):
            self.write(life)

    def write(self, life: int) -> Took:
        if self._life is not None:
            self._store.delete(self._driver.space, list(self._load.keys(self._life)))
        self._life = life
        self._load.keys(life)
        return timed(lambda: self._driver.write(life))

    def read(self) -> Took:
        assert self._life is not None
        life = self._life
        return timed(lambda: self._driver.read(life))

    def exists(self) -> Took:
        assert self._life is not None
        return ask_all(self._driver, self._load.keys(self._life))

    def files(self) -> list[Path]:
        return sorted(self._directory.glob("*.seg"))

    def close(self) -> None:
        self._driver.close()
        self._owner.communicate()
