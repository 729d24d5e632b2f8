"""What the connector for vLLM is started with: what cannot work is refused, and the message says what would. Needs no vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy_vllm
import vllm_stand_in
from toy_runs import Make, computed_by, text

from stepwell import ConfigError
from stepwell.connectors.vllm.engine_config import check_engine, model_identity
from stepwell.connectors.vllm.settings import read_settings
from stepwell.store.key_file import write_store_key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"host_memory": None}, "host_memory must be a size"),
        ({"host_memory": "lots"}, "host_memory: "),
        ({"host_memory": "1KiB"}, "must be at least"),
        ({"host_mem": "1GiB"}, "did you mean 'host_memory'"),
        ({"host_memory": 0}, "host_memory must be more than 0"),
        ({"store_budget": "1GiB"}, 'need a "store"'),
        ({"store": None, "store_budget": "1GiB"}, 'need a "store"'),
        ({"store_key_file": "/etc/key"}, 'need a "store"'),
        ({"store": "lgo:/var/cache"}, "did you mean 'log'"),
        ({"store": "/var/cache/stepwell"}, "log:/var/cache/stepwell"),
        ({"store": "memory:", "store_budget": "0"}, "store_budget must be more than 0"),
        ({"store": "memory:", "store_budget": "1GiB", "store_options": {"budget": "2GiB"}}, "once"),
        ({"prefetch_timeout_s": -1}, "prefetch_timeout_s must be 0 or more"),
        ({"prefetch_timeout_s": float("nan")}, "prefetch_timeout_s must be 0 or more"),
        ({"audit": "false"}, "without quotes"),
        ({"prefetch": "always"}, "best_effort, wait_complete, timeout"),
        ({"checkpoint_interval_tokens": "8k"}, "whole number of tokens"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(make: Make, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**change)


def test_the_default_failure_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match='set it to "recompute"'):
        read_settings({"host_memory": "1GiB"}, failure_policy="fail")
    with pytest.raises(ConfigError, match="for example"):
        read_settings({}, failure_policy="recompute")


def test_groups_that_could_not_be_restored_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    group, spec = vllm_stand_in.KVCacheGroupSpec, vllm_stand_in
    for bad, says in [
        (group(["x"], spec.MLAAttentionSpec(4, 1, 16)), "run this model on a GPU"),
        (group(["x"], spec.MambaSpec(4, ((64,),), mamba_cache_mode="none")), "--enable-prefix-caching"),
        (group(["x"], spec.FullAttentionSpec(4, 1, 16, attention_chunk_size=8)), "in chunks"),
        (group(["x"], type("OtherSpec", (spec.FullAttentionSpec,), {})(4, 1, 16)), "OtherSpec is not supported"),
        (group(["x"], spec.FullAttentionSpec(4, 1, 16), is_eagle_group=True), "draft model"),
    ]:
        monkeypatch.setitem(toy_vllm.MODELS, "bad", [bad])
        with pytest.raises(ConfigError, match=says):
            make("bad")


def test_a_version_of_vllm_that_lacks_something_is_told_which_is_needed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.connectors import vllm

    del sys.modules["stepwell.connectors.vllm.connector"]
    monkeypatch.delattr(sys.modules["vllm.v1.metrics.cache_hit_source"], "CacheHitSource")
    with pytest.raises(ImportError, match=r"CacheHitSource.*written for vLLM 0\.32"):
        _ = vllm.StepwellConnector


def test_inside_multi_connector_it_is_refused(make: Make) -> None:
    connector = type(make().connector)

    class MultiConnector:
        def __init__(self) -> None:
            connector(SimpleNamespace(kv_transfer_config=None), None, None)

    with pytest.raises(ConfigError, match=r"does not run inside MultiConnector.*make it the only kv_connector"):
        MultiConnector()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_in_which_vllm_would_not_keep_its_writes_and_our_loads_apart_is_refused(role: str) -> None:
    with pytest.raises(ConfigError, match='set it to "kv_both"'):
        check_engine(vllm_stand_in.config(extra={}, role=role))


def test_engines_built_for_other_lengths_are_others_and_what_fits_into_memory_changes_nothing() -> None:
    """LongRoPE chooses its rotations by the longest prompt, so keys of one length mean nothing to the other."""

    def identity(length: int, given: int | None) -> str:
        config = vllm_stand_in.config(extra={})
        config.model_config.max_model_len, config.model_config.original_max_model_len = length, given
        return model_identity(config, None, version="0.32.0", device_type="cpu")

    assert identity(4096, 4096) != identity(131072, 131072)
    assert identity(131072, None) == identity(131072, 131072)
    assert identity(50_000, -1) == identity(40_000, -1) != identity(40_000, 40_000)


def test_engines_told_to_compute_otherwise_are_others_and_how_tokens_are_chosen_changes_nothing() -> None:
    def identity(generation: dict[str, object], more: dict[str, object]) -> str:
        config = vllm_stand_in.config(extra={})
        config.model_config.override_generation_config, config.additional_config = generation, more
        return model_identity(config, None, version="0.32.0", device_type="cpu")

    plain = identity({}, {})
    assert identity({"temperature": 0.1}, {}) == plain
    assert identity({"attn_temperature_tuning": False}, {}) != plain != identity({}, {"plugin": 1})


def test_with_a_store_key_only_what_was_written_with_it_is_used(make: Make, tmp_path: Path) -> None:
    keys = [str(tmp_path / name) for name in ("one", "other")]
    for key in keys:
        write_store_key(key)
    store = {"store": f"log:{tmp_path / 'log'}", "store_budget": "64MiB"}
    took = []
    for key in (keys[0], keys[0], keys[1]):
        engine = make(**store, store_key_file=key)
        took.append(computed_by(engine, text(1, 45)))
        engine.close()
    assert took == [49, 5, 49]
