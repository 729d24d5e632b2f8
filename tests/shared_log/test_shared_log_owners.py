"""Owners that recover slowly, close while they are asked, or lose their directory: what the others get then."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from log_peer import HERE
from shared_log_fixtures import OPTIONS, OpenHere

from stepwell.base.errors import StoreError
from stepwell.base.meters import SystemClock
from stepwell.store.api import Read, ReadOutcome
from stepwell.store.log import opening as log_opening
from stepwell.store.log import reader
from stepwell.store.log.opening import read_options
from stepwell.store.log.reader import Reader
from stepwell.store.registry import Opening
from stepwell.store.shared import connection, server
from stepwell.store.shared.client import MAX_LANES, Client, Lane
from stepwell.store.shared.connection import SOCKET_NAME, Connection, Deadline, Late, connect, listen
from stepwell.store.shared.store import SharedLog
from stepwell.testing.store_contract import fetch, key, offer
from waiting import PATIENCE_S, wait_until


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("given_up", [False, True], ids=["answered", "given up"])
def test_a_read_under_way_when_the_owner_closes_is_answered_here_or_by_the_next(
    given_up: bool, open_here: OpenHere, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, client = open_here(), open_here(timeout="120")
    names = ["a", "b", "c"]
    client.write_from(HERE, [offer(HERE, name, 70_000) for name in names])
    reading, stopped, gone, read_run = Event(), Event(), Event(), Reader._read_run

    def hold(self: Reader, *args: Any, **options: Any) -> Any:
        if not reading.is_set():
            reading.set()
            assert (gone if given_up else stopped).wait(PATIENCE_S)
        return read_run(self, *args, **options)

    def told(tell: Callable[[Connection], None], done: Event) -> Callable[[Connection], None]:
        return lambda connection: (tell(connection), done.set())[0]

    monkeypatch.setattr(reader, "_RUN_VALUES", 1)  # so that it asks between values whether it is cancelled
    monkeypatch.setattr(Reader, "_read_run", hold)
    monkeypatch.setattr(Connection, "stop_hearing", told(Connection.stop_hearing, stopped))
    monkeypatch.setattr(Connection, "hang_up", told(Connection.hang_up, gone))
    if given_up:
        monkeypatch.setattr(server, "CLOSE_S", 0.01)
    reads = [Read(key(name), memoryview(bytearray(70_000))) for name in names]
    call = pool.submit(client.read_into, HERE, reads)
    assert reading.wait(PATIENCE_S)
    owner.close()
    assert [result.outcome for result in call.result(PATIENCE_S)] == [ReadOutcome.FOUND] * 3
    assert [read.into for read in reads] == [offer(HERE, name, 70_000).data for name in names] and client.owns == given_up


# ---- recovery -------------------------------------------------------------------------------------


@pytest.fixture
def recovery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recovery]:
    recovery = Recovery(monkeypatch)
    yield recovery
    recovery.go_on.set()


class Recovery:
    """From now on a recovery begins, and ends when the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = Event(), Event()
        recover = log_opening.recover

        def slow(*args: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
            return recover(*args)

        monkeypatch.setattr(log_opening, "recover", slow)


def test_a_process_that_starts_waits_until_the_log_is_recovered(
    open_here: OpenHere, pool: ThreadPoolExecutor, recovery: Recovery, caplog: pytest.LogCaptureFixture
) -> None:
    first = pool.submit(open_here)
    assert recovery.begun.wait(PATIENCE_S)
    started_s, second = time.monotonic(), pool.submit(open_here, timeout="2")
    wait_until(lambda: second.done() or time.monotonic() > started_s + 3, "it waits for longer than its timeout")
    assert not second.done(), second.exception()
    recovery.go_on.set()
    owner, client = first.result(PATIENCE_S), second.result(PATIENCE_S)
    assert owner.owns and not client.owns
    (record,) = caplog.records
    assert "is recovering the log, and this process waits for it" in record.message
    client.write_from(HERE, [offer(HERE, "x", 5000)])
    assert fetch(owner, HERE, "x", 5000) is not None


def test_an_opening_waits_for_a_recovery_no_longer_than_its_limit(
    open_here: OpenHere, directory: Path, pool: ThreadPoolExecutor, recovery: Recovery
) -> None:
    first = pool.submit(open_here)
    assert recovery.begun.wait(PATIENCE_S)
    options = read_options(Opening(location=str(directory), options=OPTIONS), "shared-log")
    with pytest.raises(StoreError, match=r"process \d+ is recovering the log for 0.5 s; see whether it is stopped"):
        SharedLog(options, clock=SystemClock(), timeout_s=PATIENCE_S, recovery_s=0.5)
    recovery.go_on.set()
    assert first.result(PATIENCE_S).owns


@pytest.mark.parametrize("verb", ["contains", "close"])
def test_an_interrupted_look_for_an_owner_gives_its_turn_to_the_next(
    verb: str, open_here: OpenHere, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, client = open_here(), open_here()
    owner.close()

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SharedLog, "_find", interrupted)
        patch.setattr(Client, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.contains(HERE, [key("x")]) if verb == "contains" else client.close()
    if verb == "contains":
        assert pool.submit(client.contains, HERE, [key("x")]).result(PATIENCE_S) == [False] and client.owns
    pool.submit(client.close).result(PATIENCE_S)


def test_interrupted_calls_leave_their_lanes_to_others(open_here: OpenHere, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, client = open_here(), open_here(timeout="5")
    assert owner.owns
    returned = Client._return

    def interrupted(self: Client, lane: Lane) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "_return", interrupted)
    for _ in range(2 * MAX_LANES):
        with pytest.raises(KeyboardInterrupt):
            client.contains(HERE, [key("x")])
    monkeypatch.setattr(Client, "_return", returned)
    assert client.contains(HERE, [key("x")]) == [False]


def test_a_call_waits_for_a_recovery_no_longer_than_its_timeout(
    open_here: OpenHere, pool: ThreadPoolExecutor, recovery: Recovery
) -> None:
    recovery.go_on.set()
    owner, client = open_here(), open_here(timeout="1")
    owner.write_from(HERE, [offer(HERE, "x", 5000)])
    owner.close()
    recovery.begun.clear()
    recovery.go_on.clear()
    next_owner = pool.submit(open_here)
    assert recovery.begun.wait(PATIENCE_S)
    # On a busy machine that second may be over before the answer says that another process recovers.
    with pytest.raises(StoreError, match=r"is recovering the log for 1 s; it is tried again|no answer in time"):
        client.contains(HERE, [key("x")])
    recovery.go_on.set()
    assert next_owner.result(PATIENCE_S).owns and client.contains(HERE, [key("x")]) == [True] and not client.owns


def test_a_recovery_that_fails_leaves_the_log_to_whoever_tries_next(
    open_here: OpenHere, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StoreError("no")

    with monkeypatch.context() as broken:
        broken.setattr(log_opening, "recover", fail)
        with pytest.raises(StoreError, match="no"):
            open_here()
    owner, client = open_here(), open_here()
    assert owner.owns and not client.owns and (directory / SOCKET_NAME).is_socket()


# ---- the directory --------------------------------------------------------------------------------


def test_a_directory_that_is_gone_at_a_takeover_is_an_error_of_the_store(open_here: OpenHere, directory: Path) -> None:
    owner, client = open_here(), open_here()
    shutil.rmtree(directory)
    owner.close()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"the log cannot be taken over: .* is new"):
            client.write_from(HERE, [offer(HERE, "x", 5000)])


# ---- many at once ---------------------------------------------------------------------------------


def test_whoever_connects_while_many_others_do_waits_for_its_turn(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_BACKLOG", 1)
    with listen(tmp_path) as listening, ExitStack() as stack:
        accepted = True
        while accepted:
            raw = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            raw.setblocking(False)
            accepted = raw.connect_ex(str(tmp_path / SOCKET_NAME)) == 0
        started_s = time.monotonic()
        with pytest.raises(Late):
            connect(tmp_path, Deadline(0.2))
        assert time.monotonic() - started_s >= 0.2, "it tried until its time was over"
        waiting = pool.submit(connect, tmp_path, Deadline(PATIENCE_S))
        stack.enter_context(listening.accept()[0])
        waiting.result(PATIENCE_S).close()
