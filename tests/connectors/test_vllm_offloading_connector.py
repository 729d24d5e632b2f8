"""vLLM's offloading connector with ours around it: tiers learn whose bytes they keep, or refuse to start. Needs no vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_offload_stand_in as offload
import vllm_stand_in as vllm
from toy_runs import Lora

from stepwell import ConfigError

KEY = bytes(36)
Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """Makes connectors of a toy model; what differs is given as a path of names and a value."""
    if vllm.is_real_installed():
        pytest.skip("vLLM is installed here: tests/vllm runs the connector under it")
    for name in offload.IMPORTED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    offload.install()
    from stepwell.connectors.vllm.secondary_tier import StepwellOffloadingConnector

    made = []

    def connector(extra: dict[str, Any] | None = None, **different: Any) -> Any:
        tier = {"type": "StepwellTier", "module_path": "stepwell.connectors.vllm", "store": f"log:{tmp_path / 'log'}"}
        settings = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier | {"store_budget": "64MiB"}]}
        config = engine(settings if extra is None else extra)
        cache = SimpleNamespace(
            kv_cache_groups=[vllm.KVCacheGroupSpec(["full.0"], vllm.FullAttentionSpec(4, 1, 64))],
            kv_cache_tensors=[SimpleNamespace(layers=["full.0"])], kv_cache_layout="LBHNC", kv_tp_replicas=1,
        )  # fmt: skip
        for path, value in different.items():
            of, *names, last = [{"config": config, "cache": cache}[path.split("__")[0]], *path.split("__")[1:]]
            for name in names:
                of = getattr(of, name)
            setattr(of, last, value)
        made.append(StepwellOffloadingConnector(config, vllm.KVConnectorRole.SCHEDULER, cache))
        return made[-1]

    yield connector
    for each in made:
        close(each)
    for name in offload.IMPORTED:
        sys.modules.pop(name, None)


def engine(extra: dict[str, Any]) -> Any:
    config = vllm.config(extra=extra)
    config.cache_config.prefix_caching_hash_algo = "sha256"
    config.use_v2_model_runner = False
    return config


def close(connector: Any) -> None:
    for tier in connector.scheduler.manager.secondary_tiers:
        tier.shutdown()


def arrive(connector: Any, name: str, lora: Any = None) -> Any:
    connector.on_new_request(SimpleNamespace(request_id=name, lora_request=lora))
    return offload.ReqContext(name)


def store(connector: Any, context: Any) -> bool:
    (tier,) = connector.scheduler.manager.secondary_tiers
    tier.submit_store(offload.TransferJob(1, [KEY], [0], False, context))
    tier._store._jobs.drain(60)
    (result,) = tier.get_finished_jobs()
    return bool(result.success)


def load(connector: Any, context: Any) -> bool:
    (tier,) = connector.scheduler.manager.secondary_tiers
    tier.submit_load(offload.TransferJob(2, [KEY], [0], True, context))
    tier._store._jobs.drain(60)
    (result,) = tier.get_finished_jobs()
    return bool(result.success)


OTHERS = {
    "config__model_config__quantization": "fp8",
    "config__model_config__dtype": "float16",
    "config__model_config__hf_config": SimpleNamespace(to_json_string=lambda: '{"rope_theta": 1}', _commit_hash="toy weights"),
    "config__model_config__max_model_len": 2000,
    "config__model_config__original_max_model_len": -1,
    "config__model_config__quantization_config": {"linear": "mxfp8"},
    "config__model_config__model_class_overrides": {"ToyForCausalLM": "other.module:Toy"},
    "config__model_config__multimodal_config": SimpleNamespace(
        mm_processor_kwargs=None, media_io_kwargs={}, video_pruning_rate=0.5, video_pruning_method="evs"
    ),
    "config__cache_config__cache_dtype": "fp8",
    "config__cache_config__prefix_caching_hash_algo": "sha256_cbor",
    "config__parallel_config__tensor_parallel_size": 2,
    "config__use_v2_model_runner": True,
    "cache__kv_cache_layout": "LBNHC",
    "cache__kv_cache_groups": [vllm.KVCacheGroupSpec(["full.0"], vllm.FullAttentionSpec(4, 2, 32))],
    "cache__kv_cache_tensors": [SimpleNamespace(layers=["full.1"])],
    "cache__kv_tp_replicas": 2,
}


def test_what_one_engine_stored_the_next_one_of_the_same_kind_finds(make: Make) -> None:
    first = make()
    assert store(first, arrive(first, "a"))
    close(first)
    second = make()
    assert load(second, arrive(second, "a"))


@pytest.mark.parametrize("other", OTHERS)
def test_an_engine_that_would_write_other_bytes_finds_nothing(make: Make, other: str) -> None:
    first = make()
    assert store(first, arrive(first, "a"))
    close(first)
    second = make(**{other: OTHERS[other]})
    assert not load(second, arrive(second, "a"))


def test_adapters_are_known_by_their_weights(make: Make, tmp_path: Path) -> None:
    weights = tmp_path / "adapter" / "adapter.safetensors"
    weights.parent.mkdir()
    connector, lora = make(), Lora(1, str(weights.parent))
    assert not store(connector, arrive(connector, "unreadable", lora))
    weights.write_bytes(b"one")
    assert store(connector, arrive(connector, "a", lora)) and load(connector, arrive(connector, "b", lora))
    assert not load(connector, arrive(connector, "plain"))
    close(connector)
    weights.write_bytes(b"two")
    second = make()
    assert not load(second, arrive(second, "a", lora)), "the same name and place, other weights"


def test_a_reset_is_taken_for_a_change_of_weights(make: Make) -> None:
    connector = make()
    assert store(connector, arrive(connector, "a")) and load(connector, arrive(connector, "b"))
    assert connector.reset_cache() is True
    assert not load(connector, arrive(connector, "c"))


def test_settings_are_not_changed(make: Make, tmp_path: Path) -> None:
    """They may serve for the next engine."""
    tier = {"type": "StepwellTier", "store": f"log:{tmp_path / 'log'}", "store_budget": "64MiB"}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    make(extra)
    assert "engine" not in tier and extra["secondary_tiers"] == [tier]


@pytest.mark.parametrize(
    ("extra", "different", "says"),
    [
        ({"cpu_bytes_to_use": 1}, {}, '"spec_name": "TieringOffloadingSpec"'),
        ({"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}, {}, '"type": "StepwellTier"'),
        (None, {"config__cache_config__prefix_caching_hash_algo": "xxhash"}, "--prefix-caching-hash-algo sha256"),
        (None, {"config__speculative_config": object()}, "speculative decoding"),
        (None, {"config__kv_transfer_config__kv_role": "kv_producer"}, 'set it to "kv_both"'),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(make: Make, extra: Any, different: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(extra, **different)
