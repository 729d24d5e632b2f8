"""KV events of the vLLM connector: blocks by vLLM's own hashes, stored and removed by medium. Below the toy engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from toy_runs import Make, computed_by, text
from toy_vllm import BLOCK, MODELS, ToyEngine

from stepwell.base.prompt import page_keys
from stepwell.connectors.vllm.requests import PageNames
from stepwell.connectors.vllm.requests import Path as NotedPath

Reported = set[tuple[str, int, bytes]]  # medium, group, hash


def heard(engine: ToyEngine, before: Reported | None = None) -> Reported:
    """What a listener knows after the engine's events so far, which are taken."""
    known = set(before or ())
    for event in engine.events:
        if type(event).__name__ == "AllBlocksCleared":
            known.clear()
            continue
        blocks = {(event.medium, event.group_idx, each) for each in event.block_hashes}
        is_stored = type(event).__name__ == "BlockStored"
        assert not (blocks & known if is_stored else blocks - known), f"reported twice, or never stored: {event}"
        known = known | blocks if is_stored else known - blocks
    engine.events = []
    return known


def chains(engine: ToyEngine) -> list[Any]:
    return [event for event in engine.events if type(event).__name__ == "BlockStored"]


@pytest.mark.parametrize("model", MODELS)
def test_blocks_are_told_under_the_hashes_that_vllm_gives_them(make: Make, model: str) -> None:
    engine = make(model, events=True)
    request = engine.submit(text(1, 45))
    engine.run()
    hashes, seen = request.block_hashes, chains(engine)
    assert {event.medium for event in seen} == {"CPU"}
    for event in seen:
        step = event.block_size // BLOCK
        upto = max(hashes.index(each) for each in event.block_hashes) + 1
        first = upto - len(event.block_hashes) * step
        assert event.block_hashes == hashes[first + step - 1 : upto : step], "neighbours of one path"
        assert event.parent_block_hash == (hashes[first - 1] if first else None)
        assert event.token_ids == request.all_token_ids[first * BLOCK : upto * BLOCK]
    for group in engine.groups:
        number, kind = engine.groups.index(group), type(group.kv_cache_spec).__name__
        reported = [each for event in seen if event.group_idx == number for each in event.block_hashes]
        step = group.kv_cache_spec.block_size // BLOCK
        if kind == "FullAttentionSpec":
            page = engine._page() // BLOCK
            assert reported == hashes[: len(hashes) // page * page][step - 1 :: step]
        else:
            assert set(reported) <= set(hashes) and reported, "the boundaries with a checkpoint"
        assert all(event.kv_cache_spec_kind for event in seen if event.group_idx == number)


def test_what_leaves_host_memory_is_told_and_so_is_the_store(make: Make, tmp_path: Path) -> None:
    engine = make(events=True, host_memory="64KiB", store=f"log:{tmp_path}", store_budget="64MiB", prefetch="wait_complete")
    known: Reported = set()
    for seed in range(24):
        computed_by(engine, text(seed, 45))
        known = heard(engine, known)
    media = [medium for medium, _, _ in known]
    held = len(engine.connector._events._names._held)
    assert media.count("CPU") == held < 24 * 11, "what is there, and no more"
    assert media.count("STORAGE") == 24 * 12


@pytest.mark.parametrize("model", MODELS)
def test_a_second_engine_tells_of_what_it_brings_up_from_the_store(make: Make, tmp_path: Path, model: str) -> None:
    store = {"store": f"log:{tmp_path}", "store_budget": "64MiB"}
    first, prompt = make(model, events=True, **store), text(1, 45)
    computed_by(first, prompt)
    first.close()
    second = make(model, events=True, **store)
    computed_by(second, prompt, answer=1)
    known = {each for each in heard(second) if each[0] == "CPU"}
    assert known and known <= heard(first)


@pytest.mark.parametrize("model", ["full", "all"])
def test_random_traffic_tells_nothing_twice(make: Make, model: str) -> None:
    rng, known = random.Random(1), set()
    engine = make(model, events=True, blocks=16 * len(MODELS[model]) + 8, host_memory="64KiB")
    for _ in range(12):
        computed_by(engine, text(rng.randrange(3), rng.randrange(8, 60)) + text(rng.randrange(99), 9), late=rng.random() < 0.5)
        known = heard(engine, known)
    assert len(known) > 10


def test_after_a_reset_a_listener_knows_of_nothing_from_before(make: Make) -> None:
    engine = make(events=True)
    computed_by(engine, text(1, 45))
    running = engine.submit(text(2, 45))
    while running.status != "running":
        engine.step()
    engine.connector.reset_cache()
    engine.run()
    assert not heard(engine)
    again = engine.submit(text(1, 45))
    engine.run()
    assert {each for _, _, each in heard(engine)} == set(again.block_hashes)


@pytest.mark.parametrize("how", ["reset", "lost"])
def test_a_listener_that_could_not_be_told_of_everything_is_told_to_forget(make: Make, how: str) -> None:
    engine = make(events=True)
    events, cache = engine.connector._events, engine.connector._scheduler.cache
    for seed in range(20):
        computed_by(engine, text(seed, 45))
    known = heard(engine)
    assert len(known) > 50
    events._feed._most_pages = 50
    if how == "reset":
        engine.connector.reset_cache()
    else:
        cache.flush()
        assert events._feed.lost_pages
    later = engine.submit(text(99, 45))
    engine.run()
    assert {each for _, _, each in heard(engine, known)} == set(later.block_hashes)
    assert len(events._names._held) == len(later.block_hashes)


def test_after_a_reset_a_listener_does_not_believe_in_the_store_either(make: Make, tmp_path: Path) -> None:
    engine = make(events=True, store=f"log:{tmp_path}", store_budget="64MiB")
    computed_by(engine, text(1, 45))
    known = heard(engine)
    assert {medium for medium, _, _ in known} == {"CPU", "STORAGE"}
    engine.connector.reset_cache()
    engine.step()
    assert not heard(engine, known)


def test_what_the_store_has_evicted_is_told_as_removed_when_it_is_asked_for(make: Make, tmp_path: Path) -> None:
    engine = make(events=True, host_memory="64KiB", store=f"log:{tmp_path}", store_budget="64MiB", prefetch="wait_complete")
    request, known = engine.submit(text(1, 45)), set()
    engine.run()
    for seed in range(100, 130):
        computed_by(engine, text(seed, 45))
    known, mine = heard(engine, known), set(request.block_hashes)
    assert {medium for medium, _, each in known if each in mine} == {"STORAGE"}
    engine.connector._store.contains = lambda space, keys: [False] * len(keys)
    computed_by(engine, text(1, 45), kv_transfer_params={"stepwell_store": False})
    left = {(medium, each) for medium, _, each in heard(engine, known) if each in mine}
    assert not {each for medium, each in left if medium == "STORAGE" and each in request.block_hashes[:11]}


def test_every_block_of_a_long_line_of_requests_is_told(make: Make) -> None:
    engine = make(events=True)
    names = engine.connector._events._names
    names.most_unused = 20
    requests = [engine.submit(text(500 + number, 45), answer=1) for number in range(20)]
    engine.run()
    known = {each for _, _, each in heard(engine)}
    assert all(set(request.block_hashes[:11]) <= known for request in requests)
    assert not engine.connector._events._paths and len(names._names) == len(names._held) + len(names._unused)
    assert set(names._users.values()) == {1}, "host memory alone has them"


def test_a_request_with_tokens_that_cannot_be_cached_stops_neither_a_reset_nor_a_step(make: Make) -> None:
    engine = make(events=True)
    request = engine.submit([-5] * 45)
    engine.connector.reset_cache()
    seen = engine.connector._scheduler.seen(request.request_id)
    seen.namespace = engine.connector._scheduler.cache.namespace
    engine.connector._events.arrived(request, seen)
    seen.namespace = None
    assert not engine.connector._events._paths
    engine.abort(request)
    assert computed_by(engine, text(1, 45)) == 49


def test_without_listeners_nothing_is_noted(make: Make) -> None:
    engine = make()
    computed_by(engine, text(1, 45))
    assert engine.events == [] and not engine.connector._scheduler.cache._state.tree.feeds


def test_pages_that_are_never_stored_are_forgotten_in_time() -> None:
    names = PageNames(page_tokens=4, hash_tokens=2, most_unused=3)
    path = NotedPath(namespace=bytes(32), tokens=lambda start: tokens[start:])
    tokens = list(range(22))
    names.note(path, tokens, [bytes([each]) for each in range(11)])
    keys = list(page_keys(bytes(32), b"".join(each.to_bytes(4, "little") for each in tokens), 16))
    assert all(names.get(key) is not None for key in keys), "the request is open"
    names.release(path)
    assert [names.get(key) is not None for key in keys] == [False, False, True, True, True]
    name = names.stored(keys[4])
    assert name is not None and name.hashes == (b"\x08", b"\x09") and name.parent == b"\x07"
    assert names.evicted(keys[4]) is name and names.get(keys[4]) is name and names.evicted(keys[4]) is None
