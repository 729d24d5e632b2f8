"""The stand-in that `make test` uses says of vLLM what is so: names, parameters and fields."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "connectors"))
import vllm_stand_in as stand_in

MEMBERS = [(module, member) for module, members in stand_in.MODULES.items() for member in members if member != "__version__"]


@pytest.mark.parametrize(("module", "member"), MEMBERS)
def test_the_stand_in_says_what_vllm_has(module: str, member: str) -> None:
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


def test_the_connector_overrides_only_what_vllm_calls() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from stepwell.connectors.vllm import StepwellConnector

    for name, method in vars(StepwellConnector).items():
        if isinstance(method, types.FunctionType | classmethod) and not name.startswith("_"):
            base, ours = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name), getattr(StepwellConnector, name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(base).parameters), name
