"""Whole models with Triton's kernels and rows in eight bits, compared with plain torch: interpreted, unless there is a GPU."""

from __future__ import annotations

import pytest
import torch

from engine.families import reference
from engine.kernels.chosen import use_kernels
from engine.side_by_side import Held, Memory
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models import registry
from stepwell.engine.models.base import Decoder
from stepwell.engine.ops.kernels import Kernels

pytest.importorskip("triton")
pytest.importorskip("transformers")
from stepwell.engine.ops.on_triton.rows import write_rows
from stepwell.engine.ops.on_triton.selection import TritonSelect
from stepwell.engine.ops.on_triton.shared import TritonShared

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAST = Kernels(attend_shared=TritonShared(TritonSelect()), select=TritonSelect(), write_rows=write_rows)


def built(family: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    use_kernels(monkeypatch, lambda: kernels)
    made = reference(family)
    tensors = HeldTensors(dict(made.state_dict()))
    return registry.build_model(made.config.to_dict(), tensors, page_tokens=16, kv_dtype="fp8", device=DEVICE)


def played(model: Decoder) -> torch.Tensor:
    """Two prompts and a few steps, all logits."""
    memory = Memory(model.spec, device=DEVICE)
    one, other, made = Held(memory, 64), Held(memory, 64), []
    for first, second in (([5, 7] * 15, [3] * 5), ([1], [2] * 8), ([4], [6]), ([9], [8]), ([11], [12]), ([1], [2])):
        segments = sorted((one.segment(first), other.segment(second)), key=lambda each: len(each.tokens) > 1)
        made.append(model.forward(memory.batch(segments, dtype=model.dtype)))
    return torch.cat(made)


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_a_model_answers_as_with_plain_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = (played(built(family, kernels, monkeypatch)) for kernels in (Kernels(), FAST))
    assert (fast - plain).abs().max() < 1e-3 * plain.std()
