"""Whatever happens to a stored value, it comes back as it was or not at all; the miss is counted by its cause and explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from stepwell import Cause, ModelSpec, Tier
from stepwell.base.tasks import ItemStatus
from stepwell.store.memory import MemoryStore
from stepwell.store.seal import seal
from stepwell.store.wrappers import Faults, Faulty
from stepwell.transfer.store_worker import StoreWorker
from toys import ALL_MODELS, FULL, FULL_POINT, FULL_WINDOW, HYBRID, PAGE, Rig, text

PROMPT = text(1, 10 * PAGE + 1)
MANIFEST_BYTES = 12 + 56  # of one member


def rig(spec: ModelSpec, store: object) -> Rig:
    return Rig(spec, device_pages=256, host_pages=256, store=store)  # type: ignore[arg-type]


def filled(spec: ModelSpec) -> MemoryStore:
    store = MemoryStore()
    rig(spec, store).serve(PROMPT)
    return store


def name_of(store: MemoryStore, page: int) -> tuple[bytes, bytes]:
    """Where a prefix page is in the store of a model without checkpoints: the deepest is the oldest."""
    return list(store._values)[::-1][page]


def spoil_and_serve(store: MemoryStore, spoil: Callable[[MemoryStore], None], spec: ModelSpec = FULL) -> Rig:
    """Damages a store, then asks for everything; the request must be served from bytes that are right."""
    spoil(store)
    after = rig(spec, store)
    ticket = after.fetched(PROMPT)
    after.explanation = after.cache.explain(PROMPT)  # type: ignore[attr-defined]
    after.sources = after.serve(PROMPT, ticket=ticket)  # type: ignore[attr-defined]
    after.idle_check()
    return after


def must_be_a_miss(after: Rig, status: ItemStatus, *, store_pages: int) -> None:
    assert after.sources.store == store_pages * PAGE  # type: ignore[attr-defined]
    assert after.state.counters[f"store_{status.name.lower()}"] == 1
    explanation = after.explanation  # type: ignore[attr-defined]
    assert explanation.cause is Cause.STORE and explanation.detail == status.value and explanation.tier is Tier.STORE
    assert status.value in str(explanation)


def test_every_flipped_bit_of_a_page_is_a_miss() -> None:
    for bit in range(8 * len(next(iter(filled(FULL)._values.values())).data)):

        def flip(store: MemoryStore, bit: int = bit) -> None:
            value = store._values[name_of(store, 4)]
            data = bytearray(value.data)
            data[bit // 8] ^= 1 << bit % 8
            value.data = bytes(data)

        must_be_a_miss(spoil_and_serve(filled(FULL), flip), ItemStatus.DAMAGED, store_pages=4)


def test_every_flipped_byte_of_a_stamp_is_a_miss() -> None:
    for byte in range(64):

        def flip(store: MemoryStore, byte: int = byte) -> None:
            value = store._values[name_of(store, 4)]
            stamp = bytearray(value.stamp)
            stamp[byte] ^= 0x55
            value.stamp = bytes(stamp)

        after = spoil_and_serve(filled(FULL), flip)
        if byte in (6, 7):  # reserved: says nothing yet
            continue
        assert after.sources.store == 4 * PAGE  # type: ignore[attr-defined]


def test_a_value_of_another_length_is_a_miss() -> None:
    def cut(store: MemoryStore) -> None:
        value = store._values[name_of(store, 4)]
        value.data = value.data[:-1]

    must_be_a_miss(spoil_and_serve(filled(FULL), cut), ItemStatus.LENGTH, store_pages=4)


def test_a_value_that_was_swapped_with_another_is_a_miss() -> None:
    def swap(store: MemoryStore) -> None:
        four, seven = name_of(store, 4), name_of(store, 7)
        store._values[four], store._values[seven] = store._values[seven], store._values[four]

    after = spoil_and_serve(filled(FULL), swap)
    assert after.state.counters["store_swapped"] == 2 and after.sources.store == 4 * PAGE  # type: ignore[attr-defined]
    assert after.explanation.detail == ItemStatus.SWAPPED.value  # type: ignore[attr-defined]


def test_a_value_of_another_namespace_is_a_miss() -> None:
    def replace_one(store: MemoryStore) -> None:
        here = rig(FULL, MemoryStore())
        worker = StoreWorker(store, here.memories[0][Tier.HOST])
        other = worker.space(replace(here.cache.namespace, salt="another tenant"))
        digest, key = name_of(store, 4)
        data = b"x" * len(store._values[digest, key].data)
        store._values[digest, key] = replace(store._values[digest, key], data=data, stamp=seal(other, key, data))

    must_be_a_miss(spoil_and_serve(filled(FULL), replace_one), ItemStatus.FOREIGN, store_pages=4)


def test_a_value_the_store_lost_after_it_was_asked_is_a_miss() -> None:
    store = filled(FULL)
    after = rig(FULL, store)
    ticket = after.cache.prefetch(after.cache.lookup(PROMPT))
    after.store_executor.finish_all()
    store._drop(name_of(store, 4))
    after.cache.step()
    after.settle()
    assert after.cache.explain(PROMPT).detail == ItemStatus.MISSING.value
    assert after.serve(PROMPT, ticket=ticket).store == 4 * PAGE
    after.idle_check()


def test_what_is_damaged_is_deleted_and_stored_again() -> None:
    store = filled(FULL)
    store._values[name_of(store, 4)].data = bytes(32)
    after = rig(FULL, store)
    after.serve_fetched(PROMPT)
    assert rig(FULL, store).serve_fetched(PROMPT).store == 10 * PAGE


@pytest.mark.parametrize("spec", [FULL_POINT, FULL_WINDOW, HYBRID], ids=["point", "window", "hybrid"])
def test_every_object_of_a_checkpoint_that_is_lost_or_damaged_makes_it_a_miss(spec: ModelSpec) -> None:
    whole = filled(spec)
    objects = list(whole._values)[:-10]
    assert len(objects) >= 2
    for index in range(len(objects)):
        for act in ("lose", "flip"):
            store = filled(spec)
            name = list(store._values)[index]
            if act == "lose":
                store._drop(name)
            else:
                value = store._values[name]
                value.data = bytes([value.data[0] ^ 1]) + value.data[1:]
            after = rig(spec, store)
            ticket = after.fetched(PROMPT)
            explanation = after.cache.explain(PROMPT)
            sources = after.serve(PROMPT, ticket=ticket)
            assert sources.store == 0 and sources.computed == len(PROMPT), f"{act} object {index}"
            if explanation.cause is Cause.STORE:  # a missing manifest looks as if it was never stored
                assert explanation.detail in {ItemStatus.INCOMPLETE.value, ItemStatus.DAMAGED.value}
            else:
                assert act == "lose" and explanation.cause in (Cause.NO_CHECKPOINT, Cause.NEVER_STORED)
            after.idle_check()
            assert rig(spec, store).serve_fetched(PROMPT).store == 10 * PAGE, "it was stored again, and is whole"


@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
@pytest.mark.parametrize("fault", ["fail", "short", "flip", "swap", "lose"])
def test_a_faulty_store_never_changes_a_byte(spec: ModelSpec, fault: str) -> None:
    store = filled(spec)
    for seed in range(10):
        faulty = Faulty(store, Faults(**{fault: 0.3}), random=Random(seed), sleep=lambda seconds: None)
        after = rig(spec, faulty)
        for length in (10, 4, 7):
            after.serve_fetched([*PROMPT[: length * PAGE], 5, 6, 7])
            after.serve_fetched(PROMPT)  # every byte that is restored is checked
        after.idle_check()
