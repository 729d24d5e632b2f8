"""Checkpoints in eight bits between a GPU and pinned memory: the same bytes as between memories of a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from not_run import NO_CUDA
from stepwell import CacheConfig, Kind, ModelSpec, Point, Prefix, StateSpec, Tier, Window
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for

torch = pytest.importorskip("torch")

from stepwell.transfer.narrow_copies import NarrowCopyEngine  # noqa: E402
from stepwell.transfer.narrow_rows import NotFinite  # noqa: E402
from stepwell.transfer.torch_copy_engine import TorchCopyEngine  # noqa: E402
from stepwell.transfer.torch_memory import TorchMemory  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]

EXACT = ModelSpec(
    name="hybrid",
    page_tokens=16,
    states=(
        StateSpec(name="kv", shape=Prefix(), layers=2, row_bytes=512, dtype="bf16"),
        StateSpec(name="swa", shape=Window(tokens=16), layers=3, row_bytes=2 * 192, dtype="bf16"),
        StateSpec(name="ssm", shape=Point(), layers=6, row_bytes=4 * 128 * 128, dtype="fp32"),
    ),
)
SIZES = CacheConfig(device_bytes=16 << 20, host_bytes=16 << 20)
DTYPES = {Kind.WINDOW: torch.bfloat16, Kind.POINT: torch.float32}


def lives(dtype: str, device: str) -> tuple[NarrowCopyEngine, dict[Tier, TorchMemory]]:
    spec = EXACT.with_checkpoint_dtype(dtype)
    layouts = layouts_for(spec, SIZES)
    memories = {tier: TorchMemory(spec, layout, device if tier is Tier.DEVICE else "cpu") for tier, layout in layouts.items()}
    return NarrowCopyEngine(TorchCopyEngine(memories, layerwise=spec), spec, memories), memories


def plan(kind: Kind, source: Tier, read: list[int], target: Tier, write: list[int]) -> Plan:
    spans = [Span(tier=tier, kind=kind, ids=np.array(ids, np.int32)) for tier, ids in ((source, read), (target, write))]
    purpose = Purpose.SAVE if target is Tier.HOST else Purpose.LOAD
    return Plan(job=JobId(1), purpose=purpose, copies=(Copy(source=spans[0], target=spans[1]),))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.POINT])
def test_the_same_bytes_as_on_a_cpu(dtype: str, kind: Kind) -> None:
    found = []
    for device in ("cpu", "cuda"):
        engine, memories = lives(dtype, device)
        pages = memories[Tier.DEVICE].rows(kind)
        torch.manual_seed(3)
        numbers = torch.randn(3, pages.shape[1] // DTYPES[kind].itemsize).to(DTYPES[kind])
        pages[[1, 2, 5]] = numbers.view(torch.uint8).to(pages.device)
        engine.begin(plan(kind, Tier.DEVICE, [1, 2, 5], Tier.HOST, [4, 3, 6]))()
        engine.begin(plan(kind, Tier.HOST, [4, 3, 6], Tier.DEVICE, [7, 8, 9]))()
        found.append((memories[Tier.HOST].rows(kind)[[4, 3, 6]].clone(), pages[[7, 8, 9]].cpu()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_state_that_is_not_finite_is_refused() -> None:
    engine, memories = lives("int8", "cuda")
    pages = memories[Tier.DEVICE].rows(Kind.POINT)
    pages[1].view(torch.float32)[77] = float("nan")
    with pytest.raises(NotFinite):
        engine.begin(plan(Kind.POINT, Tier.DEVICE, [1], Tier.HOST, [1]))()
