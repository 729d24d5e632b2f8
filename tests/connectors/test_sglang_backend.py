"""SGLang's L3 backend over a stand-in of its interface: every pool, legal lengths, ranks, damage, settings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sglang_stand_in as sglang  # noqa: E402
from sglang_backends import TRAILING, attach, config, fill, hybrid, info, keys, same, slots, transfer  # noqa: E402

from stepwell import ConfigError, StoreError  # noqa: E402
from stepwell.store import registry  # noqa: E402
from stepwell.store.memory import MemoryStore  # noqa: E402
from stepwell.store.wrappers import Wrapper  # noqa: E402

Open = Callable[..., Any]


@pytest.fixture
def hicache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, module in sglang.install().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "stepwell.connectors.sglang.hicache", raising=False)
    from stepwell.connectors.sglang import StepwellHiCache

    yield StepwellHiCache
    sys.modules.pop("stepwell.connectors.sglang.hicache", None)  # made of the stand-in


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """One store for all ranks that name it `shared:`."""
    store = MemoryStore()
    opener = registry.find_opener
    monkeypatch.setattr(registry, "find_opener", lambda where: (lambda _: Open_(store)) if where == "shared:" else opener(where))
    return store


class Open_(Wrapper):
    """One rank's way into it, which closes alone."""

    def close(self) -> None: ...


def test_pages_come_back_to_other_places_with_every_byte(hicache: Any) -> None:
    pool = sglang.MHAPool()
    backend, names = attach(hicache, pool), keys(4)
    saved = fill(pool)
    assert backend.batch_exists(names) == 0 and backend.batch_get_v1(names, slots(4, 5, 6, 7)) == [False] * 4
    assert backend.batch_set_v1(names, slots(0, 1, 2, 3), info([])) == [True] * 4
    pool.kv_buffer.zero_()
    assert backend.batch_exists([*names, *keys(1, "b")]) == 4 and backend.exists(names[2]) and not backend.exists("unknown")
    assert backend.batch_get_v1(names, slots(7, 6, 5, 4)) == [True] * 4
    assert all(same(pool.kv_buffer[:, 7 - page], saved[:, page]) for page in range(4)) and not pool.kv_buffer[:, :4].any()
    assert backend.batch_get_v1(names, slots(1, 2)) == [False] * 4  # not as much memory as pages
    backend.close()


def test_a_new_process_finds_them_in_the_log_and_one_flipped_bit_is_a_miss(hicache: Any, tmp_path: Path) -> None:
    pool, extra = sglang.MHAPool(dim=256), {"store": f"log:{tmp_path}/log", "store_budget": "64MiB"}
    backend, names = attach(hicache, pool, extra=extra), keys(6)
    saved = fill(pool)
    backend.batch_set_v1(names, slots(*range(6)), info([]))
    backend.close()
    piece = bytes(saved[1, 3].view(torch.uint8).numpy()[:64])
    (file,) = [path for path in (tmp_path / "log").rglob("*") if path.is_file() and piece in path.read_bytes()]
    at = file.read_bytes().index(piece) + 10
    with file.open("r+b") as log:
        log.seek(at)
        (byte,) = log.read(1)
        log.seek(at)
        log.write(bytes([byte ^ 1]))
    pool.kv_buffer.zero_()
    again = attach(hicache, pool, extra={**extra, "store": f"log:{tmp_path}/log"})
    assert again.batch_get_v1(names, slots(*range(6))) == [True, True, True, False, True, True]
    assert same(pool.kv_buffer[:, :3], saved[:, :3]) and not pool.kv_buffer[:, 3].any()
    assert again.batch_exists(names) == 3  # the damaged page is gone, and can be saved again
    pool.kv_buffer.copy_(saved)
    assert again.batch_set_v1(names, slots(*range(6)), info([])) == [True] * 6 and again.batch_exists(names) == 6
    again.close()


@pytest.mark.parametrize(
    "other",
    [
        lambda: sglang.MHAPool(dtype=torch.float16), lambda: sglang.MHAPool(layout="page_first"),
        lambda: sglang.MHAPool(heads=4, dim=4),
        lambda: sglang.MHAPool(layers=4, dim=4), lambda: sglang.MHAPool(page_size=8, layers=1),
    ],
    ids=["dtype", "layout", "heads", "layers", "page"],
)  # fmt: skip
def test_pages_of_another_shape_are_never_found(hicache: Any, shared: MemoryStore, other: Callable[[], Any]) -> None:
    backend, extra = attach(hicache, sglang.MHAPool(), extra={"store": "shared:"}), {"store": "shared:"}
    assert backend.batch_set_v1(keys(2), slots(0, 1), info([])) == [True, True]
    assert attach(hicache, sglang.MHAPool(), extra=extra).batch_exists(keys(2)) == 2
    assert attach(hicache, other(), extra=extra).batch_exists(keys(2)) == 0
    for changes in ({"model_name": "other"}, {"tp_rank": 1, "tp_size": 2}, {"pp_rank": 1, "pp_size": 2}):
        assert attach(hicache, sglang.MHAPool(), extra=extra, **changes).batch_exists(keys(2)) == 0
    assert attach(hicache, sglang.MHAPool(), extra={**extra, "identity": "other weights"}).batch_exists(keys(2)) == 0


def test_lengths_are_legal_for_all_pools_at_once(hicache: Any) -> None:
    backend, names = hybrid(hicache), keys(8)
    backend.batch_set_v1(names[:7], slots(*range(7)), info([]))
    backend.batch_set_v2([transfer("indexer", names[:6], *range(6))], info([]))
    backend.batch_set_v2([transfer("swa", [names[page] for page in (1, 2, 3, 4)], 1, 2, 3, 4)], info(names[:1]))
    backend.batch_set_v2([transfer("mamba", [names[page] for page in (1, 2, 5)], 0, 1, 2, size=1)], info(names[:1]))

    def found(*wants: Any) -> Any:
        return backend.batch_exists_v2(names, list(wants), info([]))

    index, window = transfer("indexer", []), transfer("swa", ["", ""], policy=TRAILING)
    state = transfer("mamba", [""], policy=TRAILING)
    assert found().restorable_prefix_pages == [1, 2, 3, 4, 5, 6, 7] and found().kv_hit_pages == 7
    assert found(index).restorable_prefix_pages == [1, 2, 3, 4, 5, 6]
    assert found(window).restorable_prefix_pages == [3, 4, 5]  # a window of two pages ends there
    assert found(state).restorable_prefix_pages == [2, 3, 6]
    joint = found(index, window, state)
    assert joint.restorable_prefix_pages == [3] and joint.kv_hit_pages == 3  # not 5, the least of the longest
    assert joint.extra_pool_hit_pages == {"kv": 7, "indexer": 6, "swa": 5, "mamba": 6}
    nothing = backend.batch_exists_v2(keys(8, "b"), [state], info([]))
    assert nothing.kv_hit_pages == 0 and nothing.restorable_prefix_pages == [] and nothing.extra_pool_hit_pages == {}
    blocks = sglang.PoolTransfer(name="draft", hit_policy=sglang.PoolHitPolicy.BLOCK_GROUPS)
    assert found(blocks).kv_hit_pages == 7 and "draft" not in found(blocks).extra_pool_hit_pages  # it gates nothing


def test_every_pool_has_pages_of_its_own(hicache: Any) -> None:
    backend, names = hybrid(hicache), keys(3)
    pools = backend.registered_pools
    saved = {name: fill(pool, seed) for seed, (name, pool) in enumerate(pools.items())}
    sizes = {"mamba": 1}
    backend.batch_set_v1(names, slots(0, 1, 2), info([]))
    order = [transfer(name, names, 0, 1, 2, size=sizes.get(name, 4)) for name in pools if name != "kv"]
    assert backend.batch_set_v2(order, info([])) == {each.name: [True] * 3 for each in order}
    for pool in pools.values():
        pool.kv_buffer.zero_()
    assert backend.batch_get_v2(order) == {each.name: [True] * 3 for each in order} and backend.batch_get_v1(
        names, slots(0, 1, 2)
    )
    for name, pool in pools.items():
        where = (slice(None), slice(0, 3)) if pool.kv_buffer.ndim == 3 else slice(0, 3)
        assert same(pool.kv_buffer[where].contiguous(), saved[name][where].contiguous()), name
    assert backend.batch_set_v2([transfer("swa", names, 0)], info([])) == {"swa": [False] * 3}


def test_an_anchor_without_bytes_leaves_it_to_the_others(hicache: Any) -> None:
    rows, state = sglang.OneRunPool(), sglang.OneRunPool(size=33)
    pools = {"deepseek_v4_c4": rows, "deepseek_v4_c4_state": state}
    backend, names = attach(hicache, sglang.LogicalPool(), pools, is_mla_model=True), keys(4)
    fill(rows)
    assert backend.batch_set_v1(names, slots(0, 1, 2, 3), info([])) == [True] * 4
    backend.batch_set_v2([transfer("deepseek_v4_c4", names[:3], 0, 1, 2)], info([]))
    backend.batch_set_v2([transfer("deepseek_v4_c4_state", names[1:2], 0)], info(names[:1]))
    wants = [transfer("deepseek_v4_c4", []), transfer("deepseek_v4_c4_state", [""], policy=TRAILING)]
    found = backend.batch_exists_v2(names, wants, info([]))
    assert found.restorable_prefix_pages == [2] and backend.batch_get_v1(names[:2], slots(4, 5)) == [True, True]


def test_what_ranks_hold_alike_is_saved_by_one_and_read_by_all(hicache: Any, shared: MemoryStore) -> None:
    def rank(number: int) -> Any:
        pools = {"indexer": sglang.OneRunPool(), "mamba": sglang.MambaPool()}
        settings: dict[str, Any] = {"tp_rank": number, "tp_size": 2, "is_mla_model": True, "extra": {"store": "shared:"}}
        return attach(hicache, sglang.OneRunPool(), pools, **settings)

    first, second, names = rank(0), rank(1), keys(2)
    saved = fill(first.mem_pool_host)
    first.batch_set_v1(names, slots(0, 1), info([]))
    first.batch_set_v2([transfer("indexer", names, 0, 1), transfer("mamba", names[1:], 0, size=1)], info([]))
    assert second.batch_get_v1(names, slots(0, 1)) == [True, True] and same(second.mem_pool_host.kv_buffer[:2], saved[:2])
    assert second.batch_exists_v2(names, [transfer("indexer", [])], info([])).kv_hit_pages == 2
    state = transfer("mamba", [""], policy=TRAILING)  # differs by rank: each saves its own
    assert second.batch_exists_v2(names, [state], info([])).kv_hit_pages == 0
    second.batch_set_v2([transfer("mamba", names[1:], 0, size=1)], info(names[:1]))
    assert second.batch_exists_v2(names, [state], info([])).restorable_prefix_pages == [2]


def test_ranks_that_hold_the_same_share_a_log(hicache: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tp_size": 2, "is_mla_model": True}
    settings["extra"] = {"store": f"shared-log:{tmp_path}/log", "store_budget": "64MiB"}
    writer, reader = (attach(hicache, sglang.OneRunPool(size=5000), tp_rank=rank, **settings) for rank in range(2))
    saved = fill(writer.mem_pool_host)
    assert writer.batch_set_v1(keys(3), slots(0, 1, 2), info([])) == [True] * 3 and reader.batch_exists(keys(3)) == 3
    assert reader.batch_get_v1(keys(3), slots(0, 1, 2)) == [True] * 3 and same(reader.mem_pool_host.kv_buffer[:3], saved[:3])
    reader.close()
    writer.close()


def test_pages_cut_by_heads_are_shared_between_two_and_four_ranks(hicache: Any, shared: MemoryStore) -> None:
    def rank(number: int, size: int) -> Any:
        pool = sglang.MHAPool(heads=8 // size, layout="page_head")
        settings: dict[str, Any] = {"tp_rank": number, "tp_size": size, "tp_lcm_size": 4, "should_split_heads": size < 4}
        return attach(hicache, pool, extra={"store": "shared:"}, **settings)

    names, halves = keys(2), [rank(0, 2), rank(1, 2)]
    saved = [fill(half.mem_pool_host, seed) for seed, half in enumerate(halves)]
    assert halves[0].batch_set_v1(names, slots(0, 1), info([])) == [True, True]
    assert [rank(number, 4).batch_exists(names) for number in range(4)] == [2, 2, 0, 0]
    halves[1].batch_set_v1(names, slots(0, 1), info([]))
    for number in range(4):
        quarter = rank(number, 4)
        assert quarter.batch_get_v1(names, slots(0, 1)) == [True, True]
        width = saved[0].shape[2] // 2
        wanted = saved[number // 2][:, :2, number % 2 * width :][:, :, :width]
        assert same(quarter.mem_pool_host.kv_buffer[:, :2].contiguous(), wanted.contiguous()), number


def test_replicas_share_and_other_shards_do_not(hicache: Any, shared: MemoryStore) -> None:
    extra = {"store": "shared:"}
    attach(hicache, sglang.MHAPool(), extra=extra).batch_set_v1(keys(1), slots(0), info([]))
    assert attach(hicache, sglang.MHAPool(), extra=extra, dp_rank=3).batch_exists(keys(1)) == 1


def test_a_log_is_one_directory_for_each_rank_or_refused(hicache: Any, tmp_path: Path) -> None:
    extra = {"store": f"log:{tmp_path}/log", "store_budget": "64MiB"}
    ranks = [attach(hicache, sglang.MHAPool(), extra=extra, tp_rank=number, tp_size=2) for number in range(2)]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["tp0of2", "tp1of2"]
    with pytest.raises(StoreError, match="shared-log:"):
        hicache(config(extra=extra, tp_rank=0, tp_size=2), {})  # the same one once more
    with pytest.raises(ConfigError, match="shared-log:"):
        hicache(config(extra=extra, tp_rank=0, tp_size=2, is_mla_model=True), {})
    for rank in ranks:
        rank.close()


def test_replicas_on_one_machine_get_directories_of_their_own_whoever_is_first(hicache: Any, tmp_path: Path) -> None:
    extra = {"store": f"log:{tmp_path}/log", "store_budget": "64MiB"}
    replicas = [attach(hicache, sglang.MHAPool(), extra=extra, dp_rank=number) for number in (1, 0)]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["dp1", "rank0"]
    for replica in replicas:
        replica.close()


def test_a_store_that_outlives_the_process_must_know_the_weights(hicache: Any, tmp_path: Path) -> None:
    extra = {"store": f"log:{tmp_path}/log", "store_budget": "64MiB", "identity": None}
    with pytest.raises(ConfigError, match="identity"):
        hicache(config(extra=extra), {})


def test_weights_are_told_apart_by_their_files_adapters_and_settings(tmp_path: Path) -> None:
    from stepwell.connectors.sglang.settings import weights_of

    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    facts: dict[str, Any] = {"model_path": str(model), "lora_paths": [f"a={adapter}"], "dtype": "float16"}
    first = weights_of(SimpleNamespace(**facts))
    assert first is not None and first == weights_of(SimpleNamespace(**facts))
    assert first != weights_of(SimpleNamespace(**{**facts, "dtype": "float32"}))
    assert weights_of(SimpleNamespace(**{**facts, "lora_paths": {"a": str(adapter)}})) == first
    (adapter / "model.safetensors").write_bytes(b"trained")
    second = weights_of(SimpleNamespace(**facts))
    (model / "model.safetensors").write_bytes(b"others!")
    assert len({first, second, weights_of(SimpleNamespace(**facts))}) == 3
    assert weights_of(SimpleNamespace(model_path="of/a-hub")) is None and weights_of(None) is None


def test_a_name_for_the_weights_stands_for_their_files_and_for_nothing_else(tmp_path: Path) -> None:
    from stepwell.connectors.sglang.settings import weights_of

    scales = tmp_path / "scales.json"
    scales.write_text("1.0")
    hub: dict[str, Any] = {"model_path": "of/a-hub", "quantization_param_path": str(scales)}
    named = weights_of(SimpleNamespace(**hub), "revision 1")
    assert named is not None and named == weights_of(SimpleNamespace(**hub), "revision 1")
    changes: list[dict[str, Any]] = [{"quantization": "fp8"}, {"context_length": 8}, {"lora_paths": ["a=b"]}]
    others = [weights_of(SimpleNamespace(**hub, **change), "revision 1") for change in changes]
    scales.write_text("2.0")
    others.append(weights_of(SimpleNamespace(**hub), "revision 1"))
    assert len({named, weights_of(SimpleNamespace(**hub), "revision 2"), *others}) == 6


class Hidden(sglang.MHAPool):
    """A pool that says where its pages lie, and does not show that memory: as one of two that share it."""

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return []


def test_a_pool_whose_memory_is_not_found_is_refused_and_not_taken_for_one_without_bytes(hicache: Any) -> None:
    with pytest.raises(ConfigError, match="does not expose the memory"):
        attach(hicache, sglang.MHAPool(), {"swa": Hidden()})


def test_clearing_forgets_this_model_alone(hicache: Any, shared: MemoryStore) -> None:
    extra = {"store": "shared:"}
    one, other = attach(hicache, sglang.MHAPool(), extra=extra), attach(hicache, sglang.MHAPool(), extra=extra, model_name="b")
    for backend in (one, other):
        backend.batch_set_v1(keys(3), slots(0, 1, 2), info([]))
    one.clear()
    assert one.batch_exists(keys(3)) == 0 and other.batch_exists(keys(3)) == 3


def test_eviction_takes_a_prompt_from_its_end(hicache: Any, tmp_path: Path) -> None:
    pool = sglang.MHAPool(pages=100, dim=1024)
    extra = {"store": f"log:{tmp_path}", "store_budget": "16MiB", "store_options": {"segment": "1MiB"}}
    backend = attach(hicache, pool, extra=extra)
    fill(pool)
    for prompt in "abcd":
        names = keys(100, prompt)
        for start in range(0, 100, 50):
            backend.batch_set_v1(names[start : start + 50], slots(*range(start, start + 50)), info(names[:start]))
    kept = {prompt: [backend.exists(name) for name in keys(100, prompt)] for prompt in "abcd"}
    assert all(there == sorted(there, reverse=True) for there in kept.values()) and 0 < sum(map(sum, kept.values())) < 400
    backend.close()


def test_figures_are_free_and_only_kept_when_they_are_wanted(hicache: Any) -> None:
    backend = attach(hicache, sglang.MHAPool(), enable_storage_metrics=True)
    assert backend.get_stats() is None
    backend.batch_set_v1(keys(2), slots(0, 1), info([]))
    backend.batch_get_v1(keys(2), slots(0, 1))
    figures = backend.get_stats()
    assert figures.backup_pgs == [2] and figures.prefetch_pgs == [2] and figures.prefetch_bandwidth[0] > 0
    assert backend.get_stats() is None
    quiet = attach(hicache, sglang.MHAPool())
    quiet.batch_set_v1(keys(1), slots(0), info([]))
    assert quiet.get_stats() is None


def test_pages_whose_order_is_not_told_are_warned_about_once(hicache: Any, caplog: pytest.LogCaptureFixture) -> None:
    backend = attach(hicache, sglang.MHAPool())
    with caplog.at_level(logging.WARNING):
        for page in range(2):
            backend.batch_set_v1(keys(2)[page:], slots(*range(page, 2)))
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"interface_v1": 0}, '"interface_v1": 1'), ({"store": None}, "which store"), ({"store": "/var/cache"}, "which store"),
        ({"store": "nothing:"}, "no store is called"), ({"sotre": "log:x"}, "did you mean 'store'"), ({"speed": 3}, "known are"),
        ({"deadline_s": 0}, "positive number"), ({"readers": "two"}, "positive number"),
        ({"store_options": 3}, "object of options"), ({"readers": 0.5}, "whole number"),
        ({"deadline_s": float("inf")}, "positive"), ({"store_budget": "1GiB", "store_options": {"budget": "2GiB"}}, "once"),
        ({"store_key_file": "/nowhere/key"}, "new-key"), ({"identity": 3}, "be a text"), ({"store_budget": "10 cows"}, "cows"),
    ],
)  # fmt: skip
def test_mistakes_in_settings_are_refused_with_the_fix(hicache: Any, extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        hicache(config(extra=extra), {})


def test_a_layout_whose_pages_are_scattered_is_refused_with_the_fix(hicache: Any) -> None:
    with pytest.raises(ConfigError, match="--hicache-mem-layout page_first"):
        attach(hicache, sglang.MHAPool(), {"mamba": sglang.LayerFirstState()})


def test_a_version_of_sglang_that_lacks_something_is_told_which_one_is_needed(
    hicache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell.connectors import sglang as connectors

    del sys.modules["stepwell.connectors.sglang.hicache"]
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", ModuleType("older"))
    with pytest.raises(ImportError, match=r"HiCacheStorage.*written for SGLang 0\.5\.23"):
        _ = connectors.StepwellHiCache


def test_nothing_is_imported_of_sglang_before_the_backend_is_named() -> None:
    import stepwell.connectors.sglang as connector

    assert "stepwell.connectors.sglang.hicache" not in sys.modules
    with pytest.raises(AttributeError):
        _ = connector.nonsense
