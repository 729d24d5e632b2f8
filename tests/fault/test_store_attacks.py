"""An attacker who can write to the store and has no key tries everything: the only result is misses.

The attacker here reads and writes any value, knows every format, and stamps what it likes with keys of its own. Every byte
that a request is served from is checked (`Rig.ready`), so what is not a miss would be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stepwell import CacheConfig, Cause, ConfigError, ModelSpec, Tier, build_cache
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.prompt import Namespace
from stepwell.base.store_key import StoreKey
from stepwell.base.tasks import ItemStatus
from stepwell.store.api import Space
from stepwell.store.keyed_seal import seals_for
from stepwell.store.memory import MemoryStore
from stepwell.testing.store_executor import ScriptedStoreExecutor
from toys import ALL_MODELS, FULL, FULL_POINT, FULL_WINDOW, HYBRID, PAGE, SMALL_PAGES, Rig, text
from waiting import step_until

PROMPT = text(1, 10 * PAGE + 1)
OURS, EVIL = StoreKey(bytes(range(32))), StoreKey(bytes(range(100, 150)))
Name = tuple[bytes, bytes]


def rig(spec: ModelSpec, store: MemoryStore, key: StoreKey | None = OURS, *, ranks: int = 1) -> Rig:
    config = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0, key=key)
    return Rig(spec, device_pages=256, host_pages=256, store=store, store_config=config, ranks=ranks)


def filled(spec: ModelSpec = FULL, key: StoreKey | None = OURS, *, ranks: int = 1) -> MemoryStore:
    store = MemoryStore()
    rig(spec, store, key, ranks=ranks).serve(PROMPT)
    return store


def page_name(store: MemoryStore, page: int) -> Name:
    """Where a prefix page is in the store of a model without checkpoints: the deepest is the oldest."""
    return list(store._values)[::-1][page]


def forged(name: Name, data: bytes, key: StoreKey | None, *, like: bytes = b"") -> bytes:
    """A stamp for any bytes under any name, made with a key that is not ours; with our key's id and MAC, where there is one."""
    seals, (digest, value_key) = seals_for(key), name
    (stamp,) = seals.stamp_all(Space(digest=digest), [value_key], [len(data)], [seals.digest(data)])
    return stamp[:44] + like[44:] if like else stamp


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def attack(store: MemoryStore, act: Callable[[MemoryStore], None], spec: ModelSpec = FULL, *, ranks: int = 1) -> Rig:
    """Serves the prompt after an attack, and once more: what was bad is gone by then, and has been stored again."""
    act(store)
    after = rig(spec, store, ranks=ranks)
    ticket = after.fetched(PROMPT)
    after.explanation = after.cache.explain(PROMPT)  # type: ignore[attr-defined]
    after.sources = after.serve(PROMPT, ticket=ticket)  # type: ignore[attr-defined]
    after.idle_check()
    assert rig(spec, store, ranks=ranks).serve_fetched(PROMPT).store == 10 * PAGE
    return after


def must_be_a_miss(after: Rig, status: ItemStatus, *, store_pages: int, times: int = 1) -> None:
    assert after.sources.store == store_pages * PAGE  # type: ignore[attr-defined]
    assert after.state.counters[f"store_{status.name.lower()}"] == times
    explanation = after.explanation  # type: ignore[attr-defined]
    assert explanation.cause is Cause.STORE and explanation.detail == status.value and explanation.tier is Tier.STORE


# ---- with the key, everything is as without ----------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_holders_of_the_key_share_a_store(spec: ModelSpec, ranks: int) -> None:
    store = filled(spec, ranks=ranks)
    after = rig(spec, store, StoreKey(bytes(range(32))), ranks=ranks)
    assert after.serve_fetched(PROMPT).store == 10 * PAGE
    after.idle_check()


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
@pytest.mark.parametrize(("mine", "theirs"), [(OURS, EVIL), (OURS, None), (None, OURS)], ids=["other", "unkeyed", "keyed"])
def test_two_settings_on_one_store_miss_and_leave_each_others_values_alone(
    spec: ModelSpec, mine: StoreKey | None, theirs: StoreKey | None
) -> None:
    store = filled(spec, theirs)
    before = dict(store._values)
    assert rig(spec, store, mine).serve_fetched(PROMPT).store == 0
    assert before.items() <= store._values.items() and len(store._values) == 2 * len(before)
    for key in (mine, theirs):
        assert rig(spec, store, key).serve_fetched(PROMPT).store == 10 * PAGE


def test_the_key_of_a_config_reaches_every_thread_at_the_store() -> None:
    store = MemoryStore()
    sizes = CacheConfig(device_bytes=64 * 1024, host_bytes=64 * 1024)
    for key, expected in ((OURS, 0), (OURS, 10 * PAGE), (None, 0), (EVIL, 0)):
        cache = build_cache(HYBRID, sizes, tuning=SMALL_PAGES)
        wait = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0, recompute_tokens_per_s=1.0, key=key)
        cache.store.attach(store, wait)
        ticket = cache.prefetch(cache.lookup(PROMPT))
        step_until(cache, lambda: ticket.ready)  # noqa: B023 - called at once
        with cache.acquire(cache.lookup(PROMPT), ticket=ticket) as lease:
            assert lease.sources.store == expected
            step_until(cache, lambda: lease.ready)
            while lease.position < len(PROMPT):
                upto = min(cache.next_stop(lease) or len(PROMPT), len(PROMPT))
                cache.grow(lease, upto)
                cache.commit(lease, upto)
                step_until(cache, lambda: lease.ready)
        cache.close()
    assert {value.stamp[:4] for value in store._values.values()} == {b"SWk1", b"SWv1"}


def test_a_first_read_that_is_damaged_keeps_nobody_else_from_the_store() -> None:
    """By then nothing is known of the store's speed."""
    store, other = MemoryStore(), text(2, 10 * PAGE + 1)
    bad: set[Name] = set()
    sizes = CacheConfig(device_bytes=64 * 1024, host_bytes=64 * 1024)
    wait = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0, recompute_tokens_per_s=1e6)
    for expected in (0, 10 * PAGE):
        cache = build_cache(FULL, sizes, tuning=SMALL_PAGES)
        cache.store.attach(store, wait)
        for name in bad:
            store._values[name].data = flipped(store._values[name].data)
        for prompt, served in ((PROMPT, 0), (other, expected)):
            ticket = cache.prefetch(cache.lookup(prompt))
            step_until(cache, lambda: ticket.ready)  # noqa: B023 - called at once
            with cache.acquire(cache.lookup(prompt), ticket=ticket) as lease:
                assert lease.sources.store == served
                step_until(cache, lambda: lease.ready)
                cache.grow(lease, len(prompt))
                cache.commit(lease, len(prompt), last=True)
            step_until(cache, lambda: len(store._values) >= 10)
            bad = bad or set(store._values)
        cache.close()


def test_the_label_shows_which_key_and_the_space_shows_neither_key_nor_namespace() -> None:
    namespace = Namespace(model="m", layout="l", salt="secret")
    keyed, plain = (rig(FULL, MemoryStore(), key).store_workers[0].space(namespace) for key in (OURS, None))
    assert keyed.label == f"m [0/1, key {OURS.id.hex()}]" and plain.label == "m [0/1]"
    assert keyed.digest != plain.digest == replace(namespace, shard="0/1").digest
    named = replace(namespace, model="0123456789abcdef/fp32/cpu", name="a model")
    assert rig(FULL, MemoryStore(), None).store_workers[0].space(named).label == "a model 01234567/fp32/cpu [0/1]"
    assert replace(named, name="another").digest == named.digest, "the name is for people alone"


def test_a_key_is_not_forgotten_where_workers_were_made_by_somebody_else() -> None:
    cache = Rig(FULL, device_pages=64, host_pages=64).cache
    with pytest.raises(ConfigError, match="set it there"):
        cache.store.attach(MemoryStore(), StoreConfig(key=OURS), executor=ScriptedStoreExecutor(()))


# ---- values made up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["unkeyed", "own key", "own key with our id and mac"])
def test_a_value_made_up_without_the_key_is_a_miss(how: str) -> None:
    def plant(store: MemoryStore) -> None:
        name = page_name(store, 4)
        value = store._values[name]
        data, like = flipped(value.data), value.stamp if how.endswith("mac") else b""
        stamp = forged(name, data, None if how == "unkeyed" else EVIL, like=like)
        store._values[name] = replace(value, data=data, stamp=stamp)

    must_be_a_miss(attack(filled(), plant), ItemStatus.OTHER_KEY, store_pages=4)


def test_the_right_bytes_with_a_stamp_of_somebody_else_are_a_miss_too() -> None:
    def restamp(store: MemoryStore) -> None:
        for name, value in store._values.items():
            value.stamp = forged(name, value.data, None)

    after = attack(filled(), restamp)
    must_be_a_miss(after, ItemStatus.OTHER_KEY, store_pages=0, times=10)


def test_an_unkeyed_stamp_does_not_stop_an_attacker() -> None:
    """What the documents say of stores without a key: that is why there are keys."""
    store = filled(FULL, None)
    name = page_name(store, 4)
    value = store._values[name]
    data = flipped(value.data)
    store._values[name] = replace(value, data=data, stamp=forged(name, data, None))
    after = rig(FULL, store, None)
    ticket = after.fetched(PROMPT)
    with pytest.raises(AssertionError):  # the bytes of a page are not those of its tokens
        after.serve(PROMPT, ticket=ticket)


def test_a_value_with_a_key_that_was_put_where_none_is_used_is_a_miss() -> None:
    store = filled(FULL, None)
    name = page_name(store, 4)
    store._values[name].stamp = forged(name, store._values[name].data, EVIL)
    after = rig(FULL, store, None)
    assert after.serve_fetched(PROMPT).store == 4 * PAGE
    assert after.state.counters["store_other_key"] == 1


def test_every_flipped_byte_of_a_value_or_its_stamp_is_a_miss() -> None:
    for at in range(64 + 32):

        def flip(store: MemoryStore, at: int = at) -> None:
            value = store._values[page_name(store, 4)]
            both = bytearray(value.stamp + value.data)
            both[at] ^= 0x10
            value.stamp, value.data = bytes(both[:64]), bytes(both[64:])

        store = filled()
        flip(store)
        after = rig(FULL, store)
        assert after.serve_fetched(PROMPT).store == 4 * PAGE


@pytest.mark.parametrize("size", [0, 1, 31])
def test_a_value_that_was_cut_is_a_miss(size: int) -> None:
    def cut(store: MemoryStore) -> None:
        name = page_name(store, 4)
        value = store._values[name]
        value.data = value.data[:size]
        value.stamp = forged(name, value.data, EVIL, like=value.stamp)

    must_be_a_miss(attack(filled(), cut), ItemStatus.LENGTH, store_pages=4)


@pytest.mark.parametrize("size", [0, 1, 63, 65])
def test_a_stamp_that_was_cut_is_a_miss(size: int) -> None:
    def cut(store: MemoryStore) -> None:
        value = store._values[page_name(store, 4)]
        value.stamp = (value.stamp + b"?")[:size]

    must_be_a_miss(attack(filled(), cut), ItemStatus.UNREADABLE, store_pages=4)


# ---- values of ours, put elsewhere -------------------------------------------------------------------


@pytest.mark.parametrize("renamed", [False, True], ids=["as it is", "renamed"])
def test_a_value_put_in_anothers_place_is_a_miss(renamed: bool) -> None:
    def swap(store: MemoryStore) -> None:
        four, seven = page_name(store, 4), page_name(store, 7)
        value = store._values[seven]
        stamp = forged(four, value.data, EVIL, like=value.stamp) if renamed else value.stamp
        store._values[four] = replace(store._values[four], data=value.data, stamp=stamp)

    must_be_a_miss(attack(filled(), swap), ItemStatus.OTHER_KEY if renamed else ItemStatus.SWAPPED, store_pages=4)


@pytest.mark.parametrize("renamed", [False, True], ids=["as it is", "renamed"])
@pytest.mark.parametrize("change", [{"salt": "x"}, {"tenant": "x"}, {"adapter": "x"}, {"model": "x"}], ids=str)
@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["pages", "checkpoints"])
def test_values_moved_from_another_namespace_are_misses(spec: ModelSpec, change: dict[str, str], renamed: bool) -> None:
    """Values of another tenant under the same keys: as if the attacker had talked a server into computing them for it."""
    store, here = filled(spec), rig(spec, MemoryStore())
    mine = here.store_workers[0].space(here.cache.namespace).digest
    theirs = here.store_workers[0].space(replace(here.cache.namespace, **change))  # type: ignore[arg-type]
    seals, status = seals_for(OURS), ItemStatus.OTHER_KEY if renamed else ItemStatus.FOREIGN
    for name, value in store._values.items():
        assert name[0] == mine
        (stamp,) = seals.stamp_all(theirs, [name[1]], [len(value.data)], [seals.digest(value.data)])
        value.stamp = forged(name, value.data, EVIL, like=stamp) if renamed else stamp
    after = rig(spec, store)
    ticket = after.fetched(PROMPT)
    assert after.cache.explain(PROMPT).detail == status.value
    assert after.serve(PROMPT, ticket=ticket).store == 0 and after.state.counters[f"store_{status.name.lower()}"]
    after.idle_check()


@pytest.mark.parametrize("renamed", [False, True], ids=["as it is", "renamed"])
@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["pages", "checkpoints"])
def test_values_moved_between_ranks_are_misses(spec: ModelSpec, renamed: bool) -> None:
    store = filled(spec, ranks=2)
    here = rig(spec, MemoryStore(), ranks=2)
    first, second = (worker.space(here.cache.namespace).digest for worker in here.store_workers)
    for (digest, key), value in list(store._values.items()):
        if digest == second and (first, key) in store._values:  # members have names of their own: their bytes differ
            name = first, key
            stamp = forged(name, value.data, EVIL, like=value.stamp) if renamed else value.stamp
            store._values[name] = replace(store._values[name], data=value.data, stamp=stamp)
    after = rig(spec, store, ranks=2)
    assert after.serve_fetched(PROMPT).store == 0
    assert after.state.counters["store_other_key" if renamed else "store_foreign"]
    after.idle_check()


def test_an_old_value_of_the_same_name_is_as_good_as_the_new_one() -> None:
    """Names say what a value must be, so that bringing back what once was there does no harm."""
    old, store = filled(HYBRID), filled(HYBRID)
    store._values = dict(old._values)
    assert rig(HYBRID, store).serve_fetched(PROMPT).store == 10 * PAGE


# ---- checkpoints -------------------------------------------------------------------------------------


def objects(store: MemoryStore) -> list[Name]:
    """Members and manifest of the one checkpoint: all that is no prefix page."""
    return list(store._values)[:-10]


def manifest_of(store: MemoryStore) -> Name:
    (name,) = [name for name in objects(store) if store._values[name].data[:4] == b"SWcp"]
    return name


def members_of(store: MemoryStore) -> list[Name]:
    return [name for name in objects(store) if store._values[name].data[:4] != b"SWcp"]


def other_text(spec: ModelSpec) -> MemoryStore:
    """The same of another prompt, with the same key."""
    store = MemoryStore()
    rig(spec, store).serve(text(2, 10 * PAGE + 1))
    return store


def checkpoint_must_be_a_miss(store: MemoryStore, spec: ModelSpec, status: ItemStatus) -> None:
    after = attack(store, lambda _: None, spec)
    assert after.sources.store == 0 and after.state.counters[f"store_{status.name.lower()}"] >= 1  # type: ignore[attr-defined]
    assert after.explanation.detail == status.value  # type: ignore[attr-defined]


CHECKPOINTED = pytest.mark.parametrize("spec", [FULL_POINT, FULL_WINDOW, HYBRID], ids=["point", "window", "hybrid"])


@CHECKPOINTED
@pytest.mark.parametrize("renamed", [False, True], ids=["as it is", "renamed"])
def test_a_manifest_of_another_checkpoint_is_a_miss(spec: ModelSpec, renamed: bool) -> None:
    store, other = filled(spec), other_text(spec)
    name, value = manifest_of(store), other._values[manifest_of(other)]
    stamp = forged(name, value.data, EVIL, like=value.stamp) if renamed else value.stamp
    store._values = {name: value for name, value in other._values.items() if name in members_of(other)} | store._values
    store._values[name] = replace(store._values[name], data=value.data, stamp=stamp)
    after = rig(spec, store)
    status = ItemStatus.OTHER_KEY if renamed else ItemStatus.SWAPPED
    ticket = after.fetched(PROMPT)
    assert after.cache.explain(PROMPT).detail == status.value and after.serve(PROMPT, ticket=ticket).store == 0
    assert rig(spec, store).serve_fetched(PROMPT).store == 10 * PAGE


@CHECKPOINTED
def test_a_manifest_that_was_made_up_is_a_miss(spec: ModelSpec) -> None:
    """It names members that are all there and all good, but of another checkpoint."""
    store, other = filled(spec), other_text(spec)
    name = manifest_of(store)
    data = other._values[manifest_of(other)].data
    for key in (None, EVIL):
        planted = filled(spec)
        planted._values[name] = replace(planted._values[name], data=data, stamp=forged(name, data, key))
        checkpoint_must_be_a_miss(planted, spec, ItemStatus.OTHER_KEY)


@CHECKPOINTED
def test_a_manifest_that_was_cut_is_a_miss(spec: ModelSpec) -> None:
    store = filled(spec)
    name = manifest_of(store)
    value = store._values[name]
    value.data = value.data[:-1]
    value.stamp = forged(name, value.data, EVIL, like=value.stamp)
    checkpoint_must_be_a_miss(store, spec, ItemStatus.LENGTH)


@CHECKPOINTED
@pytest.mark.parametrize("how", ["another's", "another's, renamed", "made up", "unkeyed"])
def test_a_member_that_is_not_the_one_that_was_saved_is_a_miss(spec: ModelSpec, how: str) -> None:
    theirs = other_text(spec)
    for at in range(len(members_of(filled(spec)))):
        store = filled(spec)
        name, value = members_of(store)[at], theirs._values[members_of(theirs)[at]]
        data = flipped(store._values[name].data) if how in ("made up", "unkeyed") else value.data
        stamp = {
            "another's": value.stamp,
            "another's, renamed": forged(name, data, EVIL, like=value.stamp),
            "made up": forged(name, data, EVIL, like=store._values[name].stamp),
            "unkeyed": forged(name, data, None),
        }[how]
        store._values[name] = replace(store._values[name], data=data, stamp=stamp)
        checkpoint_must_be_a_miss(store, spec, ItemStatus.SWAPPED if how == "another's" else ItemStatus.OTHER_KEY)
