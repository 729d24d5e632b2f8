"""The stand-in that `make test` uses says of vLLM what is so: names, parameters and fields."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from unittest.mock import create_autospec

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "connectors"))
import vllm_offload_stand_in
import vllm_stand_in

from stepwell.transfer.first_calls import make_first_calls

MEMBERS = [
    (stand_in, module, member)
    for stand_in in (vllm_stand_in, vllm_offload_stand_in)
    for module, members in stand_in.MODULES.items()
    for member in members
    if member != "__version__"
]

OTHERS = ("handle_preemptions", "finish_forward")  # hooks of one runner that the connector leaves as they are
OURS = ("arrived", "renew")  # of the tier: called by our own connector around it
LATER = ("supports_sleep_mode",)  # which vLLM calls from 0.33 on


@pytest.mark.parametrize(("stand_in", "module", "member"), MEMBERS)
def test_the_stand_in_says_what_vllm_has(stand_in: types.ModuleType, module: str, member: str) -> None:
    real, ours = getattr(import_module(module), member), getattr(stand_in, member)
    if not callable(ours):
        assert real == ours
        return
    if not inspect.isclass(ours):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(real).parameters)
        return
    for name, method in vars(ours).items():
        if isinstance(method, classmethod):
            shown = inspect.signature(getattr(ours, name)).parameters
            assert list(shown) == list(inspect.signature(getattr(real, name)).parameters), f"{member}.{name}"
        elif inspect.isfunction(method) and (not name.startswith("_") or name == "__init__"):
            if is_dataclass(ours) and name == "__init__":
                continue
            theirs = inspect.signature(getattr(real, name)).parameters
            assert list(inspect.signature(method).parameters) == list(theirs), f"{member}.{name}"
        elif isinstance(method, property):
            assert hasattr(real, name), f"{member}.{name}"
    if is_dataclass(ours):
        theirs = getattr(real, "__struct_fields__", None) or [each.name for each in fields(real)]
        assert {each.name for each in fields(ours)} <= set(theirs), member


def test_requests_have_what_is_asked_of_them() -> None:
    from vllm.v1.request import Request

    source = inspect.getsource(Request)
    for name in (
        "mm_features", "prompt_embeds", "pooling_params", "lora_request", "cache_salt", "skip_reading_prefix_cache",
        "resumable", "num_computed_tokens", "num_tokens", "all_token_ids", "request_id", "block_hashes",
        "kv_transfer_params",
    ):  # fmt: skip
        assert f"self.{name}" in source or f"def {name}" in source, name


def test_the_configuration_has_what_tells_bytes_apart() -> None:
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig

    known = {each.name for each in fields(ModelConfig)}
    assert {"max_model_len", "quantization", "quantization_config", "model_class_overrides", "dtype", "seed"} <= known
    assert "self.original_max_model_len = self.max_model_len" in inspect.getsource(ModelConfig)
    assert "override_generation_config" in known and "additional_config" in {each.name for each in fields(VllmConfig)}
    assert "kv_role" in {each.name for each in fields(KVTransferConfig)}


def test_media_are_described_as_the_connector_reads_them() -> None:
    from vllm.config.multimodal import MultiModalConfig
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    from stepwell.connectors.vllm.requests import RequestTokens, media_refusal

    needed = {"mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"}
    assert needed <= {each.name for each in fields(MultiModalConfig)}
    seen = []
    for algorithm in ("blake3", "sha256", "sha512"):
        name = MultiModalHasher.hash_kwargs(algorithm, image=b"a cat")
        image = MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=20, length=4))
        request = types.SimpleNamespace(mm_features=[image], all_token_ids=[7] * 64)
        assert media_refusal(request, page_tokens=16, vocab_size=100_000) is None
        seen.append(RequestTokens(request, page_tokens=16, vocab_size=100_000)(0))
    assert all(tokens[:16] == [7] * 16 == tokens[32:48] for tokens in seen) and len({*map(tuple, seen)}) == 3


def test_the_secondary_tier_overrides_only_what_vllm_calls() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from stepwell.connectors.vllm import StepwellOffloadingConnector, StepwellTier

    assert not StepwellTier.__abstractmethods__
    for ours, base in ((StepwellTier, SecondaryTierManager), (StepwellOffloadingConnector, OffloadingConnector)):
        for name, method in vars(ours).items():
            if isinstance(method, types.FunctionType | classmethod) and not name.startswith("_") and name not in OURS:
                theirs = inspect.signature(getattr(base, name)).parameters
                assert list(inspect.signature(getattr(ours, name)).parameters) == list(theirs), name


def test_the_connector_overrides_only_what_vllm_calls() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from stepwell.connectors.vllm import StepwellConnector

    for name, method in vars(StepwellConnector).items():
        if name in LATER and not hasattr(KVConnectorBase_V1, name):
            continue
        if isinstance(method, types.FunctionType | classmethod) and not name.startswith("_"):
            base, ours = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name), getattr(StepwellConnector, name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(base).parameters), name


def test_multi_connector_makes_its_connectors_where_ours_refuses_it() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from stepwell.connectors.vllm.connector import MULTI

    assert MultiConnector.__init__.__qualname__ == MULTI
    assert "connector_cls(" in inspect.getsource(MultiConnector.__init__)


def test_a_pause_resets_the_connector_through_the_function_that_tells_it_from_an_explicit_reset() -> None:
    from vllm.v1.engine.core import EngineCore

    from stepwell.connectors.vllm import connector

    resets = getattr(EngineCore, connector.PAUSE)
    assert resets.__code__.co_name == connector.PAUSE and resets.__globals__["__name__"].startswith("vllm.")
    source = inspect.getsource(EngineCore)
    assert source.count(f"self.{connector.PAUSE}(") >= 2 and "reset_connector=reset_connector" in inspect.getsource(resets)
    assert connector.PAUSE not in inspect.getsource(EngineCore.reset_prefix_cache)


def test_both_model_runners_call_a_connector_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one does not run on CPUs: that it asks the same of the connector, in the same order, is all that is shown."""
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
    from vllm.v1.worker import kv_connector_model_runner_mixin as first
    from vllm.v1.worker.gpu import kv_connector as second

    connector = create_autospec(KVConnectorBase, instance=True)
    step = types.SimpleNamespace(kv_connector_metadata=object(), has_sync_kv_loads=False, finished_req_ids=set())
    for module in (first, second):
        monkeypatch.setattr(module, "get_kv_transfer_group", lambda: connector)
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
    monkeypatch.setattr(second, "is_forward_context_available", lambda: True)

    def called() -> list[str]:
        names = [call[0] for call in connector.method_calls]
        connector.reset_mock()
        return [name for name in names if name not in OTHERS]

    with first.KVConnectorModelRunnerMixin._get_kv_connector_output(step):
        pass
    expected = called()
    runner = second.ActiveKVConnector(types.SimpleNamespace(), {})
    connector.reset_mock()
    runner.pre_forward(step)
    runner.finish_forward()
    runner.post_forward(set())
    assert called() == expected and expected.index("start_load_kv") < expected.index("wait_for_save")


def test_every_process_makes_the_first_calls_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker loads plugins first of all: `WorkerWrapperBase.init_worker`."""
    from vllm import plugins
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = plugins.load_plugins_by_group(plugins.DEFAULT_PLUGINS_GROUP)
    assert found["stepwell"] is make_first_calls
    assert "load_general_plugins()" in inspect.getsource(WorkerWrapperBase.init_worker)
