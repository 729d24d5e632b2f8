"""What goes wrong in a soak: one trouble after the other, each kind as often as every other, in an order that the seed draws.

Two servers share one log. `steady` lives from the first minute to the last, so its memory can be watched. `unlucky` is stopped,
killed and started again. Whichever opened the log first owns it, and is the store of the other one: when it is killed, so is
that one's store.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

from soaking.backend import Backend
from stepwell.store.log.disk.locking import LOCK_NAME
from stepwell.store.log.format.segment_list import SUFFIX

Say = Callable[[str], None]
TAKEN_S = 30.0  # for the other server to take the log; clients ask it all the time


class Troubles:
    """Makes them, and remembers what it made and which of them a server did not bear."""

    def __init__(self, steady: Backend, unlucky: Backend, store: Path, random: Random, say: Say) -> None:
        self.made: Counter[str] = Counter()
        self.faults: list[str] = []
        self._steady, self._unlucky, self._store = steady, unlucky, store
        self._random, self._say = random, say

    async def round(self, pause_s: tuple[float, float], going: Callable[[], bool]) -> None:
        """Each kind once, as far as time allows, with a pause before each; then both servers are audited, under load."""
        kinds: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("flushes", self._flush),
            ("flipped bits", self._flip),
            ("stores detached", self._detach),
            ("servers paused", self._pause),
            ("servers stopped", self._stop),
            ("servers killed", self._kill),
            ("store owners killed", self._kill_owner),
        ]
        self._random.shuffle(kinds)
        for kind, make in kinds:
            await asyncio.sleep(self._random.uniform(*pause_s))
            if not going():
                return
            self._say(kind)
            await make()
            self.made[kind] += 1
        await self.audit()

    async def audit(self) -> None:
        for backend in (self._steady, self._unlucky):
            says = await backend.audit()
            if says is not None:
                self.faults.append(f"the audit of {says}")
        self.made["audits"] += 2

    async def _flush(self) -> None:
        await self._random.choice([self._steady, self._unlucky]).flush()

    async def _flip(self) -> None:
        """One to three bits anywhere in the log, also where nothing lies any more, or where something is being written."""
        for _ in range(self._random.randint(1, 3)):
            segments = sorted(self._store.glob(f"*{SUFFIX}"))
            if segments:
                flip(self._random.choice(segments), self._random)

    async def _detach(self) -> None:
        """The steady one's: should it own the log, the other takes it over."""
        await self._steady.detach()
        await asyncio.sleep(self._random.uniform(0, 2))
        await self._steady.attach()

    async def _pause(self) -> None:
        """The unlucky one, for longer than a call of the store waits. Should it own the log, the other's store hangs."""
        await self._unlucky.pause(self._random.uniform(1, 5))

    async def _stop(self) -> None:
        status = await self._unlucky.stop()
        if status:
            self.faults.append(f"unlucky ended with {status} at SIGTERM; its log: {_last_words(self._unlucky)}")
        await self._unlucky.start()

    async def _kill(self) -> None:
        await self._unlucky.kill()
        await self._unlucky.start()

    async def _kill_owner(self) -> None:
        """The steady server detaches from the log until the other owns it, attaches as a client, and then the owner is killed."""
        await self._steady.detach()
        deadline = time.monotonic() + TAKEN_S
        while self._owner() != self._unlucky.pid and time.monotonic() < deadline:
            await asyncio.sleep(0.05)  # until it calls its store and finds that it has no owner
        await self._steady.attach()
        await asyncio.sleep(self._random.uniform(0, 3))
        if self._owner() == self._unlucky.pid:
            self.made["store owners killed: the log was theirs"] += 1
        await self._kill()

    def _owner(self) -> int:
        """The process that owns the log; 0 for none."""
        said = (self._store / LOCK_NAME).read_text().strip()
        return int(said) if said.isdigit() else 0


def flip(path: Path, random: Random) -> None:
    """One bit of a file. A segment may have been removed meanwhile."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, 2)
            at = random.randrange(max(size, 1))
            file.seek(at)
            byte = file.read(1)
            if byte:
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << random.randrange(8)]))
    except FileNotFoundError:
        pass


def _last_words(backend: Backend) -> str:
    return backend.logs[-1].read_text(errors="replace")[-1000:]
