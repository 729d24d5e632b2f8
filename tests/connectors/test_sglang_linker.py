"""SGLang's external linker over a stand-in of its interface: exact bytes, joint lengths, promises, troubled stores, refusals."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from waiting import wait_until

torch = pytest.importorskip("torch")

import sglang_linker_stand_in as sglang  # noqa: E402
from sglang_linker_stand_in import Engine, page_keys  # noqa: E402

from stepwell import ConfigError, StoreError  # noqa: E402
from stepwell.store import registry  # noqa: E402
from stepwell.store.api import Read, ReadResult, Space, Write, WriteOutcome  # noqa: E402
from stepwell.store.memory import MemoryStore  # noqa: E402
from stepwell.store.wrappers import Wrapper  # noqa: E402

MODULE = "stepwell.connectors.sglang.linker"
KINDS = tuple(sglang.COMPONENTS)
Make = Callable[..., Engine]


class Trouble(Wrapper):
    """A store that others use too; the test makes it fail, hang or flip a bit."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.fails = False
        self.flips: bytes | None = None
        self.goes_on = Event()
        self.goes_on.set()
        self.asked = 0

    def contains(self, space: Space, keys: Sequence[bytes]) -> list[bool]:
        self.asked += 1
        self._suffer()
        return super().contains(space, keys)

    def read_into(self, space: Space, reads: Sequence[Read], **more: Any) -> list[ReadResult]:
        self._suffer()
        results = super().read_into(space, reads, **more)
        for read in reads:
            if self.flips is not None and self.flips in bytes(read.into):
                read.into[3] ^= 1
        return results

    def write_from(self, space: Space, writes: Sequence[Write]) -> list[WriteOutcome]:
        self._suffer()
        return super().write_from(space, writes)

    def close(self) -> None: ...

    def _suffer(self) -> None:
        self.goes_on.wait()
        if self.fails:
            raise StoreError("out of order")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trouble]:
    """One store for all engines that name it `shared:`."""
    shared, opener = Trouble(MemoryStore()), registry.find_opener
    monkeypatch.setattr(registry, "find_opener", lambda where: (lambda _: shared) if where == "shared:" else opener(where))
    yield shared
    shared.goes_on.set()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, store: Trouble) -> Iterator[Make]:
    for name, module in sglang.install().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    from stepwell.connectors.sglang import StepwellLinker

    made: list[Engine] = []

    def engine(kind: str = "full", **more: Any) -> Engine:
        made.append(Engine(StepwellLinker, kind, **more))
        return made[-1]

    yield engine
    store.goes_on.set()
    for each in made:
        wait_until(lambda each=each: not each.linker.stats()["to_store"], "stores")
        each.linker.audit()
        each.linker.close()
    sys.modules.pop(MODULE, None)  # made of the stand-in


@pytest.fixture
def old_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every promise is old at once."""
    monkeypatch.setattr("stepwell.connectors.sglang.host_tier.RESERVATION_S", -1.0)


SHARED = {"store": "shared:", "identity": "tiny"}


def saved(engine: Engine, *, stored: bool = False) -> bool:
    """Waits for the oldest save, and for the store."""
    wait_until(engine.linker.num_completed_offloads, "a save")
    if stored:
        wait_until(lambda: not engine.linker.stats()["to_store"], "stores")
    return bool(engine.linker.pop_completed_offload())


def resumed(engine: Engine, keys: Sequence[str], rid: str = "r") -> int:
    """How many pages came to the device, every byte as it was computed."""
    engine.wipe()
    lengths = engine.lookup(keys, rid)
    if not lengths:
        return 0
    known = list(keys[: max(lengths)])
    assert engine.queue(known, rid) and engine.run() and engine.is_exact(known)
    return len(known)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_comes_back_from_the_host_with_every_byte(make: Make, kind: str) -> None:
    engine, keys = make(kind), page_keys(6)
    engine.save(keys[:4])
    engine.save(keys[4:], first=4)
    assert saved(engine) and saved(engine)
    assert resumed(engine, keys) == 6
    assert engine.linker.stats()["loaded"] == {"full": 6, "swa": 8, "mamba": 7}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_resumes_from_the_store_with_every_byte(make: Make, kind: str) -> None:
    keys = page_keys(6)
    first = make(kind, extra=SHARED)
    first.save(keys)
    assert saved(first, stored=True)
    again = make(kind, extra=SHARED)
    assert resumed(again, keys) == 6
    assert again.linker.stats()["fetched"] == again.linker.stats()["loaded"] == {"full": 6, "swa": 8, "mamba": 7}[kind]


def test_a_process_after_a_restart_finds_the_log(make: Make, tmp_path: Path) -> None:
    extra, keys = {"store": f"log:{tmp_path}/log", "store_budget": "64MiB", "identity": "tiny"}, page_keys(5)
    first = make("swa", extra=extra)
    first.save(keys)
    assert saved(first, stored=True)
    first.linker.close()
    assert resumed(make("swa", extra=extra), keys) == 5


def test_a_tail_is_found_whatever_the_device_has_before_it(make: Make) -> None:
    """SGLang names pages behind what the device has, and never says what that is."""
    engine, keys = make(extra=SHARED), page_keys(6)
    engine.save(keys)
    assert saved(engine, stored=True)
    assert engine.lookup(keys[2:]) == [1, 2, 3, 4]
    assert resumed(make(extra=SHARED), keys[3:]) == 3


def test_lengths_are_those_that_all_pools_have(make: Make) -> None:
    keys = page_keys(6)
    mamba = make("mamba")
    for end in (2, 4):
        mamba.save(keys[end - 2 : end], first=end - 2)
        assert saved(mamba)
    assert mamba.lookup(keys) == [2, 4] and mamba.lookup(keys[:3]) == [2] and mamba.lookup(keys[:1]) == []
    assert make("swa").lookup(keys) == []


@pytest.mark.parametrize("kind", ["full", "mamba"])
def test_a_flipped_bit_is_a_miss_and_the_next_best_length_is_taken(make: Make, store: Trouble, kind: str) -> None:
    keys, engine = page_keys(6), make(kind, extra=SHARED)
    for end in (2, 4, 6):
        engine.save(keys[end - 2 : end], first=end - 2)
        assert saved(engine, stored=True)
    store.flips = bytes(engine.tensors()["kv"][1][3 * 4 : 3 * 4 + 1].view(torch.uint8).numpy().tobytes())  # of page 3
    again = make(kind, extra=SHARED)
    assert resumed(again, keys) == {"full": 3, "mamba": 2}[kind]
    store.flips = None
    assert resumed(make(kind, extra=SHARED), keys) == {"full": 3, "mamba": 2}[kind]  # the damaged page was deleted


@pytest.mark.parametrize(
    "other",
    [{"dtype": torch.float16}, {"heads": 1, "dim": 16}, {"extra": {**SHARED, "identity": "others"}}, {"kind": "swa"}],
    ids=["dtype", "heads", "weights", "pools"],
)
def test_pages_of_another_model_or_layout_are_misses(make: Make, other: dict[str, Any]) -> None:
    engine, keys = make(extra=SHARED), page_keys(3)
    engine.save(keys)
    assert saved(engine, stored=True)
    assert make(**{"extra": SHARED, **other}).lookup(keys) == []
    assert make(extra=SHARED).lookup(keys) == [1, 2, 3]


def test_a_store_that_hangs_holds_up_one_request_for_a_moment_and_nobody_else(make: Make, store: Trouble) -> None:
    engine, keys = make(extra={**SHARED, "fetch_wait_s": 0.05}), page_keys(4)
    store.goes_on.clear()
    assert engine.lookup(keys, "first") == []
    for number in range(20):  # would take a second and more, were each of them to wait
        assert engine.lookup(page_keys(4, str(number)), f"r{number}") == []
    assert engine.linker.stats()["store_not_asked"] == 20
    engine.save(keys)
    assert saved(engine)  # though none of it is stored
    assert resumed(engine, keys) == 4


def test_a_store_that_fails_costs_nothing_but_its_hits(make: Make, store: Trouble) -> None:
    engine, keys = make(extra=SHARED), page_keys(4)
    store.fails = True
    engine.save(keys)
    assert saved(engine, stored=True) and engine.lookup(page_keys(4, "b")) == []
    assert resumed(engine, keys) == 4
    store.fails = False
    assert make(extra=SHARED).lookup(keys) == []


def test_the_store_is_asked_once_for_a_request_that_waits(make: Make, store: Trouble) -> None:
    engine, keys = make(extra=SHARED), page_keys(4)
    engine.lookup(keys)
    asked = store.asked
    for _ in range(5):
        assert engine.lookup(keys) == []
    assert store.asked == asked


def test_a_full_host_evicts_the_end_of_what_was_used_longest_ago(make: Make) -> None:
    engine = make(extra={"host_memory": "32KiB"})  # eight pages
    first, second = page_keys(4), page_keys(4, "b")
    for keys in (first, second):
        engine.save(keys)
        assert saved(engine)
    assert max(engine.lookup(first)) == 4  # used, and promised
    assert engine.queue(first) and engine.run()
    engine.save(page_keys(3, "c"))
    assert saved(engine)
    assert engine.lookup(first) == [1, 2, 3, 4] and engine.lookup(second) == [1]


def test_what_was_promised_stays_until_it_is_loaded(make: Make) -> None:
    engine = make(extra={"host_memory": "32KiB"})
    keys = page_keys(4)
    engine.save(keys)
    assert saved(engine) and max(engine.lookup(keys)) == 4
    engine.save(page_keys(4, "b"))
    assert saved(engine)
    engine.save(page_keys(6, "c"))
    assert not saved(engine) and max(engine.lookup(page_keys(6, "c"), "c")) == 4  # there is space for four more pages
    assert engine.queue(keys) and engine.run() and engine.is_exact(keys)
    assert not engine.linker.stats()["dropped_reservations"]


def test_where_all_is_promised_an_old_promise_is_broken_and_its_request_computed(make: Make, old_promises: None) -> None:
    engine = make(extra={"host_memory": "32KiB"})
    keys = page_keys(8)
    engine.save(keys)
    assert saved(engine) and max(engine.lookup(keys)) == 8
    engine.save(page_keys(2, "b"))
    assert saved(engine) and engine.linker.stats()["dropped_reservations"] == 1
    assert not engine.queue(keys)


def test_beside_other_ranks_a_broken_promise_fails_the_batch(make: Make, old_promises: None) -> None:
    """A rank that would refuse alone would wait for others for ever."""
    engine = make(extra={"host_memory": "32KiB"})
    engine.linker._may_refuse = False
    keys = page_keys(8)
    engine.save(keys)
    assert saved(engine) and max(engine.lookup(keys)) == 8
    engine.save(page_keys(2, "b"))
    assert saved(engine) and engine.queue(keys) and not engine.run()


def test_a_load_that_has_not_started_can_be_cancelled(make: Make) -> None:
    engine, keys = make(), page_keys(3)
    engine.save(keys)
    assert saved(engine) and max(engine.lookup(keys)) == 3 and engine.queue(keys)
    assert engine.linker.cancel_queued_load("r") and not engine.linker.cancel_queued_load("r")
    assert engine.linker.start_layer_wise_loading() == -1 and engine.run()
    assert engine.linker._host.pools["kv"].num_pinned == 0


def test_a_pass_waits_for_each_layer_and_no_longer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, keys = make(), page_keys(3)
    engine.save(keys)
    assert saved(engine) and max(engine.lookup(keys)) == 3 and engine.queue(keys)
    copy, second = engine.linker._loads._copies.to_device, Event()

    def gated(pool: Any, layer: int, *rest: Any) -> None:
        if layer == 1:
            second.wait()
        copy(pool, layer, *rest)

    monkeypatch.setattr(engine.linker._loads._copies, "to_device", gated)
    counter = engine.linker.layer_done_counter
    index = engine.linker.start_layer_wise_loading()
    counter.set_consumer(index)
    counter.wait_until(0)  # returns although the second is not there
    came = Event()
    waiting = Thread(target=lambda: (counter.wait_until(1), came.set()), daemon=True)
    waiting.start()
    assert not came.is_set()
    second.set()
    assert came.wait(60) and engine.linker.finish_layer_wise_loading(index) and engine.is_exact(keys)


def test_a_copy_that_fails_is_told_at_the_end_of_the_pass(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, keys = make(), page_keys(3)
    engine.save(keys)
    assert saved(engine) and max(engine.lookup(keys)) == 3 and engine.queue(keys)

    def broken(*_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as changed:
        changed.setattr(engine.linker._loads._copies, "to_device", broken)
        assert not engine.run()
    assert resumed(engine, keys) == 3
    with monkeypatch.context() as changed:
        changed.setattr(engine.linker._saves._copies, "to_host", broken)
        engine.save(page_keys(2, "b"))
        assert not saved(engine)
    assert engine.lookup(page_keys(2, "b")) == []


def test_a_reset_is_for_other_weights_so_nothing_of_before_is_found(make: Make) -> None:
    engine, keys = make(extra=SHARED), page_keys(4)
    engine.save(keys)
    assert saved(engine, stored=True) and max(engine.lookup(keys)) == 4
    engine.linker.reset()
    assert engine.lookup(keys, "r2") == []
    engine.save(keys)
    assert saved(engine, stored=True) and resumed(engine, keys, "r3") == 4
    assert resumed(make(extra=SHARED), keys) == 4  # of the one before the reset: its weights are the started ones


def test_what_a_store_gives_after_a_reset_is_not_kept(make: Make, store: Trouble) -> None:
    first, keys = make(extra=SHARED), page_keys(4)
    first.save(keys)
    assert saved(first, stored=True)
    engine = make(extra={**SHARED, "fetch_wait_s": 0.05})
    store.goes_on.clear()
    assert engine.lookup(keys) == []
    fetch = engine.linker._fetches._newest
    engine.linker.reset()
    store.goes_on.set()
    assert fetch.done.wait(60) and not any(engine.linker._host.holds("kv", keys))


def test_pages_that_are_there_are_not_copied_again(make: Make) -> None:
    engine, keys = make(extra=SHARED), page_keys(4)
    engine.save(keys)
    assert saved(engine, stored=True)
    engine.save(keys, first=8)
    assert saved(engine, stored=True) and engine.linker.stats()["saved"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_random_lives_end_with_every_byte_and_a_clean_audit(make: Make, kind: str) -> None:
    chance = random.Random(3)
    engine = make(kind, extra={**SHARED, "host_memory": "256KiB" if kind != "full" else "64KiB"}, pages=64)
    prompts = {name: page_keys(8, name) for name in "abcdef"}
    hits = 0
    for number in range(60):
        keys = prompts[chance.choice("abcdef")][: chance.randint(1, 8)]
        if chance.random() < 0.5:
            engine.save(keys)
            saved(engine)
        else:
            hits += resumed(engine, keys, f"r{number}")
        engine.linker.audit()
    assert hits > 0


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"host_memory": None}, "host_memory"),
        ({"host_memory": "1KiB"}, "at least"),
        ({"host_memory": "0"}, "more than 0"),
        ({"host_memory": "none"}, "more than 0"),
        ({"host_memory": "lots"}, "host_memory: "),
        ({"host_memory": "1MiB", "hostmemory": 1}, "host_memory"),
        ({"host_memory": "1MiB", "store_budget": "1GiB"}, "no store"),
        ({"host_memory": "1MiB", "store": "log:/tmp/x", "fetch_wait_s": 0}, "fetch_wait_s"),
        ({"host_memory": "1MiB", "store": "nowhere"}, "which store"),
    ],
)
def test_a_mistake_in_the_settings_is_refused_with_what_to_write(make: Make, extra: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make(extra=extra)


def test_a_store_that_outlives_the_process_must_know_the_weights(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="identity"):
        make(extra={"store": f"log:{tmp_path}/log", "store_budget": "64MiB"})


def test_what_cannot_be_resumed_exactly_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(sglang.MHATokenToKVPool, "k_scale_buffer", [torch.zeros(1)])
        with pytest.raises(ConfigError, match="scales"):
            make()
    with monkeypatch.context() as changed:
        changed.setitem(sglang.POOLS, "full", type("MHATokenToKVPoolFP4", (sglang.MHATokenToKVPool,), {}))
        with pytest.raises(ConfigError, match="MHATokenToKVPoolFP4"):
            make()
    with monkeypatch.context() as changed:
        changed.setattr(sglang.MambaPool, "_slot_siblings", (object(),))
        with pytest.raises(ConfigError, match="Mamba"):
            make("mamba")
    with monkeypatch.context() as changed:
        changed.setattr(sglang.PARALLEL, "attn_dcp_size", 2)
        with pytest.raises(ConfigError, match="dcp-size"):
            make()
    with monkeypatch.context() as changed:
        changed.setitem(sglang.COMPONENTS, "full", ("FULL", "C128"))
        with pytest.raises(ConfigError, match="C128"):
            make()
