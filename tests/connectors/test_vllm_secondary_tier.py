"""Stepwell's store beneath vLLM's own host tier: exact or a miss, and never in the scheduler's way. Needs no vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_offload_stand_in as offload
import vllm_stand_in

from stepwell import ConfigError, StoreError
from stepwell.base.meters import ManualClock
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Wrapper
from stepwell.verified.store import VerifiedStore
from waiting import wait_until

ROWS, ROW_BYTES = 16, 256
HIT, MISS, RETRY = offload.LookupResult.HIT, offload.LookupResult.MISS, offload.LookupResult.RETRY


class Host:
    """A host tier's memory over one tier below it, used as vLLM's manager does."""

    def __init__(self, tier_class: Any, *, engine: str | None = "engine", config: Any = None, **settings: Any) -> None:
        self.rows = np.zeros((ROWS, ROW_BYTES), np.int8)
        spec = SimpleNamespace(config=config or offload.OffloadingConfig())
        self.tier = tier_class(spec, memoryview(self.rows), tier_type="StepwellTier", engine=engine, **settings)
        self.jobs = 0

    def request(self, name: str, adapter: str | None = "") -> Any:
        self.tier.arrived(name, adapter)
        return offload.ReqContext(name)

    def lookup(self, key: bytes, context: Any) -> Any:
        """As known after as many steps as it takes."""
        self.tier.lookup(key, context)
        self.tier.on_schedule_end(None)
        return wait_until(lambda: (found := self.tier.lookup(key, context)) is not RETRY and found)

    def begin(self, keys: list[bytes], rows: list[int], context: Any, *, load: bool) -> int:
        self.jobs += 1
        job = offload.TransferJob(self.jobs, keys, np.array(rows, np.int32), load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.jobs

    def ended(self) -> Any:
        return wait_until(lambda: list(self.tier.get_finished_jobs()))

    def store(self, keys: list[bytes], rows: list[int], context: Any) -> Any:
        self.begin(keys, rows, context, load=False)
        (result,) = self.ended()
        return result

    def load(self, keys: list[bytes], rows: list[int], context: Any) -> Any:
        self.begin(keys, rows, context, load=True)
        (result,) = self.ended()
        return result

    def fill(self, rows: list[int], seed: int = 1) -> None:
        self.rows[rows] = np.random.default_rng(seed).integers(-128, 128, (len(rows), ROW_BYTES), np.int8)


Make = Callable[..., Host]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter, over a stand-in of vLLM."""
    if vllm_stand_in.is_real_installed():
        pytest.skip("vLLM is installed here: tests/vllm runs the tier under it")
    for name in offload.IMPORTED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    offload.install()
    from stepwell.connectors.vllm import secondary_tier

    yield secondary_tier
    for name in offload.IMPORTED:
        sys.modules.pop(name, None)


@pytest.fixture
def make(module: Any, tmp_path: Path) -> Iterator[Make]:
    """Makes tiers, over one log unless the test names another, and closes them."""
    hosts: list[Host] = []

    def host(**more: Any) -> Host:
        hosts.append(Host(module.StepwellTier, **({"store": f"log:{tmp_path}", "store_budget": "64MiB"} | more)))
        return hosts[-1]

    yield host
    for each in hosts:
        each.tier.shutdown()


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


KEYS = [key(number) for number in range(4)]


def saved(make: Make, **more: Any) -> Any:
    """Four chunks in the store, whose process has ended; returns their bytes."""
    first = make(**more)
    first.fill([0, 1, 2, 3])
    result = first.store(KEYS, [0, 1, 2, 3], first.request("a"))
    assert (result.success, result.transfer_bytes) == (True, 4 * ROW_BYTES)
    first.tier.shutdown()
    return first.rows[:4].copy()


@pytest.mark.parametrize("kind", ["log", "shared-log"])
def test_the_next_process_finds_chunks_and_loads_them(make: Make, tmp_path: Path, kind: str) -> None:
    store = {"store": f"{kind}:{tmp_path}"}
    rows, second = saved(make, **store), make(**store)
    context = second.request("b")
    assert second.tier.lookup(KEYS[0], context) is RETRY, "the lookup does not wait for the store"
    assert [second.lookup(each, context) for each in (*KEYS, key(9), key(0, group=1))] == [HIT] * 4 + [MISS] * 2
    result = second.load(KEYS, [7, 6, 5, 4], context)
    assert result.success and result.successful_keys is None
    assert (second.rows[[7, 6, 5, 4]] == rows).all() and not second.rows[[0, 1, 2, 3, 8]].any()
    counted = second.tier.get_stats().data
    assert counted["vllm:stepwell_tier_events", ("read_values",)] == 4 and second.tier.get_stats() is None


def test_one_flipped_bit_is_a_miss_and_the_others_are_kept(make: Make, tmp_path: Path) -> None:
    rows = saved(make)
    flip(tmp_path, rows[2].tobytes())
    second = make()
    context = second.request("b")
    assert [second.lookup(each, context) for each in KEYS] == [HIT] * 4
    result = second.load(KEYS, [0, 1, 2, 3], context)
    assert not result.success and list(result.successful_keys) == [KEYS[0], KEYS[1], KEYS[3]]
    assert (second.rows[[0, 1, 3]] == rows[[0, 1, 3]]).all() and not second.rows[2].any(), "no damaged byte was copied"
    assert second.tier.lookup(KEYS[2], context) is MISS, "the request does not try it again"
    later = second.request("c")
    assert second.lookup(KEYS[2], later) is MISS, "it was deleted"
    second.rows[2] = rows[2]
    assert second.store([KEYS[2]], [2], later).success
    assert second.tier.lookup(KEYS[2], later) is HIT
    assert second.load([KEYS[2]], [9], later).success and (second.rows[9] == rows[2]).all()


def flip(folder: Path, value: bytes) -> None:
    for path in filter(Path.is_file, folder.rglob("*")):
        data = path.read_bytes()
        if (at := data.find(value)) >= 0:
            path.write_bytes(data[: at + 100] + bytes([data[at + 100] ^ 1]) + data[at + 101 :])
            return
    raise AssertionError("the value is not there")


CONFIG = offload.OffloadingConfig()


@pytest.mark.parametrize(
    "other",
    [
        {"engine": "other weights"},
        {"config": replace(CONFIG, model=offload.OffloadingModelConfig("toy", "float16"))},
        {"config": replace(CONFIG, kv_cache_layout="LBNHC")},
        {"config": replace(CONFIG, canonical_layout=True)},
        {"config": replace(CONFIG, replicated_layout=True)},
        {"config": replace(CONFIG, cache=offload.OffloadingCacheConfig(4, 2))},
        {"config": replace(CONFIG, cache=offload.OffloadingCacheConfig(2, 1))},
        {"config": replace(CONFIG, groups=CONFIG.groups[::-1])},
        {"config": replace(CONFIG, groups=CONFIG.groups[:1])},
        {"config": replace(CONFIG, parallel=offload.OffloadingParallelConfig(tp_size=2))},
        {"config": replace(CONFIG, parallel=offload.OffloadingParallelConfig(pp_size=2))},
        {"config": replace(CONFIG, worker_kv_bytes_per_block=128)},
    ],
)
def test_chunks_of_another_model_layout_or_dtype_are_not_found(make: Make, other: dict[str, Any]) -> None:
    saved(make)
    second = make(**other)
    assert second.lookup(KEYS[0], second.request("b")) is MISS
    result = second.load(KEYS, [0, 1, 2, 3], second.request("c"))
    assert (result.success, result.successful_keys, second.rows.any()) == (False, None, False)


def test_a_model_in_another_folder_finds_what_was_stored(make: Make) -> None:
    """The engine's facts name the files of the weights, which identify them."""
    saved(make)
    second = make(config=replace(CONFIG, model=offload.OffloadingModelConfig("elsewhere", "uint8")))
    assert second.lookup(KEYS[0], second.request("b")) is HIT


def test_adapters_are_apart_and_those_that_have_no_name_are_not_stored(make: Make) -> None:
    host = make()
    for at, adapter in enumerate(("one", "")):
        host.fill([at], seed=at)
        assert host.store([KEYS[0]], [at], host.request(f"stores {at}", adapter)).success
    for at, adapter in enumerate(("one", "")):
        assert host.load([KEYS[0]], [5], host.request(f"loads {at}", adapter)).success
        assert (host.rows[5] == host.rows[at]).all()
    assert host.lookup(KEYS[0], host.request("third", "two")) is MISS
    nameless = host.request("fourth", None)
    assert not host.store([KEYS[1]], [1], nameless).success and host.tier.lookup(KEYS[0], nameless) is MISS
    assert host.lookup(KEYS[1], host.request("fifth")) is MISS
    assert host.tier.get_stats().data["vllm:stepwell_tier_events", ("requests_refused",)] == 1


def test_after_a_reset_nothing_from_before_is_found_nor_stored_by_requests_from_before(make: Make) -> None:
    saved(make)
    host = make()
    before = host.request("before")
    assert host.lookup(KEYS[0], before) is HIT
    host.tier.drain_jobs()
    host.tier.renew()
    assert host.tier.lookup(KEYS[0], before) is MISS and not host.store([KEYS[1]], [0], before).success
    after = host.request("after")
    assert host.lookup(KEYS[0], after) is MISS and host.lookup(KEYS[1], after) is MISS
    assert host.store([KEYS[0]], [0], after).success and host.lookup(KEYS[0], host.request("later")) is HIT
    host.tier.on_request_finished(before)
    host.tier.shutdown()
    third = make()
    assert third.load(KEYS, [0, 1, 2, 3], third.request("c")).success, "for the weights on disk it is all there"


class Held:
    """A lock that knows how often its thread holds it."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class Guarded:
    """What may be used only while the lock is held."""

    def __init__(self, inner: Any, lock: Held) -> None:
        self.inner, self.lock = inner, lock
        self.used: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        assert self.lock.depth, f"{name} is used without the lock"
        self.used.add(name)
        return getattr(self.inner, name)


def test_whatever_thread_calls_the_tier_its_state_is_used_under_its_lock(make: Make) -> None:
    """vLLM 0.33 calls tiers from a thread that polls another one, too."""
    host = make()
    lock = host.tier._lock = Held()
    store, chunks = Guarded(host.tier._store, lock), Guarded(host.tier._chunks, lock)
    host.tier._store, host.tier._chunks = store, chunks
    first = host.request("first")
    assert host.store(KEYS, [0, 1, 2, 3], first).success and host.load(KEYS, [4, 5, 6, 7], first).success
    host.tier.touch(KEYS, first)
    host.tier.on_request_finished(first)
    host.tier.drain_jobs()
    host.tier.renew()
    assert host.lookup(KEYS[0], host.request("second")) is MISS and host.tier.get_stats() is not None
    host.tier.shutdown()
    methods = {name for name in vars(type(host.tier._store.inner)) if not name.startswith("_")}
    assert store.used >= methods - {"refuse"} and {"arrived", "finished", "name", "chunks", "refuse_open"} <= chunks.used
    host.tier._store = type("Closed", (), {"close": lambda self: None})()


def test_children_are_stored_after_what_they_stand_on(make: Make, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    class Watched(Wrapper):
        def write_from(self, space: Any, writes: Any) -> Any:
            written.extend(writes)
            return super().write_from(space, writes)

    monkeypatch.setattr("stepwell.store.registry.open_store", lambda *_, **__: Watched(MemoryStore()))
    host = make()
    context = host.request("a")
    for number in range(4):
        context.set_offload_key_position(KEYS[number], 4 * (number + 1))
    context.set_offload_key_position(key(1, group=1), 8)
    host.tier.touch(KEYS[:1], context)  # another request has stored it
    host.store([KEYS[3], key(1, group=1), KEYS[1], KEYS[2]], [3, 4, 1, 2], context)
    names = {each.depth: each.key for each in written if each.parent != bytes(32)}
    assert [each.depth for each in written] == [1, 1, 2, 3] and len({each.key for each in written}) == 4
    assert {each.depth: each.parent for each in written if each.depth > 1} == {2: names[1], 3: names[2]}
    assert [each.parent for each in written if each.depth == 1].count(bytes(32)) == 1, "groups are chains of their own"


class Hung(Wrapper):
    """A store whose verbs hang until the test releases them."""

    def __init__(self, *verbs: str) -> None:
        super().__init__(MemoryStore())
        self.go_on, self.entered, self._verbs = Event(), Event(), verbs

    def _hang(self, verb: str) -> None:
        if verb in self._verbs:
            self.entered.set()
            self.go_on.wait()

    def contains(self, *args: Any) -> Any:
        self._hang("contains")
        return super().contains(*args)

    def read_into(self, *args: Any, **more: Any) -> Any:
        self._hang("read")
        return super().read_into(*args, **more)

    def write_from(self, *args: Any) -> Any:
        self._hang("write")
        return super().write_from(*args)


@pytest.mark.parametrize("verb", ["contains", "read", "write"])
def test_a_store_that_hangs_costs_its_deadline_and_no_memory_is_touched_after_it(
    make: Make, module: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    hung = Hung(verb)
    monkeypatch.setattr("stepwell.store.registry.open_store", lambda *_, **__: hung)
    host = make(deadline_s=3.0 if verb == "read" else 0.05)  # before it reads, it has to write in time
    context = host.request("a")
    host.fill([0])
    if verb == "contains":
        assert host.lookup(KEYS[0], context) is MISS
    elif verb == "write":
        assert not host.store([KEYS[0]], [0], context).success
    else:
        assert host.store([KEYS[0]], [0], context).success
        assert not host.load([KEYS[0]], [1], context).success
    host.tier.drain_jobs()
    hung.go_on.set()
    host.tier.shutdown()
    assert not host.rows[1].any(), "a read that came late reached the host tier"


def test_a_lookup_that_waits_in_line_is_a_miss_in_the_end(module: Any) -> None:
    from stepwell.connectors.vllm.chunk_store import ChunkStore

    hung, clock = Hung("contains"), ManualClock()
    values = VerifiedStore(hung)
    store = ChunkStore(values, values.space(b"x"), memoryview(np.zeros((ROWS, ROW_BYTES), np.int8)), clock)
    assert store.lookup(bytes(32), "a") is None
    store.flush()
    clock.advance(4.0)
    assert store.lookup(bytes(32), "a") is None
    clock.advance(2.0)
    assert store.lookup(bytes(32), "a") is False
    store.request_finished("a")
    assert store.lookup(bytes(32), "b") is None, "the next one asks anew"
    hung.go_on.set()
    store.close()


def test_a_slow_store_pins_no_more_than_a_quarter_of_the_host_tier(
    make: Make, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = Hung("write")
    monkeypatch.setattr("stepwell.store.registry.open_store", lambda *_, **__: hung)
    host = make()
    context = host.request("a")
    jobs = [host.begin([key(number)], [number], context, load=False) for number in range(6)]
    assert [result.job_id for result in host.ended()] == jobs[4:], "the last two were refused at once"
    hung.go_on.set()
    done: list[Any] = []
    wait_until(lambda: done.extend(host.tier.get_finished_jobs()) or len(done) == 4)
    assert all(result.success for result in done)
    assert host.store([key(9)], [9], context).success


def test_draining_calls_off_what_has_not_begun(make: Make, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = Hung("write")
    monkeypatch.setattr("stepwell.store.registry.open_store", lambda *_, **__: hung)
    host = make(deadline_s=1.0)
    context = host.request("a")
    for number in range(3):
        host.begin([key(number)], [number], context, load=False)
    assert hung.entered.wait(60)
    host.tier.drain_jobs()
    results = host.ended()
    assert sorted((result.job_id, result.success) for result in results) == [(1, False), (2, False), (3, False)]
    hung.go_on.set()


def test_what_waits_in_line_is_stored_when_an_engine_ends(make: Make) -> None:
    first = make()
    context = first.request("a")
    for number in range(4):
        first.begin([KEYS[number]], [number], context, load=False)
    first.tier.shutdown()
    second = make()
    assert second.load(KEYS, [0, 1, 2, 3], second.request("b")).success


def test_a_store_that_does_not_close_is_told_so_that_its_memory_stays(
    make: Make, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(Wrapper):
        go_on = Event()

        def close(self) -> None:
            self.go_on.wait()

    monkeypatch.setattr("stepwell.store.registry.open_store", lambda *_, **__: Stuck(MemoryStore()))
    host = make(deadline_s=0.05)
    with pytest.raises(StoreError, match="did not close"):
        host.tier.shutdown()
    Stuck.go_on.set()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engine": None}, '"kv_connector": "StepwellOffloadingConnector"'),
        ({"store": None}, '"store": "log:'),
        ({"budget": "1GiB"}, "did you mean 'store_budget'"),
        ({"readers": 0}, "readers must be a positive number"),
        ({"deadline_s": -1}, "deadline_s must be"),
        ({"deadline_s": 0}, "deadline_s must be a positive number"),
        ({"store": "lgo:/var/cache"}, "did you mean 'log'"),
        ({"store_budget": "lots"}, "store_budget: "),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(make: Make, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**change)
