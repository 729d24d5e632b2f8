"""Copies on CUDA where rows are pages of their own: both halves of a page arrive, and what is the device's own stays."""

from __future__ import annotations

import numpy as np
import pytest

from not_run import NO_CUDA
from stepwell import CacheConfig, Kind, ModelSpec, Prefix, Spill, StateSpec, Tier
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for

torch = pytest.importorskip("torch")

from stepwell.transfer import layer_events  # noqa: E402
from stepwell.transfer.page_copier import Route  # noqa: E402
from stepwell.transfer.torch_copy_engine import TorchCopyEngine  # noqa: E402
from stepwell.transfer.torch_memory import TorchMemory  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]

SPEC = ModelSpec(
    name="rows",
    page_tokens=16,
    states=(
        StateSpec(name="kv", shape=Prefix(), layers=8, row_bytes=656, dtype="u8"),
        StateSpec(name="index", shape=Prefix(), layers=8, row_bytes=132, dtype="u8"),
    ),
    spill=Spill(states=("kv",), group_of={"kv": tuple(range(8))}),
)
LAYOUTS = layouts_for(SPEC, CacheConfig(device_bytes=32 << 20, host_bytes=32 << 20))
ROUTES = {
    "kernel": Route(crossover_bytes=1 << 40, programs=6, least_runs=1),
    "copy engine": Route(crossover_bytes=0),
    "as usual": None,
}


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("target", [Tier.DEVICE, Tier.HOST])
def test_both_halves_of_pages_arrive_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, target: Tier, route: str, layerwise: bool
) -> None:
    monkeypatch.setattr(layer_events, "STEP_BYTES", 1)
    memories = {tier: TorchMemory(SPEC, layout, "cuda" if tier is Tier.DEVICE else "cpu") for tier, layout in LAYOUTS.items()}
    for memory in memories.values():
        memory.bytes_B.copy_(torch.randint(0, 256, memory.bytes_B.shape, dtype=torch.uint8))
    before = {tier: memory.bytes_B.cpu().numpy().copy() for tier, memory in memories.items()}
    source = Tier.HOST if target is Tier.DEVICE else Tier.DEVICE
    rng = np.random.default_rng(5)
    host = rng.permutation(100)[:40].astype(np.int32)
    pages = {kind: rng.permutation(50)[:40].astype(np.int32) for kind in (Kind.PREFIX, Kind.ROWS)}
    pages[Kind.ROWS] += 300  # of another slab
    below = Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=host)
    spans = [{Tier.DEVICE: Span(tier=Tier.DEVICE, kind=kind, ids=ids), Tier.HOST: below} for kind, ids in pages.items()]
    copies = tuple(Copy(source=each[source], target=each[target]) for each in spans)
    engine = TorchCopyEngine(memories, route=ROUTES[route], layerwise=SPEC if layerwise else None)
    purpose = Purpose.LOAD if target is Tier.DEVICE else Purpose.SAVE
    engine.begin(Plan(job=JobId(1), purpose=purpose, copies=copies))()
    wanted = before[target].copy()
    for copy in copies:
        first, onto, size = copy.common(SPEC)
        strides = [LAYOUTS[span.tier].strides[span.kind] for span in (copy.source, copy.target)]
        for read, write in zip(copy.source.ids.tolist(), copy.target.ids.tolist(), strict=True):
            at, of = write * strides[1] + onto, read * strides[0] + first
            wanted[at : at + size] = before[source][of : of + size]
    torch.cuda.synchronize()
    assert np.array_equal(memories[target].bytes_B.cpu().numpy(), wanted)
    assert np.array_equal(memories[source].bytes_B.cpu().numpy(), before[source])
