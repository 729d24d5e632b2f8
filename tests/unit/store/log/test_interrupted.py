"""An exception that arrives in a caller's thread (Ctrl-C) ends that call alone: the next one is served, honestly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from log_fixtures import OpenLog

from stepwell.base.errors import StoreError
from stepwell.store.api import WriteOutcome
from stepwell.store.log.state.index import Index
from stepwell.store.log.store import GroupCommit, LogStore
from stepwell.store.log.writing import writer as writer_module
from stepwell.testing.store_contract import fetch, key, offer, space
from waiting import PATIENCE_S, wait_until

HERE = space("interrupted")
SIZE = 9000


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def put(store: LogStore, name: str) -> list[WriteOutcome]:
    return store.write_from(HERE, [offer(HERE, name, SIZE)])


VERBS: dict[str, Callable[[LogStore], object]] = {
    "write_from": lambda store: put(store, "x"),
    "delete": lambda store: store.delete(HERE, [key("kept")]),
    "clear": lambda store: store.clear(HERE.digest),
    "snapshot": lambda store: store.snapshot(),
    "close": lambda store: store.close(),
}


@pytest.mark.parametrize("where", ["_next_group", "_serve", "_end_turn"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupted_call_gives_its_turn_to_the_next(
    verb: str, where: str, open_here: OpenLog, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_here()
    assert put(store, "kept") == [WriteOutcome.STORED]

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GroupCommit, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            VERBS[verb](store)
    if not store._state.closed:
        assert pool.submit(put, store, "next").result(PATIENCE_S) == [WriteOutcome.STORED]
        assert fetch(store, HERE, "next", SIZE)
        pool.submit(store.audit).result(PATIENCE_S)
    pool.submit(store.close).result(PATIENCE_S)


def test_the_calls_that_an_interrupted_one_wrote_for_fail(
    open_here: OpenLog, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_here()
    commit = store._group_commit
    begun, go_on, write = Event(), Event(), store._writer.put

    def first(requests: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        write(requests)

    def second(requests: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store._writer, "put", first)
    one = pool.submit(put, store, "one")
    assert begun.wait(PATIENCE_S)
    others = [pool.submit(put, store, f"other {at}") for at in range(2)]
    wait_until(lambda: len(commit._queue) == 3, "both others wait for their turn")
    monkeypatch.setattr(store._writer, "put", second)
    go_on.set()
    assert one.result(PATIENCE_S) == [WriteOutcome.STORED]
    ended = [other.exception(PATIENCE_S) for other in others]
    assert {type(error) for error in ended} == {KeyboardInterrupt, StoreError}
    assert any("interrupted by KeyboardInterrupt" in str(error) for error in ended)
    monkeypatch.setattr(store._writer, "put", write)
    assert put(store, "next") == [WriteOutcome.STORED]


def test_a_call_that_is_interrupted_while_it_waits_is_not_served_any_more(
    open_here: OpenLog, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_here()
    commit, begun, go_on, write = store._group_commit, Event(), Event(), store._writer.put

    def slow(requests: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        write(requests)

    monkeypatch.setattr(store._writer, "put", slow)
    one = pool.submit(put, store, "one")
    assert begun.wait(PATIENCE_S)
    wait_for = commit._changed.wait_for

    def interrupted(*args: Any) -> bool:
        monkeypatch.setattr(commit._changed, "wait_for", wait_for)
        raise KeyboardInterrupt

    monkeypatch.setattr(commit._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(store, "withdrawn")
    go_on.set()
    assert one.result(PATIENCE_S) == [WriteOutcome.STORED]
    assert put(store, "next") == [WriteOutcome.STORED]
    assert store.contains(HERE, [key("one"), key("withdrawn"), key("next")]) == [True, False, True]


def test_an_index_that_was_half_changed_is_not_used_any_more(open_here: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_here()
    assert put(store, "kept") == [WriteOutcome.STORED]

    def half(index: Index, *args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_add_to_space", half)
        with pytest.raises(KeyboardInterrupt):
            put(store, "half")
    for verb in (
        lambda: put(store, "next"),
        lambda: store.contains(HERE, [key("kept")]),
        lambda: store.delete(HERE, [key("kept")]),
    ):
        with pytest.raises(StoreError, match="interrupted half-way; close the store and open it again"):
            verb()
    store = open_here()
    store.audit()
    assert fetch(store, HERE, "kept", SIZE) and fetch(store, HERE, "half", SIZE), "what is on disk is whole"


def test_an_audit_waits_for_a_clear_in_another_thread(
    open_here: OpenLog, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, paused, go_on = open_here(), Event(), Event()
    put(store, "x")

    def pause(seconds: float) -> None:
        paused.set()
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(writer_module, "time", SimpleNamespace(sleep=pause))  # in there only: this test sleeps, too
    clear = pool.submit(store.clear, HERE.digest)
    assert paused.wait(PATIENCE_S), "the clear has given the lock back in between"
    audit = pool.submit(store.audit)
    wait_until(lambda: len(store._group_commit._queue) == 2, "the audit waits for its turn")
    assert not audit.done()
    go_on.set()
    assert clear.result(PATIENCE_S) == 1
    audit.result(PATIENCE_S)
