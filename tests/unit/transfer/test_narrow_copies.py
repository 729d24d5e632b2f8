"""Copies to and from a host that keeps checkpoints in eight bits: which bytes change, and which do not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from stepwell import CacheConfig, ConfigError, Kind, ModelSpec, Point, Prefix, SpecError, StateSpec, Tier, Window, build_cache
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for
from toys import FULL, FULL_POINT

torch = pytest.importorskip("torch", reason="torch is not installed")

from stepwell.transfer import narrow_copies  # noqa: E402
from stepwell.transfer.copy_engine import CopyEngine, NumpyCopyEngine, PageMemory, Work  # noqa: E402
from stepwell.transfer.narrow_copies import NarrowCopyEngine, as_tensor  # noqa: E402
from stepwell.transfer.narrow_rows import NotFinite  # noqa: E402
from stepwell.transfer.torch_copy_engine import TorchCopyEngine  # noqa: E402
from stepwell.transfer.torch_memory import TorchMemory  # noqa: E402

EXACT = ModelSpec(
    name="hybrid",
    page_tokens=8,
    states=(
        StateSpec(name="kv", shape=Prefix(), layers=2, row_bytes=64, dtype="bf16"),
        StateSpec(name="swa", shape=Window(tokens=8), layers=3, row_bytes=2 * 96, dtype="bf16"),
        StateSpec(name="draft", shape=Window(tokens=8), layers=1, row_bytes=2 * 64, dtype="bf16", required=False),
        StateSpec(name="ssm", shape=Point(), layers=5, row_bytes=4 * 256, dtype="fp32"),
        StateSpec(name="overlap", shape=Point(), layers=2, row_bytes=100, dtype="bf16+fp32"),
        StateSpec(name="group", shape=Point(period=16), layers=2, row_bytes=64, dtype="fp32"),
    ),
)
SIZES = CacheConfig(device_bytes=1 << 20, host_bytes=1 << 20)
MAGNITUDE = 2.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    spec: ModelSpec
    memories: dict[Tier, PageMemory | TorchMemory]
    engine: CopyEngine

    def pages(self, tier: Tier, kind: Kind) -> torch.Tensor:
        return as_tensor(self.memories[tier], kind)

    def numbers(self, page: int, name: str, kind: Kind) -> torch.Tensor:
        part = next(each for each in self.spec.device_parts(kind) if each.state == name)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.spec.state(name).dtype]
        return self.pages(Tier.DEVICE, kind)[page, part.offset : part.offset + part.size_bytes].view(dtype)

    def fill(self, kind: Kind, pages: list[int]) -> None:
        """Any bytes, and numbers where the state has numbers."""
        generator = torch.Generator().manual_seed(7)
        for page in pages:
            row = self.pages(Tier.DEVICE, kind)[page]
            row.copy_(torch.randint(0, 256, row.shape, dtype=torch.uint8, generator=generator))
            for name in {"swa", "ssm"} & {part.state for part in self.spec.device_parts(kind)}:
                x = self.numbers(page, name, kind)
                x.copy_(torch.randn(x.shape, generator=generator) * MAGNITUDE)

    def copy(self, kind: Kind, source: Tier, read: list[int], target: Tier, write: list[int]) -> None:
        self.engine.begin(plan(copy(kind, source, read, target, write)))()


def copy(kind: Kind, source: Tier, read: list[int], target: Tier, write: list[int]) -> Copy:
    spans = [Span(tier=tier, kind=kind, ids=np.array(ids, np.int32)) for tier, ids in ((source, read), (target, write))]
    return Copy(source=spans[0], target=spans[1])


def plan(*copies: Copy) -> Plan:
    saves = copies[0].target.tier is Tier.HOST
    return Plan(job=JobId(1), purpose=Purpose.SAVE if saves else Purpose.LOAD, copies=copies)


def scene(engine: str = "numpy", dtype: str = "int8") -> Scene:
    spec = EXACT.with_checkpoint_dtype(dtype)
    layouts = layouts_for(spec, SIZES, alignment=64)
    below: CopyEngine
    memories: dict[Tier, PageMemory | TorchMemory]
    if engine == "numpy":
        plain = {tier: PageMemory(spec, layout) for tier, layout in layouts.items()}
        memories, below = {**plain}, NumpyCopyEngine(plain)
    else:
        tensors = {tier: TorchMemory(spec, layout) for tier, layout in layouts.items()}
        memories, below = {**tensors}, TorchCopyEngine(tensors)
    return Scene(spec=spec, memories=memories, engine=NarrowCopyEngine(below, spec, memories))


@pytest.fixture(params=["numpy", "torch"])
def scenes(request: pytest.FixtureRequest) -> Scene:
    return scene(request.param)


def test_host_pages_have_the_bytes_that_the_spec_says() -> None:
    spec = EXACT.with_checkpoint_dtype("int8")
    assert spec.object_bytes(Kind.PREFIX) == EXACT.object_bytes(Kind.PREFIX)
    assert spec.object_bytes(Kind.WINDOW) == 8 * (3 * (96 + 2 * 2) + 128)
    assert spec.object_bytes(Kind.POINT) == 5 * (256 + 4 * 4) + 2 * 100 + 2 * 8 * 64
    for kind in (Kind.PREFIX, Kind.WINDOW, Kind.POINT):
        assert spec.device_bytes(kind) == EXACT.object_bytes(kind) and spec.device_parts(kind) == EXACT.parts(kind)
    assert spec.checkpoint_bytes(8) == spec.object_bytes(Kind.WINDOW) + 5 * 272 + 200 + 2 * 8 * 64


def test_pages_of_one_format_are_never_those_of_another() -> None:
    specs = [EXACT, *(EXACT.with_checkpoint_dtype(dtype) for dtype in ("int8", "fp8"))]
    assert len({spec.fingerprint for spec in specs}) == 3
    assert EXACT.with_checkpoint_dtype("int8").with_checkpoint_dtype(None) == EXACT


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.POINT])
def test_there_and_back_and_there_again(dtype: str, kind: Kind) -> None:
    made = scene(dtype=dtype)
    made.fill(kind, [1, 2, 5])
    before = made.pages(Tier.DEVICE, kind).clone()
    made.copy(kind, Tier.DEVICE, [1, 2, 5], Tier.HOST, [7, 3, 4])
    assert torch.equal(made.pages(Tier.DEVICE, kind), before), "a save changes nothing that it reads"
    made.copy(kind, Tier.HOST, [7, 3, 4], Tier.DEVICE, [6, 8, 9])
    for name in {"swa", "ssm"} & {part.state for part in made.spec.parts(kind)}:
        for there, back in ((1, 6), (2, 8), (5, 9)):
            error = made.numbers(back, name, kind).double() - made.numbers(there, name, kind).double()
            assert 0 < error.abs().max() < MAGNITUDE * (0.04 if dtype == "int8" else 0.3)
    made.copy(kind, Tier.DEVICE, [6, 8, 9], Tier.HOST, [0, 1, 2])
    host = made.pages(Tier.HOST, kind)
    assert torch.equal(host[[0, 1, 2]], host[[7, 3, 4]]), "what was restored is the same bytes when it is saved again"


def test_states_that_are_not_plain_numbers_come_back_bit_for_bit(scenes: Scene) -> None:
    for kind, exact in ((Kind.WINDOW, ["draft"]), (Kind.POINT, ["overlap", "group"])):
        scenes.fill(kind, [3])
        scenes.copy(kind, Tier.DEVICE, [3], Tier.HOST, [2])
        scenes.copy(kind, Tier.HOST, [2], Tier.DEVICE, [4])
        for part in scenes.spec.device_parts(kind):
            there, back = (scenes.pages(Tier.DEVICE, kind)[page, part.offset : part.offset + part.size_bytes] for page in (3, 4))
            assert torch.equal(there, back) == (part.state in exact), part.state


def test_nothing_beside_the_pages_is_touched(scenes: Scene) -> None:
    for kind in (Kind.WINDOW, Kind.POINT):
        scenes.fill(kind, list(range(12)))
        scenes.pages(Tier.HOST, kind).fill_(0xEE)
        scenes.copy(kind, Tier.DEVICE, [1, 2], Tier.HOST, [5, 7])
        host = scenes.pages(Tier.HOST, kind)
        others = [page for page in range(len(host)) if page not in (5, 7)]
        assert (host[others] == 0xEE).all() and not (host[[5, 7]] == 0xEE).all()
        before = scenes.pages(Tier.DEVICE, kind).clone()
        scenes.copy(kind, Tier.HOST, [5], Tier.DEVICE, [9])
        same = [page for page in range(len(before)) if page != 9]
        assert torch.equal(scenes.pages(Tier.DEVICE, kind)[same], before[same])


def test_prefix_pages_and_copies_on_the_device_are_exact(scenes: Scene) -> None:
    scenes.fill(Kind.PREFIX, [1, 2])
    scenes.copy(Kind.PREFIX, Tier.DEVICE, [1, 2], Tier.HOST, [3, 4])
    assert torch.equal(scenes.pages(Tier.HOST, Kind.PREFIX)[[3, 4]], scenes.pages(Tier.DEVICE, Kind.PREFIX)[[1, 2]])
    scenes.fill(Kind.POINT, [1])
    scenes.engine.begin(plan(copy(Kind.POINT, Tier.DEVICE, [1], Tier.DEVICE, [2])))()
    assert torch.equal(scenes.pages(Tier.DEVICE, Kind.POINT)[1], scenes.pages(Tier.DEVICE, Kind.POINT)[2])


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scene()
    monkeypatch.setattr(narrow_copies, "PIECE_BYTES", 2500)
    monkeypatch.setattr(narrow_copies, "STAGED_BYTES", 3500)
    cut = scene()
    for made in (whole, cut):
        made.fill(Kind.POINT, [1, 2, 3, 4])
        made.copy(Kind.POINT, Tier.DEVICE, [1, 2, 3, 4], Tier.HOST, [4, 3, 2, 1])
        made.copy(Kind.POINT, Tier.HOST, [4, 3, 2, 1], Tier.DEVICE, [5, 6, 7, 8])
    for tier in (Tier.DEVICE, Tier.HOST):
        assert torch.equal(whole.pages(tier, Kind.POINT), cut.pages(tier, Kind.POINT))


def test_state_that_is_not_finite_is_not_saved(scenes: Scene) -> None:
    scenes.fill(Kind.POINT, [1, 2])
    scenes.numbers(2, "ssm", Kind.POINT)[77] = float("inf")
    scenes.pages(Tier.HOST, Kind.POINT).fill_(0xEE)
    with pytest.raises(NotFinite):
        scenes.copy(Kind.POINT, Tier.DEVICE, [1, 2], Tier.HOST, [1, 2])
    assert (scenes.pages(Tier.HOST, Kind.POINT) == 0xEE).all(), "all of a plan's pages, or none"


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_an_engine_that_copies_bytes_refuses(engine: str) -> None:
    """A cache put together without the one that turns numbers has failed copies, never other numbers."""
    made = scene(engine)
    assert isinstance(made.engine, NarrowCopyEngine)
    with pytest.raises(AssertionError, match="not a copy of bytes"):
        made.engine._below.begin(plan(copy(Kind.POINT, Tier.DEVICE, [1], Tier.HOST, [1])))()


def test_rows_that_would_not_get_smaller_stay_as_they_are() -> None:
    tiny = StateSpec(name="tiny", shape=Point(), layers=1, row_bytes=4, dtype="fp16")
    spec = ModelSpec(name="tiny", states=(*EXACT.states, tiny), page_tokens=8).with_checkpoint_dtype("int8")
    assert spec.parts(Kind.POINT)[-1].row_bytes == 4


def test_narrow_pages_are_there_before_the_rest_of_a_plan_begins() -> None:
    """A pass that reads a load layer by layer does not wait for states that the engine below knows nothing of."""
    made = scene()
    made.fill(Kind.POINT, [1])
    made.copy(Kind.POINT, Tier.DEVICE, [1], Tier.HOST, [1])
    seen: list[tuple[int, bool]] = []

    class Below:
        def begin(self, plan: Plan) -> Work:
            return lambda: seen.append((len(plan.copies), bool(made.pages(Tier.DEVICE, Kind.POINT)[2].any())))

    engine = NarrowCopyEngine(Below(), made.spec, made.memories)
    engine.begin(
        plan(
            copy(Kind.PREFIX, Tier.HOST, [1], Tier.DEVICE, [1]),
            copy(Kind.POINT, Tier.HOST, [1], Tier.DEVICE, [2]),
        )
    )()
    assert seen == [(1, True)]


def test_what_cannot_be_narrow_is_refused() -> None:
    with pytest.raises(SpecError, match="no window or point state"):
        FULL.with_checkpoint_dtype("int8")
    with pytest.raises(SpecError, match="no window or point state"):
        FULL_POINT.with_checkpoint_dtype("int8")  # of bytes that are no numbers
    with pytest.raises(SpecError, match="int8 or fp8"):
        EXACT.with_checkpoint_dtype("int4")
    spec = EXACT.with_checkpoint_dtype("int8")
    with pytest.raises(ConfigError, match="host_bytes"):
        build_cache(spec, CacheConfig(device_bytes=1 << 20))
    with pytest.raises(ConfigError, match="device_bytes"):
        build_cache(spec, CacheConfig(device_bytes=None, host_bytes=1 << 20))
