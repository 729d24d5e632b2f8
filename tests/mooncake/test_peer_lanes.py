"""Reading another server's host memory through Mooncake's transfer engine: what arrives, and what happens when a side stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from random import Random

import pytest

from demo_cluster.private_network import HOST
from stepwell.base.meters import ManualClock
from stepwell.jobs.children import start_child
from stepwell.server.handover import Offers
from stepwell.store.api import Read, ReadOutcome, Space
from stepwell.store.peer.engine_process import MAX_ENTRIES
from stepwell.store.peer.lane import Lane, LaneLost, SharedHost, Shown, Wire
from stepwell.store.peer.listing import Listing, Value
from stepwell.store.peer.store import COOL_OFF_S, PeerStore
from stepwell.store.seal import Verdict, seal, verify
from waiting import wait_until

WIRE = Wire(host=HOST)
SIZE, PAGE = 8 * 2**20, 4096
SPACE = Space(digest=bytes(32))
PATIENCE_S = 60.0  # for what must come; nothing waits for it otherwise


class Server:
    """Another server's memory, full of noise, shown to us."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.host = SharedHost()
        self.memory = self.host.make(SIZE).view
        self.memory[:] = Random(seed).randbytes(SIZE)
        self.shown = Shown(self.host, WIRE)
        stack.callback(self.shown.close)
        self.seed = seed

    def key(self, page: int) -> bytes:
        return bytes([self.seed]) + page.to_bytes(31, "little")

    def listing(self, pages: range) -> Listing:
        parts = {page: self.memory[page * PAGE : (page + 1) * PAGE] for page in pages}
        values = [
            Value(self.key(page), seal(SPACE, self.key(page), part), self.shown.address + page * PAGE, PAGE)
            for page, part in parts.items()
        ]  # fmt: skip
        return Listing(space=SPACE.digest, session=self.shown.session, values=values)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def store_over(stack: ExitStack, *, stall_s: float, clock: ManualClock | None = None) -> tuple[PeerStore, memoryview]:
    host = SharedHost()
    memory = host.make(SIZE).view
    store = PeerStore(host, partial(Lane, host, WIRE), stall_s=stall_s, clock=clock)
    stack.callback(store.close)
    store.register([memory])
    return store, memory


def reads_of(server: Server, memory: memoryview, pages: range) -> list[Read]:
    return [Read(server.key(page), memory[page * PAGE : (page + 1) * PAGE]) for page in pages]


def test_more_values_than_one_batch_takes_arrive_whole(stack: ExitStack) -> None:
    server = Server(stack, 1)
    store, memory = store_over(stack, stall_s=PATIENCE_S)
    pages = range(SIZE // PAGE)
    assert len(pages) > MAX_ENTRIES
    store.add("a", "one", server.listing(pages))
    results = store.read_into(SPACE, reads_of(server, memory, pages))
    assert {each.outcome for each in results} == {ReadOutcome.FOUND}
    assert memory == server.memory
    verdicts = {verify(SPACE, read.key, read.into, result.stamp)
                for read, result in zip(reads_of(server, memory, pages), results, strict=True)}  # fmt: skip
    assert verdicts == {Verdict.INTACT}


def test_source_pages_that_changed_after_they_were_listed_fail_their_stamps(stack: ExitStack) -> None:
    server = Server(stack, 1)
    store, memory = store_over(stack, stall_s=PATIENCE_S)
    store.add("a", "one", server.listing(range(4)))
    server.memory[PAGE : PAGE + 8] = b"reused!!"
    reads = reads_of(server, memory, range(4))
    results = store.read_into(SPACE, reads)
    verdicts = [verify(SPACE, read.key, read.into, result.stamp) for read, result in zip(reads, results, strict=True)]
    assert verdicts == [Verdict.INTACT, Verdict.DAMAGED, Verdict.INTACT, Verdict.INTACT]


def test_a_killed_server_is_left_alone_for_a_while(stack: ExitStack) -> None:
    server, clock = Server(stack, 1), ManualClock()
    store, memory = store_over(stack, stall_s=PATIENCE_S, clock=clock)
    store.add("a", "one", server.listing(range(4)))
    assert store.read_into(SPACE, reads_of(server, memory, range(1)))[0].outcome is ReadOutcome.FOUND
    lane = store.lane_pid("one")
    os.kill(server.shown.pid, signal.SIGKILL)
    assert store.read_into(SPACE, reads_of(server, memory, range(1, 2)))[0].outcome is ReadOutcome.CANCELLED
    assert lane is not None and not _runs(lane), "the process that may still write is gone before anybody is answered"
    assert store.lane_pid("one") is None
    began = time.monotonic()
    assert store.read_into(SPACE, reads_of(server, memory, range(1, 2)))[0].outcome is ReadOutcome.CANCELLED
    assert store.lane_pid("one") is None and time.monotonic() - began < PATIENCE_S
    clock.advance(COOL_OFF_S)
    store.read_into(SPACE, reads_of(server, memory, range(1, 2)))
    assert store.counters.snapshot()["peer_lanes_lost"] == 2, "it was tried again"


def test_a_stopped_server_holds_up_no_other_and_writes_nothing_when_it_goes_on(stack: ExitStack) -> None:
    stopped, well = Server(stack, 1), Server(stack, 2)
    store, memory = store_over(stack, stall_s=2.0)
    patient, patient_memory = store_over(stack, stall_s=PATIENCE_S)
    for each in (store, patient):
        each.add("a", "stopped", stopped.listing(range(1024)))
        each.add("b", "well", well.listing(range(1024, 2048)))
    os.kill(stopped.shown.pid, signal.SIGSTOP)
    results = store.read_into(SPACE, reads_of(stopped, memory, range(1024)))
    assert {each.outcome for each in results} == {ReadOutcome.CANCELLED}
    results = patient.read_into(SPACE, reads_of(well, patient_memory, range(1024, 2048)))
    assert {each.outcome for each in results} == {ReadOutcome.FOUND}
    memory[: 1024 * PAGE] = bytes(1024 * PAGE)  # assigned to another request meanwhile
    stopped.memory[:] = b"x" * SIZE  # and so are the source's
    os.kill(stopped.shown.pid, signal.SIGCONT)
    # Once the one that was stopped answers again, whatever it had still to send has been sent.
    results = patient.read_into(SPACE, reads_of(stopped, patient_memory, range(1024)))
    assert {each.outcome for each in results} == {ReadOutcome.FOUND}
    assert bytes(memory[: 1024 * PAGE]) == bytes(1024 * PAGE)


def test_who_reads_from_a_stopped_server_holds_up_nobody_who_reads_from_another(stack: ExitStack) -> None:
    """By the same store, while the first contact with the one that stopped is under way."""
    stopped, well = Server(stack, 1), Server(stack, 2)
    store, memory = store_over(stack, stall_s=PATIENCE_S)
    store.add("a", "stopped", stopped.listing(range(1024)))
    store.add("b", "well", well.listing(range(1024, 2048)))
    os.kill(stopped.shown.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(store.read_into, SPACE, reads_of(stopped, memory, range(1024)))
        wait_until(lambda: store.lane_pid("stopped") is not None, "a lane to the one that stopped")
        results = store.read_into(SPACE, reads_of(well, memory, range(1024, 2048)))
        assert not held.done() and {each.outcome for each in results} == {ReadOutcome.FOUND}
        assert memory[1024 * PAGE : 2048 * PAGE] == well.memory[1024 * PAGE : 2048 * PAGE]
        os.kill(stopped.shown.pid, signal.SIGCONT)
        assert len({each.outcome for each in held.result()}) == 1, "all of it came, or nothing"


def test_whoever_writes_to_shown_memory_changes_nothing(stack: ExitStack) -> None:
    server = Server(stack, 1)
    before = bytes(server.memory)
    host = SharedHost()
    host.make(SIZE)
    lane = Lane(host, WIRE)
    stack.callback(lane.close)
    lane.read(server.shown.session, [(0, server.shown.address, PAGE)], stall_s=PATIENCE_S)
    program = (
        "import sys; from mooncake.engine import TransferEngine; e = TransferEngine();"
        "e.initialize(sys.argv[1], 'P2PHANDSHAKE', 'tcp', ''); import ctypes; b = ctypes.create_string_buffer(4096);"
        "print('wrote', e.transfer_sync_write(sys.argv[2], ctypes.addressof(b), int(sys.argv[3]), 4096), flush=True);"
        "import os; os._exit(0)"
    )
    command = [sys.executable, "-c", program, HOST, server.shown.session, str(server.shown.address)]
    said = subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True, text=True).stdout
    assert "wrote " in said and "wrote 0" not in said, f"the write was tried, and refused: {said}"
    assert bytes(server.memory) == before


def test_a_lane_that_is_lost_says_so(stack: ExitStack) -> None:
    server = Server(stack, 1)
    host = SharedHost()
    host.make(SIZE)
    lane = Lane(host, WIRE)
    with pytest.raises(LaneLost):
        lane.read(server.shown.session, [(0, server.shown.address + SIZE, PAGE)], stall_s=PATIENCE_S)  # outside of what is shown
    assert not _runs(lane.pid)


def test_a_process_that_shows_memory_ends_with_its_parent() -> None:
    program = (
        "import sys, time; from stepwell.store.peer.lane import SharedHost, Shown, Wire; host = SharedHost(); host.make(4096);"
        "print(Shown(host, Wire(host=sys.argv[1])).session, flush=True); time.sleep(600)"
    )
    parent = start_child([sys.executable, "-c", program, HOST], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    host, _, port = parent.stdout.readline().strip().partition(":")

    def listens() -> bool:
        try:
            socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()
        except OSError:
            return False
        return True

    assert listens()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not listens(), "its port is free")


def test_a_process_that_shows_memory_and_dies_is_started_again(stack: ExitStack) -> None:
    host = SharedHost()
    host.make(PAGE)
    offers = Offers(host, WIRE, host=HOST, port=1, token="a-token-of-some-length")
    offers.start()
    stack.callback(offers.close)
    first = offers.shown
    assert offers.shown is first
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not first.alive)
    assert offers.shown is not first and offers.shown.alive


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
