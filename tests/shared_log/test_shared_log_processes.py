"""Several processes with one log: they see each other's values, and a process that ends loses nothing acknowledged."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random
from threading import Thread

import pytest
from log_peer import HERE, SIZES
from shared_log_fixtures import OpenHere, StartPeer

from processes import Peer
from stepwell.base.errors import StoreError
from stepwell.cli.main import main
from stepwell.store.api import Read, ReadOutcome, WriteOutcome
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.inspect import check_directory
from stepwell.store.registry import open_store
from stepwell.store.shared.store import SharedLog
from stepwell.testing.store_contract import fetch, key, offer, space
from waiting import PATIENCE_S, wait_until

KILLS = 8
THERE = space("there")


def test_processes_read_what_others_wrote(open_here: OpenHere, start_peer: StartPeer) -> None:
    store = open_here()
    left, right = start_peer(), start_peer()
    assert store.owns and not left.ask("owns") and not right.ask("owns")
    assert left.ask("write", names=["a", "b"], size=70_000) == ["STORED"] * 2
    assert right.ask("write", names=["b", "c"], size=70_000) == ["EXISTS", "STORED"]
    assert store.write_from(HERE, [offer(HERE, "d", 70_000)]) == [WriteOutcome.STORED]
    for peer in (left, right):
        assert peer.ask("read", names=["a", "b", "c", "d"], size=70_000) == [True] * 4
    assert right.ask("delete", names=["a"]) == 1
    assert left.ask("read", names=["a", "b"], size=70_000) == [False, True] and fetch(store, HERE, "a", 70_000) is None


def test_a_space_is_cleared_for_all_by_owner_and_client(open_here: OpenHere, start_peer: StartPeer) -> None:
    owner, client, peer = open_here(), open_here(), start_peer()
    assert owner.owns and not client.owns and client.traits.clears
    for store in (client, owner):
        peer.ask("write", names=["a", "b"], size=70_000)
        assert owner.write_from(THERE, [offer(THERE, "a", 5000)])
        assert store.clear(HERE.digest) == 2 and store.clear(HERE.digest) == 0
        assert peer.ask("read", names=["a", "b"], size=70_000) == [False, False]
        assert fetch(client, THERE, "a", 5000) is not None
    with pytest.raises(ValueError, match="32 bytes"):
        client.clear(b"short")


def test_an_owner_that_closes_leaves_the_log_to_the_others(open_here: OpenHere, start_peer: StartPeer) -> None:
    store = open_here()
    left, right = start_peer(), start_peer()
    left.ask("write", names=["a"], size=5000)
    store.close()
    assert right.ask("read", names=["a"], size=5000) == [True] and right.ask("owns")
    assert left.ask("write", names=["b"], size=5000) == ["STORED"] and not left.ask("owns")
    right.ask("close")
    assert left.ask("read", names=["a", "b"], size=5000) == [True, True] and left.ask("owns")
    again = open_here()
    assert not again.owns and fetch(again, HERE, "b", 5000) is not None


def test_owners_that_close_while_others_are_at_work_lose_nothing(open_here: OpenHere) -> None:
    options = {"budget": "1GiB", "segment": "8MiB", "timeout": "120"}
    stores = [open_here(**options) for _ in range(3)]
    acknowledged: list[str] = []
    gone_on: Counter[SharedLog] = Counter()

    def work(store: SharedLog, name: str) -> None:
        for turn in count():
            names = [f"{name}/{turn}/{at}" for at in range(len(SIZES))]
            try:
                outcomes = store.write_from(HERE, [offer(HERE, each, SIZES[at]) for at, each in enumerate(names)])
                assert set(outcomes) <= {WriteOutcome.STORED, WriteOutcome.EXISTS}, outcomes
                acknowledged.extend(names)
                (result,) = store.read_into(HERE, [Read(key(names[2]), memoryview(bytearray(SIZES[2])))])
            except StoreError as error:
                if "is closed" in str(error) and store._closed:
                    return
                raise
            assert result.outcome is ReadOutcome.FOUND, f"{result.outcome} of what was stored"
            gone_on[store] += 1

    with ThreadPoolExecutor(12) as pool:
        working = [pool.submit(work, store, f"{at}") for at, store in enumerate(stores)]
        try:
            for turn in range(6):
                before = gone_on.copy()
                wait_until(lambda b=before: all(gone_on[each] > b[each] for each in stores if not each._closed), "they go on")
                wait_until(lambda: next((store for store in stores if store.owns), None), "one owns the log").close()
                stores.append(open_here(**options))
                working.append(pool.submit(work, stores[-1], f"{3 + turn}"))
            last = open_here(**options)
        finally:
            for store in stores:
                store.close()
        for done in working:
            done.result(PATIENCE_S)
    missing = [name for name in acknowledged if fetch(last, HERE, name, SIZES[int(name[-1])]) is None]
    assert len(acknowledged) > 30 and not missing, f"{len(missing)} of {len(acknowledged)}: {missing[:5]}"


def test_values_larger_than_a_lane_and_batches_of_many(open_here: OpenHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.store.shared.client.MEMORY_BYTES", 64 * 1024)
    monkeypatch.setattr("stepwell.store.shared.client.READ_BYTES", 16 * 1024)
    monkeypatch.setattr("stepwell.store.shared.client.MAX_VALUES", 7)
    open_here()
    client = open_here()
    names = [f"v{at}" for at in range(40)]
    sizes = [(at * 9973) % 40_000 + (200_000 if at % 13 == 5 else 0) for at in range(40)]
    writes = [offer(HERE, name, size) for name, size in zip(names, sizes, strict=True)]
    assert client.write_from(HERE, writes) == [WriteOutcome.STORED] * 40
    assert client.contains(HERE, [key(name) for name in [*names, "none"]]) == [True] * 40 + [False]
    reads = [Read(key(name), memoryview(bytearray(size))) for name, size in zip(names, sizes, strict=True)]
    assert [result.outcome for result in client.read_into(HERE, reads)] == [ReadOutcome.FOUND] * 40
    assert [bytes(read.into) for read in reads] == [bytes(write.data) for write in writes]
    asked = []
    results = client.read_into(HERE, reads, cancelled=lambda: asked.append(None) is None and len(asked) > 3)
    outcomes = [result.outcome for result in results]
    assert 0 < outcomes.count(ReadOutcome.FOUND) < 40 and set(outcomes) == {ReadOutcome.FOUND, ReadOutcome.CANCELLED}
    assert client.delete(HERE, [key(name) for name in names]) == 40


def test_the_owner_s_settings_count_and_others_are_told(
    open_here: OpenHere, start_peer: StartPeer, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_here(**{"quota.alice": "1MiB"})
    with caplog.at_level(logging.WARNING):
        client = open_here(**{"budget": "8MiB", "quota.alice": "2MiB"})
        (record,) = caplog.records
    assert f"process {os.getpid()} owns the log" in record.message
    assert "budget 16.0 MiB there, 8.0 MiB here; quotas alice 1.0 MiB there, alice 2.0 MiB here" in record.message
    caplog.clear()
    open_here(**{"budget": "16MiB", "quota.alice": "1MiB"})
    assert not caplog.records and client.traits.max_value_bytes is not None


def test_whoever_takes_over_keeps_the_settings(open_here: OpenHere, directory: Path) -> None:
    first, second = open_here(**{"quota.alice": "1MiB"}), open_here(**{"budget": "8MiB", "quota.alice": "none"})
    first.close()
    second.write_from(HERE, [offer(HERE, "x")])
    assert second.owns and second._server is not None
    settings = second._server.settings
    assert (settings.budget_bytes, settings.quotas) == (16 * 2**20, {"alice": 2**20})


def test_an_owner_whose_directory_was_replaced_leaves_the_new_one_alone(open_here: OpenHere, directory: Path) -> None:
    old = open_here()
    directory.rename(directory.with_name("moved"))
    new, client = open_here(), open_here()
    assert old.owns and new.owns and not client.owns
    old.close()
    assert open_here().write_from(HERE, [offer(HERE, "x", 5000)]) == [WriteOutcome.STORED]
    assert fetch(client, HERE, "x", 5000) is not None and fetch(new, HERE, "x", 5000) is not None


# ---- the owner dies -------------------------------------------------------------------------------


class Life:
    """A process that writes, reads and deletes until it is killed, and what it said."""

    def __init__(self, peer: Peer, prefix: str) -> None:
        self.peer, self.said = peer, list[Sequence[str]]()
        self._thread = Thread(target=self._hear, daemon=True)
        peer.tell("live", prefix=prefix)
        self._thread.start()

    @property
    def turns(self) -> int:
        return sum(words[0] == "stored" for words in self.said)

    def kill(self) -> None:
        os.kill(self.peer.pid, signal.SIGKILL)
        self._thread.join(PATIENCE_S)

    def names(self, word: str) -> set[str]:
        return {name for said, *names in self.said if said == word for name in names}

    def _hear(self) -> None:
        try:
            while True:
                self.said.append(self.peer.hear())
        except (AssertionError, ValueError):  # it ended
            return


def owner_of(directory: Path) -> int:
    """The process that has the log open; 0 while no process has."""
    return int((directory / "lock").read_text() or 0) if Disk().is_locked(directory) else 0


def test_killed_owners_lose_nothing_that_was_acknowledged(start_peer: StartPeer, directory: Path) -> None:
    """With a budget that nothing is evicted from: whatever was stored and not deleted must be there."""
    random, options = Random(11), {"budget": "1GiB", "segment": "8MiB", "timeout": "120"}
    lives = [Life(start_peer(**options), f"p{number}") for number in range(3)]
    alive = list(lives)
    for kill in range(KILLS):
        before = {life: life.turns for life in alive}
        wait_until(lambda before=before: all(life.turns > turns for life, turns in before.items()), "everybody goes on")
        pid = wait_until(lambda: owner_of(directory), "a process owns the log")
        time.sleep(random.uniform(0.0, 0.01))  # within whatever it does next
        owner = next(life for life in alive if life.peer.pid == pid)
        owner.kill()
        alive.remove(owner)
        if kill % 3 == 2 and (directory / "snapshot").exists():
            (directory / "snapshot").unlink(missing_ok=True)
        lives.append(Life(start_peer(**options), f"p{len(lives)}"))
        alive.append(lives[-1])
    wait_until(lambda: all(life.turns for life in alive), "the last ones write, too")
    for life in alive:
        life.kill()
    errors = [words for life in lives for words in life.said if words[0] == "error"]
    assert not errors, errors
    stored, deleting, deleted = (
        {name for life in lives for name in life.names(word)} for word in ("stored", "deleting", "deleted")
    )
    store = open_store(f"shared-log:{directory}")
    assert isinstance(store, SharedLog) and store.owns
    missing = [name for name in stored - deleting if fetch(store, HERE, name, SIZES[int(name[-1])]) is None]
    back = [name for name in deleted if store.contains(HERE, [key(name)]) == [True]]
    store.close()
    assert len(stored) > 3 * KILLS and not missing, f"acknowledged, and lost: {missing[:5]} of {len(stored)}"
    assert not back, f"deleted, and back: {back[:5]}"
    assert not check_directory(directory, Disk(), lambda _: None).damage


def test_calls_under_way_when_the_owner_dies_are_made_again(open_here: OpenHere, start_peer: StartPeer) -> None:
    peer = start_peer()
    client = open_here(timeout="120")
    client.write_from(HERE, [offer(HERE, "x", 5000)])
    os.kill(peer.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(client.write_from, HERE, [offer(HERE, "y", 5000)]),
            pool.submit(client.contains, HERE, [key("x")]),
            pool.submit(fetch, client, HERE, "x", 5000),
            pool.submit(client.delete, HERE, [key("nothing")]),
        ]
        wait_until(lambda: all(call.running() for call in calls) and not client._role._idle, "all are under way")
        peer.kill()
        written, found, value, deleted = [call.result(PATIENCE_S) for call in calls]
    assert written in ([WriteOutcome.STORED], [WriteOutcome.EXISTS]) and found == [True] and value is not None and deleted == 0
    assert client.owns


def test_a_stopped_owner_is_an_error_in_time_and_no_more(open_here: OpenHere, start_peer: StartPeer) -> None:
    peer = start_peer()
    client = open_here(timeout="0.3")
    client.write_from(HERE, [offer(HERE, "x", 5000)])
    os.kill(peer.pid, signal.SIGSTOP)
    try:
        for verb in (
            lambda: client.delete(HERE, [key("x")]),
            lambda: client.write_from(HERE, [offer(HERE, "late", 5000)]),
            lambda: client.contains(HERE, [key("x")]),
            lambda: open_here(timeout="0.3"),
        ):
            started_s = time.monotonic()
            with pytest.raises(StoreError, match=f"process {peer.pid}.*answer"):
                verb()
            assert time.monotonic() - started_s < 30
    finally:
        os.kill(peer.pid, signal.SIGCONT)
    client = open_here(timeout="120")
    assert client.write_from(HERE, [offer(HERE, "y", 5000)]) == [WriteOutcome.STORED] and not client.owns
    peer.ask("close")  # once whatever it had been asked is done
    assert fetch(client, HERE, "x", 5000) is not None, "a delete that no caller waited for is not done later"


def test_a_log_that_is_not_shared_is_an_error_that_says_so(directory: Path, start_peer: StartPeer) -> None:
    store = open_store(f"log:{directory}", options={"budget": "16MiB"})
    peer = start_peer(opened=False, timeout="0.2")
    said = peer.ask("open", directory=str(directory))["error"]
    assert f"is open in process {os.getpid()}, which does not share it" in said and "shared-log:" in said
    store.close()
    assert peer.ask("open", directory=str(directory)) is True
    with pytest.raises(StoreError, match="several processes of one machine can use one log at once"):
        open_store(f"log:{directory}")


def test_commands_say_who_has_a_shared_log_and_how_to_use_it_too(
    open_here: OpenHere, start_peer: StartPeer, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = start_peer()
    peer.ask("write", names=["a"], size=5000)
    assert main(["store", "stat", str(directory)]) == 0 and f"open        in process {peer.pid}" in capsys.readouterr().out
    assert main(["store", "check", str(directory)]) == 0 and "all sound" in capsys.readouterr().out
    for order in (["clear", str(directory), HERE.digest.hex()], ["check", str(directory), "--repair"]):
        assert main(["store", *order]) == 2
        said = capsys.readouterr().err
        assert f"is open in process {peer.pid}" in said and f"shared-log:{directory}" in said
    peer.ask("close")
    assert main(["store", "clear", str(directory), HERE.digest.hex()]) == 0


# ---- others die -----------------------------------------------------------------------------------


def test_clients_killed_in_the_middle_cost_the_owner_nothing(open_here: OpenHere, start_peer: StartPeer) -> None:
    store, random = open_here(budget="256MiB", segment="8MiB"), Random(5)
    assert store._server is not None
    stored: set[str] = set()
    for number in range(6):
        life = Life(start_peer(), f"c{number}")
        wait_until(lambda life=life: life.turns > 3, "it writes")
        time.sleep(random.uniform(0.0, 0.01))
        life.kill()
        stored |= life.names("stored") - life.names("deleting")
        assert store.write_from(HERE, [offer(HERE, f"mine {number}", 5000)]) == [WriteOutcome.STORED]
    wait_until(lambda: not store._server._peers, "their connections are closed")
    wait_until(lambda: "stepwell-values" not in Path("/proc/self/maps").read_text(), "their memory is released")
    assert all(fetch(store, HERE, name, SIZES[int(name[-1])]) is not None for name in stored)


# ---- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["owner", "client"])
def test_a_fork_holds_nothing_and_says_so(role: str, open_here: OpenHere, start_peer: StartPeer) -> None:
    peer = start_peer() if role == "owner" else None
    store = open_here(timeout="120")
    peer = peer or start_peer()
    assert store.owns == (role == "client")
    store.write_from(HERE, [offer(HERE, "x", 5000)])
    assert peer.ask("read", names=["x"], size=5000) == [True]
    child = peer.ask("fork")
    try:
        assert "this is a fork" in child["said"]
        assert peer.ask("read", names=["x"], size=5000) == [True], "the fork's end is not its parent's"
        os.kill(peer.pid, signal.SIGKILL)  # its child lives on, and must hold neither lock nor socket
        assert fetch(store, HERE, "x", 5000) is not None and store.owns
        assert store._server is not None
        wait_until(lambda: not store._server._peers, "its connections are closed")
    finally:
        os.kill(child["pid"], signal.SIGKILL)
