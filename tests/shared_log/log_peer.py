"""A process with shared logs of its own, which follows orders. Run by `processes.Peer`, with options as its argument.

{"do": "open", "directory": "/..."}                             -> whether it owns the log
{"do": "write", "names": ["a"], "size": 1000}                   -> what came of it, or the error
{"do": "read", "names": ["a"], "size": 1000}                    -> which came, every byte checked
{"do": "delete", "names": ["a"]} {"do": "owns"} {"do": "close"}
{"do": "fork"}                                                  -> a fork that stays, and what the log answered it
{"do": "live", "prefix": "p"}                                   -> lines of ["stored", name, ...] and the like, until it is killed
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from stepwell.base.errors import StoreError
from stepwell.store.api import Space, WriteOutcome
from stepwell.store.registry import open_store
from stepwell.store.shared.store import SharedLog
from stepwell.testing.store_contract import fetch, key, offer, space

HERE: Space = space("shared")
SIZES = (500, 5000, 70_000)


class Shared:
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._store: SharedLog | None = None

    @property
    def store(self) -> SharedLog:
        assert self._store is not None, "nothing is open"
        return self._store

    def open(self, directory: str) -> bool:
        store = open_store(f"shared-log:{directory}", options=self._options)
        assert isinstance(store, SharedLog)
        self._store = store
        return store.owns

    def write(self, names: list[str], size: int) -> list[str]:
        return [outcome.name for outcome in self.store.write_from(HERE, [offer(HERE, name, size) for name in names])]

    def read(self, names: list[str], size: int) -> list[bool]:
        return [fetch(self.store, HERE, name, size) is not None for name in names]

    def delete(self, names: list[str]) -> int:
        return self.store.delete(HERE, [key(name) for name in names])

    def owns(self) -> bool:
        return self.store.owns

    def close(self) -> None:
        self.store.close()

    def fork(self) -> dict[str, Any]:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                said = str(self.store.contains(HERE, [key("x")]))
            except StoreError as error:
                said = str(error)
            self.store.close()
            os.write(writing, said.encode())
            os.close(writing)
            os.close(1)
            signal.pause()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as words:
            return {"pid": child, "said": words.read()}

    def live(self, prefix: str) -> None:
        for turn in range(1_000_000):
            try:
                self._turn(prefix, turn)
            except StoreError as error:
                answer(["error", str(error)])
                time.sleep(0.01)

    def _turn(self, prefix: str, turn: int) -> None:
        names = [f"{prefix}/{turn}/{at}" for at in range(len(SIZES))]
        outcomes = self.store.write_from(HERE, [offer(HERE, name, SIZES[at]) for at, name in enumerate(names)])
        assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}, outcomes
        answer(["stored", *names])
        if turn % 5 == 4:
            answer(["deleting", names[1]])
            self.store.delete(HERE, [key(names[1])])
            answer(["deleted", names[1]])
        assert fetch(self.store, HERE, names[2], SIZES[2]) is not None, "stored, and not there"


def main() -> None:
    shared = Shared(json.loads(sys.argv[1]))
    answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer(getattr(shared, order.pop("do"))(**order))
        except StoreError as error:
            answer({"error": str(error)})


def answer(words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
