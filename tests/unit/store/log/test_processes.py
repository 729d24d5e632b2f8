"""One process has a log, and what it may take from the rest of that process: forks, descriptors, a caller's mistakes."""

from __future__ import annotations

import array
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
from log_fixtures import OpenLog

from stepwell.base.errors import StoreError
from stepwell.store.api import Read, ReadOutcome, Write, WriteOutcome
from stepwell.store.log import store as log_store
from stepwell.store.log.disk.files import Disk
from stepwell.store.log.store import ExclusiveTask, GroupCommit
from stepwell.store.log.writing import upkeep
from stepwell.store.log.writing.writer import PutRequest
from stepwell.testing.store_contract import fetch, key, offer, space
from waiting import PATIENCE_S, wait_until

HERE = space("here")


def in_child(work: Callable[[], bool]) -> bool:
    """What a fork of this process says."""
    child = os.fork()
    if not child:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_cannot_use_the_log_it_inherited(open_here: OpenLog) -> None:
    store = open_here()
    store.write_from(HERE, [offer(HERE, "before", 9000)])

    def all_verbs_refuse() -> bool:
        verbs: list[Callable[[], object]] = [
            lambda: store.write_from(HERE, [offer(HERE, "child", 9000)]),
            lambda: store.read_into(HERE, [Read(key=key("before"), into=memoryview(bytearray(9000)))]),
            lambda: store.contains(HERE, [key("before")]),
            lambda: store.delete(HERE, [key("before")]),
            store.flush,
            store.snapshot,
            store.stat,
        ]
        for verb in verbs:
            with pytest.raises(StoreError, match="this is a fork"):
                verb()
        store.close()  # nothing of its own to release
        return True

    assert in_child(all_verbs_refuse)
    assert store.write_from(HERE, [offer(HERE, "after", 9000)]) == [WriteOutcome.STORED]
    store = open_here()
    assert fetch(store, HERE, "before", 9000) and fetch(store, HERE, "after", 9000)


def test_a_fork_that_lives_on_does_not_keep_the_lock(open_here: OpenLog) -> None:
    store = open_here()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"!")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"!"  # it has begun to live: what it inherited is closed by then, and not before
        store.close()
        open_here().close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_read_over_many_segments_leaves_descriptors_for_others(open_here: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "most_open", lambda _: 8)
    store, names = open_here(budget="4MiB"), [f"v{at}" for at in range(60)]
    before = descriptors()
    for name in names:
        store.write_from(HERE, [offer(HERE, name, 20_000)])
    assert store.stat().segments >= 30
    reads = [Read(key=key(name), into=memoryview(bytearray(20_000))) for name in names]
    most = []
    results = store.read_into(HERE, reads, cancelled=lambda: most.append(descriptors()) is not None)
    assert {result.outcome for result in results} == {ReadOutcome.FOUND}
    assert max(most) <= before + 8 and descriptors() <= before + 8
    assert store.write_from(HERE, [offer(HERE, "after", 20_000)]) == [WriteOutcome.STORED]


@pytest.mark.parametrize(("limit", "most"), [(resource.RLIM_INFINITY, 256), (100_000, 256), (256, 64), (16, 8)])
def test_a_log_takes_a_part_of_the_descriptors_a_process_may_have(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert Disk().most_open() == most


def test_stat_bears_files_that_vanish_while_it_counts(open_here: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_here()
    store.write_from(HERE, [offer(HERE, "x", 9000)])
    scandir = os.scandir

    class Vanishing:
        def __init__(self, directory: Path) -> None:
            (directory / "snapshot.new").touch()
            with scandir(directory) as entries:
                self._entries = list(entries)
            (directory / "snapshot.new").unlink()

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            return iter(self._entries)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Vanishing)
    assert store.stat().directory_bytes >= 64 * 1024


@pytest.mark.parametrize(
    "changed",
    [
        {"data": memoryview(array.array("d", range(100)))},
        {"data": memoryview(bytes(100)).cast("B", (10, 10))},
        {"data": memoryview(bytes(100))[::2]},
        {"depth": -1},
        {"depth": 2**32},
        {"stamp": b"short"},
        {"key": b"short"},
        {"parent": b"short"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_write_that_cannot_be_is_refused_before_it_meets_others(changed: dict[str, object], open_here: OpenLog) -> None:
    good = offer(HERE, "bad", 800)
    fields = {name: getattr(good, name) for name in ("key", "data", "stamp", "parent", "depth")}
    store = open_here()
    with pytest.raises(ValueError, match="got"):
        store.write_from(HERE, [Write(**{**fields, **changed}), offer(HERE, "next", 9000)])  # type: ignore[arg-type]
    assert store.contains(HERE, [key("bad"), key("next")]) == [False, False]
    assert store.write_from(HERE, [offer(HERE, "next", 9000)]) == [WriteOutcome.STORED]
    assert fetch(store, HERE, "next", 9000)


def test_a_value_is_not_read_into_memory_of_another_width(open_here: OpenLog) -> None:
    store = open_here()
    store.write_from(HERE, [offer(HERE, "x", 100)])
    into = array.array("d", [7.0] * 100)
    with pytest.raises(ValueError, match="memoryviews of bytes"):
        store.read_into(HERE, [Read(key=key("x"), into=memoryview(into))])
    assert set(into) == {7.0}


def test_an_exception_comes_only_to_the_request_that_caused_it() -> None:
    bad, good = (PutRequest(space=HERE, writes=[offer(HERE, name)]) for name in ("bad", "good"))

    def put(requests: object) -> None:
        assert isinstance(requests, list)
        if bad in requests:
            raise ValueError("bad")
        for request in requests:
            request.outcomes = [WriteOutcome.STORED]

    commits, begun, go_on = GroupCommit(put), Event(), Event()

    def hold_the_turn() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    raised: list[BaseException] = []

    def submit(request: PutRequest) -> None:
        try:
            commits.submit(request)
        except ValueError as error:
            raised.append(error)

    threads = [Thread(target=commits.submit, args=[ExclusiveTask(run=hold_the_turn)])]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    threads += [Thread(target=submit, args=[request]) for request in (bad, good)]
    for thread in threads[1:]:
        thread.start()
    wait_until(lambda: len(commits._queue) == 3, "both wait behind the first")
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(raised) == 1 and isinstance(bad.error, ValueError)
    assert good.error is None and good.outcomes == [WriteOutcome.STORED]


def test_a_close_that_cannot_save_gives_the_lock_back(open_here: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_here()

    def fail(*_: object) -> bool:
        raise MemoryError

    monkeypatch.setattr(log_store, "save_snapshot", fail)
    with pytest.raises(MemoryError):
        store.close()
    monkeypatch.setattr(log_store, "save_snapshot", upkeep.save_snapshot)
    open_here().write_from(HERE, [offer(HERE, "x")])
