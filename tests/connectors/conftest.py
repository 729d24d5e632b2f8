"""Toy engines over the connector for vLLM, without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_stand_in
from toy_runs import Make
from toy_vllm import LateCopies, ToyEngine


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes toy engines over the connector for vLLM, and closes them."""
    if vllm_stand_in.is_real_installed():
        pytest.skip("vLLM is installed here: tests/vllm runs the connector under it")
    for name in vllm_stand_in.IMPORTED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    vllm_stand_in.install()
    from stepwell.connectors.vllm import worker_side
    from stepwell.connectors.vllm.connector import StepwellConnector

    monkeypatch.setattr(worker_side, "ThreadCopyExecutor", LateCopies)
    engines: list[ToyEngine] = []

    def engine(model: str = "full", **more: Any) -> ToyEngine:
        engines.append(ToyEngine(StepwellConnector, model, **more))
        return engines[-1]

    yield engine
    for each in engines:
        each.close()
    for name in vllm_stand_in.IMPORTED:
        sys.modules.pop(name, None)
