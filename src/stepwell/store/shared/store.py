"""The store of `shared-log:DIR`: the six verbs, in any process that shares the log.

    process 1   owner    LogStore ---- the files in DIR
                             \\-- Server -- DIR/socket
    process 2   client   Client --------------/ |
    process 3   client   Client ----------------/

The process that gets the lock on the directory owns the log and serves the others. When the owner closes or dies, the next
call of any other process notices: the first to get the lock recovers the log and owns it, the others connect to it, and every
call in progress is repeated. That is safe: a key always means the same value. Nothing is acknowledged before the log has done so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Condition
from typing import TypeVar

from stepwell.base.errors import ConfigError, StoreError
from stepwell.base.ids import Level
from stepwell.base.meters import Clock
from stepwell.store.api import Read, ReadResult, Space, Traits, Write, WriteOutcome, never
from stepwell.store.log.disk.files import BLOCK_BYTES
from stepwell.store.log.disk.locking import leave_in_forks
from stepwell.store.log.opening import InUse, LogOptions, open_with
from stepwell.store.log.store import LogStore
from stepwell.store.shared.client import Client
from stepwell.store.shared.connection import Deadline, Gone, Late, Recovering, Stranger
from stepwell.store.shared.server import Server
from stepwell.store.shared.settings import Settings, differences
from stepwell.store.shared.wire import Malformed

log = logging.getLogger(__name__)
T = TypeVar("T")
TIMEOUT_S = 10.0  # two of them are less than the cache waits for an answer
_PAUSE_S = 0.01  # between two attempts to find an owner
_RECOVERY_PAUSE_S = 0.1  # while it recovers
RECOVERY_S = 600.0  # how long an opening waits for an owner that recovers the log: a million values take seconds


class SharedLog:
    """Opened by `opening.open_shared_log`. All verbs from any thread; `close` when no verb is running any more."""

    def __init__(
        self, options: LogOptions, *, clock: Clock, timeout_s: float = TIMEOUT_S, recovery_s: float = RECOVERY_S
    ) -> None:
        """Raises ConfigError or StoreError."""
        self._options, self._clock, self._timeout_s, self._recovery_s = options, clock, timeout_s, recovery_s
        self._process = os.getpid()
        self._changed = Condition()
        self._finder: object | None = None  # the call that looks for an owner
        self._closed = False
        self._role: LogStore | Client | None = None
        self._server: Server | None = None
        self._settings: Settings | None = None  # those in effect
        leave_in_forks(self)
        self._present(Deadline(timeout_s))

    @property
    def traits(self) -> Traits:
        largest = self._settings.max_value_bytes if self._settings is not None else None
        return Traits(
            name="shared-log", durable=True, shared=True, groups=False, clears=True, levels=True, alignment=BLOCK_BYTES,
            max_value_bytes=largest,
        )  # fmt: skip

    @property
    def owns(self) -> bool:
        """Whether this process owns the log now."""
        return isinstance(self._role, LogStore)

    # ---- the six verbs ----------------------------------------------------------------------------

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        return self._use(lambda role: role.contains(space, keys))

    def read_into(self, space: Space, reads: Sequence[Read], *, cancelled: Callable[[], bool] = never) -> list[ReadResult]:
        return self._use(lambda role: role.read_into(space, reads, cancelled=cancelled) if reads else [])

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        """A value that was stored before an owner died, and is offered to the next one, EXISTS."""
        return self._use(lambda role: role.write_from(space, writes) if writes else [])

    def delete(self, space: Space, keys: Sequence[bytes]) -> int:
        """Returns too few if an owner died after it had deleted some values and before it had reported them."""
        return self._use(lambda role: role.delete(space, keys) if keys else 0)

    def relevel(self, space: Space, keys: Sequence[bytes], level: Level) -> int:
        return self._use(lambda role: role.relevel(space, keys, level) if keys else 0)

    def clear(self, digest: bytes) -> int:
        """Deletes a whole space, including values of other processes. Returns too few in the same case as `delete`."""
        return self._use(lambda role: role.clear(digest))

    def flush(self) -> None:
        """Does nothing: every verb that returned has made its work durable."""
        self._must_be_open()

    def close(self) -> None:
        """As the owner: answers waiting clients, closes the log and unlocks it. Raises StoreError like `LogStore`.

        Does nothing in a fork.
        """
        if os.getpid() != self._process:
            return
        self._closed = True
        with self._finding():
            try:
                if self._server is not None:
                    self._server.close()
            finally:
                if self._role is not None:
                    self._role.close()
                self._role = self._server = None

    def leave_in_child(self) -> None:
        """For a fork: sockets and lock stay with the process that opened them. Takes no lock."""
        if self._server is not None:
            self._server.leave_in_child()
        if isinstance(self._role, Client):
            self._role.leave_in_child()

    def __repr__(self) -> str:
        role = "closed" if self._closed else "owner" if self.owns else "client"
        return f"SharedLog({str(self._options.directory)!r}, {role})"

    # ---- who owns the log -------------------------------------------------------------------------

    def _use(self, verb: Callable[[LogStore | Client], T]) -> T:
        """Runs a verb at the owner, and repeats it at the next owner if the first one ends meanwhile."""
        deadline = Deadline(self._timeout_s)
        while True:
            role = self._present(deadline)
            try:
                return verb(role)
            except Gone:
                self._must_be_open()
                if not deadline.left_s:
                    raise self._no_owner() from None
                time.sleep(_PAUSE_S)

    def _present(self, deadline: Deadline) -> LogStore | Client:
        """The log, or a client of its owner. Raises StoreError if there is none in time."""
        self._must_be_open()
        role = self._role
        if role is not None and not (isinstance(role, Client) and role.is_gone):
            return role
        with self._finding(deadline):
            self._must_be_open()
            role = self._role
            if role is None or (isinstance(role, Client) and role.is_gone):
                role = self._role = self._find(deadline)
            return role

    @contextmanager
    def _finding(self, deadline: Deadline | None = None) -> Iterator[None]:
        """One call at a time looks for an owner, or ends this one. If that call is interrupted, the next one has its turn.

        Raises StoreError if there is no turn in time.
        """
        me = object()
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._finder is None, deadline.left_s if deadline is not None else None):
                    raise self._no_owner()
                self._finder = me
            yield
        finally:
            with self._changed:
                if self._finder is me:
                    self._finder = None
                    self._changed.notify()

    def _find(self, deadline: Deadline) -> LogStore | Client:
        """Owns the log, or finds its owner. An opening waits longer for an owner that reports that it is recovering the log."""
        opening, until = self._settings is None, None
        limit_s = self._recovery_s if opening else self._timeout_s
        while True:
            self._must_be_open()
            try:
                return self._own()
            except InUse as error:
                in_use = error
            try:
                return self._ask(deadline)
            except Recovering as error:
                if until is None:
                    until = Deadline(limit_s) if opening else deadline
                    log.warning("%s: %s, and this process waits for it, at most %g s", self._options.directory, error, limit_s)
                if not until.left_s:
                    further = "see whether it is stopped, or its disk hangs" if opening else "it is tried again"
                    raise StoreError(f"{self._options.directory}: {error} for {limit_s:g} s; {further}") from None
                if opening:
                    deadline = Deadline(self._timeout_s)  # for the next answer
                time.sleep(_RECOVERY_PAUSE_S)
                continue
            except Gone:
                pass  # it is closing the log just now, or does not share it
            except (Late, Malformed, Stranger) as error:
                raise StoreError(f"{in_use.who} has {self._options.directory} open, and {error}") from None
            if not deadline.left_s:
                raise StoreError(
                    f"{self._options.directory} is open in {in_use.who}, which does not share it, or is still closing it: "
                    f"open it there, too, as shared-log:{self._options.directory}"
                )
            time.sleep(_PAUSE_S)

    def _own(self) -> LogStore:
        """Opens the log and serves it. Raises InUse, or the log's errors, and holds nothing then."""
        options = self._options
        if self._settings is not None:  # the settings in effect stay: the directory records them
            options = replace(options, budget_bytes=None, segment_bytes=None, quotas={})
        with ExitStack() as undo:

            def share() -> None:
                self._server = _listening(options.directory)
                undo.callback(self._stop_sharing)

            try:
                store = open_with(options, clock=self._clock, before_recovery=share)
            except ConfigError as error:
                if self._settings is None:
                    raise
                raise StoreError(f"the log cannot be taken over: {error}") from error  # the options were valid once
            undo.callback(store.close)
            assert self._server is not None, "recovered, and not shared"
            self._server.serve(store)
            undo.pop_all()
        if self._settings is not None:
            log.info("%s: this process owns the log now", options.directory)
        self._settings = self._server.settings
        return store

    def _stop_sharing(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _ask(self, deadline: Deadline) -> Client:
        """Connects to the owner. Raises Gone, Late, Malformed, Stranger or StoreError."""
        client = Client(self._options.directory, self._timeout_s, deadline)
        differing = differences(self._options, client.settings) if self._settings is None else []
        if differing:
            log.warning(
                "%s: process %d owns the log, and its settings count: %s",
                self._options.directory, client.process, "; ".join(differing),
            )  # fmt: skip
        self._settings = client.settings
        return client

    def _no_owner(self) -> StoreError:
        return StoreError(f"no process opened {self._options.directory} within {self._timeout_s:g} s; it is tried again")

    def _must_be_open(self) -> None:
        if os.getpid() != self._process:
            raise StoreError(
                f"the shared log in {self._options.directory} was opened by process {self._process}; this is a fork of it; "
                "open it again here"
            )
        if self._closed:
            raise StoreError(f"the shared log in {self._options.directory} is closed")


def _listening(directory: Path) -> Server:
    """Raises StoreError."""
    try:
        return Server(directory)
    except OSError as error:
        raise StoreError(f"{directory} cannot be shared: {error}; use log:DIR, in one process") from error
