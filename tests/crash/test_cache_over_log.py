"""A whole cache over files: what a dead process stored is served, whatever happened to the files, or is an explained miss."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from stepwell import Cause, ConfigError, Kind, ModelSpec, StoreError, Tier, build_cache, open_store
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.store_key import StoreKey
from stepwell.base.tasks import ItemStatus
from stepwell.store.log.store import LogStore
from toys import ALL_MODELS, FULL, HYBRID, PAGE, SMALL_PAGES, Rig, text

PROMPTS = [text(name, 10 * PAGE + 1) for name in range(4)]
KEYS = pytest.mark.parametrize("key", [None, StoreKey(bytes(range(32)))], ids=["unkeyed", "keyed"])


@contextmanager
def rig(spec: ModelSpec, directory: Path, key: StoreKey | None = None) -> Iterator[Rig]:
    store = open_store(f"log:{directory}", options={"budget": "8MiB", "direct": "off"})
    config = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, checkpoint_delay_s=0, key=key)
    try:
        yield Rig(spec, device_pages=512, host_pages=512, store=store, store_config=config)
    finally:
        store.close()


def fill(spec: ModelSpec, directory: Path, key: StoreKey | None = None) -> None:
    with rig(spec, directory, key) as here:
        for prompt in PROMPTS:
            here.serve(prompt)


def segments(directory: Path) -> list[Path]:
    """Files with something in them, largest first."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 64 * 1024]
    return sorted((path for path in files if any(path.read_bytes())), key=lambda path: -path.stat().st_size)


def flip_a_byte(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    used = len(data.rstrip(b"\0"))
    data[random.randrange(used)] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def cut(path: Path, random: Random) -> None:
    used = len(path.read_bytes().rstrip(b"\0"))
    with path.open("r+b") as file:
        file.truncate(random.randrange(used))


def wipe(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    start = random.randrange(len(data.rstrip(b"\0")))
    data[start : start + 8192] = bytes(min(8192, len(data) - start))
    path.write_bytes(data)


@KEYS
@pytest.mark.parametrize("spec", ALL_MODELS.values(), ids=ALL_MODELS)
def test_yesterdays_prompts_are_resumed_today(spec: ModelSpec, key: StoreKey | None, tmp_path: Path) -> None:
    fill(spec, tmp_path / "store", key)
    with rig(spec, tmp_path / "store", key) as today:
        for prompt in PROMPTS:
            sources = today.serve_fetched(prompt)
            assert (sources.store, sources.computed) == (10 * PAGE, 1)
        today.idle_check()


@KEYS
def test_what_a_process_stored_before_it_died_is_served(key: StoreKey | None, tmp_path: Path) -> None:
    with rig(HYBRID, tmp_path / "store", key) as here:
        for prompt in PROMPTS:
            here.serve(prompt)
        shutil.copytree(tmp_path / "store", tmp_path / "left")  # what is there in the middle of it: nothing was closed
    with rig(HYBRID, tmp_path / "left", key) as after:
        assert sum(after.serve_fetched(prompt).store for prompt in PROMPTS) == 40 * PAGE
        after.idle_check()


@KEYS
@pytest.mark.parametrize("harm", [flip_a_byte, cut, wipe], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("spec", [FULL, HYBRID], ids=["full", "hybrid"])
def test_damaged_files_cost_misses_and_never_a_byte(
    spec: ModelSpec, harm: Callable[[Path, Random], None], key: StoreKey | None, tmp_path: Path
) -> None:
    fill(spec, tmp_path / "whole", key)
    restored = 0
    for seed in range(12):
        random, directory = Random(seed), tmp_path / f"store{seed}"
        directory.mkdir()
        for path in (tmp_path / "whole").iterdir():
            (directory / path.name).write_bytes(path.read_bytes())
        harm(random.choice(segments(directory)), random)
        with rig(spec, directory, key) as here:
            for prompt in PROMPTS:
                restored += here.serve_fetched(prompt).store  # every byte that comes back is checked
            here.idle_check()
        for _ in range(6):  # what is damaged is found when it is read, one page of a path after the other
            with rig(spec, directory, key) as again:
                healed = sum(again.serve_fetched(prompt).store for prompt in PROMPTS) == 40 * PAGE
            if healed:
                break
        assert healed, "what was lost is stored again, in time"
    assert restored > 0, "damage to one place lost everything every time"


def test_a_flipped_bit_in_a_page_is_named(tmp_path: Path) -> None:
    fill(FULL, tmp_path / "store")
    with rig(FULL, tmp_path / "store") as here, here.ready(PROMPTS[0]) as lease:
        here.engine.compute(lease, PAGE)
        page = bytes(here.memories[0][Tier.DEVICE].view(Kind.PREFIX, int(lease.prefix_pages[0])))
    (path,) = [path for path in segments(tmp_path / "store") if page in path.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(page)] ^= 1
    path.write_bytes(data)
    with rig(FULL, tmp_path / "store") as here:
        ticket = here.fetched(PROMPTS[0])
        explanation = here.cache.explain(PROMPTS[0])
        assert explanation.cause is Cause.STORE and explanation.detail == ItemStatus.DAMAGED.value
        assert here.state.counters["store_damaged"] == 1
        ticket.close()


def test_a_store_that_outlives_the_process_wants_the_weights_named(tmp_path: Path) -> None:
    store = open_store(f"log:{tmp_path / 'store'}", options={"budget": "8MiB"})
    nameless = build_cache(FULL, Rig(FULL, device_pages=64, host_pages=64).config, tuning=SMALL_PAGES)
    with pytest.raises(ConfigError, match="name the weights"):
        nameless.store.attach(store)
    nameless.close()
    store.close()


def test_a_second_process_is_told_who_has_the_directory(tmp_path: Path) -> None:
    store = open_store(f"log:{tmp_path / 'store'}", options={"budget": "8MiB"})
    assert isinstance(store, LogStore)
    with pytest.raises(StoreError):
        open_store(f"log:{tmp_path / 'store'}")
    store.close()
