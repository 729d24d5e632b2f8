"""Copies on CUDA: the kernel and the copy engines move the same bytes, both ways at once, in order, and layer by layer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import gcd

import numpy as np
import pytest

from not_run import NO_CUDA
from stepwell import CacheConfig, Kind, ModelSpec, Point, Prefix, StateSpec, Tier, Window
from stepwell.base.ids import CACHED_KINDS, JobId
from stepwell.base.meters import Counters
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for
from waiting import wait_until

torch = pytest.importorskip("torch")

from stepwell.transfer import layer_events, page_copier  # noqa: E402
from stepwell.transfer.page_copier import Route, checked_driver  # noqa: E402
from stepwell.transfer.torch_copy_engine import TorchCopyEngine  # noqa: E402
from stepwell.transfer.torch_memory import TorchMemory, pinned_bytes  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]

SPEC = ModelSpec(
    name="copies",
    page_tokens=16,
    states=(
        StateSpec(name="kv", shape=Prefix(), layers=8, row_bytes=656, dtype="u8"),
        StateSpec(name="index", shape=Prefix(), layers=8, row_bytes=132, dtype="u8"),
        StateSpec(name="swa", shape=Window(tokens=16), layers=4, row_bytes=584, dtype="u8"),
        StateSpec(name="ssm", shape=Point(), layers=3, row_bytes=5001, dtype="u8"),  # an odd size
    ),
)
CONFIG = CacheConfig(device_bytes=48 << 20, host_bytes=64 << 20)
ROUTES = {
    "kernel": Route(crossover_bytes=1 << 40, programs=6, least_runs=1),
    "copy engine": Route(crossover_bytes=0),
    "as usual": None,
}
WAYS = {"up": (Tier.HOST, Tier.DEVICE), "down": (Tier.DEVICE, Tier.HOST)}
LONG = 200_000_000  # cycles: about a tenth of a second


class Rig:
    """Two memories of random bytes and a copy engine between them."""

    def __init__(self, spec: ModelSpec = SPEC, route: Route | None = ROUTES["kernel"], **options: object) -> None:
        layouts = layouts_for(spec, CONFIG)
        self.memories = {
            tier: TorchMemory(spec, layout, "cuda" if tier is Tier.DEVICE else "cpu") for tier, layout in layouts.items()
        }
        for seed, memory in enumerate(self.memories.values()):
            generator = torch.Generator().manual_seed(seed)
            memory.bytes_B.copy_(torch.randint(0, 256, memory.bytes_B.shape, dtype=torch.uint8, generator=generator))
        self.counters = Counters()
        self.copy_engine = TorchCopyEngine(self.memories, route=route, counters=self.counters, **options)  # type: ignore[arg-type]

    def rows(self, tier: Tier, kind: Kind) -> torch.Tensor:
        return self.memories[tier].rows(kind)

    def pages(self, tier: Tier, kind: Kind, ids: np.ndarray) -> torch.Tensor:
        rows = self.rows(tier, kind)
        return rows[torch.from_numpy(ids.astype(np.int64)).to(rows.device)].cpu()

    def run(self, plan: Plan) -> None:
        self.copy_engine.begin(plan)()


def plan_of(*copies: Copy, purpose: Purpose = Purpose.SAVE, job: int = 1) -> Plan:
    return Plan(job=JobId(job), purpose=purpose, copies=copies)


def copy_of(kind: Kind, way: str, read: np.ndarray, write: np.ndarray) -> Copy:
    source, target = WAYS[way]
    return Copy(
        source=Span(tier=source, kind=kind, ids=read.astype(np.int32)),
        target=Span(tier=target, kind=kind, ids=write.astype(np.int32)),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_random_pages_of_every_kind_arrive_and_nothing_else_changes(kind: Kind, route: str, way: str) -> None:
    rig, random = Rig(route=ROUTES[route]), np.random.default_rng(int(kind))
    source, target = WAYS[way]
    slots = min(len(rig.rows(tier, kind)) for tier in Tier if tier in rig.memories)
    for num_pages in (0, 1, 2, 7, 63):
        read, write = random.integers(0, slots, num_pages), random.permutation(slots)[:num_pages]
        wanted = rig.rows(target, kind).cpu().clone()
        rig.run(plan_of(copy_of(kind, way, read, write)))
        wanted[torch.from_numpy(write)] = rig.pages(source, kind, read)
        assert torch.equal(rig.rows(target, kind).cpu(), wanted)
    assert rig.counters["copy_fallbacks"] == 0


@pytest.mark.parametrize("size", [1, 2, 12, 24, 132, 512, 656, 1000, 1152, 4096, 36 << 10, 100_000])
def test_the_kernel_copies_any_range_both_ways_beside_a_plain_loop(size: int) -> None:
    from stepwell.transfer.copy_kernel import copy_pages

    pages, stride = 40, -(-(size + 64) // 256) * 256
    random = np.random.default_rng(size)
    host = pinned_bytes(pages * stride)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    device = torch.randint(0, 256, host.shape, dtype=torch.uint8, device="cuda")
    for start in (0, gcd(size, 16), 64):
        for source, target in ((host, device), (device, host)):
            read, write = random.integers(0, pages, 25), random.permutation(pages)[:25]
            wanted, content = target.cpu().clone().view(pages, stride), source.cpu().view(pages, stride)
            wanted[torch.from_numpy(write), start : start + size] = content[torch.from_numpy(read), start : start + size]
            ids = [torch.from_numpy(each.astype(np.int32)).cuda() for each in (read, write)]
            copy_pages(
                source[start:], target[start:], *ids, source_stride=stride, target_stride=stride, size_bytes=size, programs=5
            )
            torch.cuda.synchronize()
            assert torch.equal(target.cpu(), wanted.view(-1))


def test_the_host_arena_is_registered_and_trying_ways_to_copy_leaves_its_bytes_alone() -> None:
    rig = Rig(route=None)
    host = rig.memories[Tier.HOST]
    assert host.bytes_B.is_pinned() and len(host.block) == CONFIG.host_bytes
    generator = torch.Generator().manual_seed(list(rig.memories).index(Tier.HOST))
    assert torch.equal(host.bytes_B, torch.randint(0, 256, host.bytes_B.shape, dtype=torch.uint8, generator=generator))


@pytest.mark.parametrize("sizes", [[1], [7, 9000, 1], [656] * 1000, [40_000] * 90], ids=["one", "odd", "rows", "pages"])
def test_the_driver_copies_lists_both_ways_in_a_thread_that_has_used_no_device(sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    host, back = (pinned_bytes(sum(sizes)) for _ in range(2))
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    there, stream = torch.zeros_like(host, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    driver = checked_driver(torch.device("cuda", 0))

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        sources, targets = (np.uint64(each.data_ptr()) + starts for each in (source, target))
        driver.queue(sources, targets, np.array(sizes, np.uint64), stream.cuda_stream)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(copy, host, there).result()
        thread.submit(copy, there, back).result()
    stream.synchronize()
    assert torch.equal(back, host)


@pytest.mark.parametrize("route", ROUTES)
def test_loads_and_saves_at_once_move_the_right_bytes(route: str) -> None:
    rig, random = Rig(route=ROUTES[route]), np.random.default_rng(3)
    half = min(len(rig.rows(tier, Kind.PREFIX)) for tier in rig.memories) // 2
    for round_number in range(5):
        up = copy_of(Kind.PREFIX, "up", random.permutation(half), random.permutation(half))
        down = copy_of(Kind.PREFIX, "down", half + random.permutation(half), half + random.permutation(half))
        loaded = rig.pages(Tier.HOST, Kind.PREFIX, up.source.ids)
        saved = rig.pages(Tier.DEVICE, Kind.PREFIX, down.source.ids)
        plans = [plan_of(up, purpose=Purpose.LOAD, job=2 * round_number), plan_of(down, job=2 * round_number + 1)]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda work: work(), [rig.copy_engine.begin(plan) for plan in plans]))
        assert torch.equal(rig.pages(Tier.DEVICE, Kind.PREFIX, up.target.ids), loaded)
        assert torch.equal(rig.pages(Tier.HOST, Kind.PREFIX, down.target.ids), saved)


@pytest.mark.parametrize("route", ROUTES)
def test_a_save_copies_what_the_engine_had_queued_before_it(route: str) -> None:
    rig, ids = Rig(route=ROUTES[route]), np.arange(0, 60, 3)
    rows, there = rig.rows(Tier.DEVICE, Kind.PREFIX), torch.from_numpy(ids).cuda()
    torch.cuda._sleep(LONG)  # what writes the pages is still to come
    rows[there] = 77
    work = rig.copy_engine.begin(plan_of(copy_of(Kind.PREFIX, "down", ids, ids)))
    work()
    assert (rig.pages(Tier.HOST, Kind.PREFIX, ids) == 77).all()


@pytest.mark.parametrize("route", ROUTES)
def test_a_load_overwrites_no_page_that_a_queued_pass_still_reads(route: str) -> None:
    rig, ids = Rig(route=ROUTES[route]), np.arange(0, 60, 3)
    rows, there = rig.rows(Tier.DEVICE, Kind.PREFIX), torch.from_numpy(ids).cuda()
    old = rig.pages(Tier.DEVICE, Kind.PREFIX, ids)
    torch.cuda._sleep(LONG)
    seen = rows[there]
    work = rig.copy_engine.begin(plan_of(copy_of(Kind.PREFIX, "up", ids, ids), purpose=Purpose.LOAD))
    work()
    assert torch.equal(seen.cpu(), old)
    assert torch.equal(rig.pages(Tier.DEVICE, Kind.PREFIX, ids), rig.pages(Tier.HOST, Kind.PREFIX, ids))


def test_a_kernel_that_cannot_be_launched_is_counted_once_and_the_pages_come_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, ids = Rig(), np.arange(0, 60, 3)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("stepwell.transfer.copy_kernel.copy_pages", fail)
    for shift in (0, 1):
        rig.run(plan_of(copy_of(Kind.PREFIX, "up", ids + shift, ids), purpose=Purpose.LOAD))
        assert torch.equal(rig.pages(Tier.DEVICE, Kind.PREFIX, ids), rig.pages(Tier.HOST, Kind.PREFIX, ids + shift))
    assert rig.counters["copy_fallbacks"] == 1


@pytest.mark.parametrize("missing", ["checked_kernel", "checked_driver"])
def test_without_triton_or_a_new_driver_pages_are_copied_otherwise(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: object) -> None:
        raise OSError("no such thing here")

    monkeypatch.setattr(page_copier, missing, fail)
    rig, ids = Rig(route=None), np.arange(0, 60, 3)
    rig.run(plan_of(copy_of(Kind.PREFIX, "down", ids, ids)))
    assert torch.equal(rig.pages(Tier.DEVICE, Kind.PREFIX, ids), rig.pages(Tier.HOST, Kind.PREFIX, ids))
    assert rig.counters["copy_fallbacks"] == 1


@pytest.mark.parametrize("route", ROUTES)
def test_a_pass_waits_for_each_layer_and_reads_what_was_loaded(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_events, "STEP_BYTES", 64 << 10)
    rig, random = Rig(route=ROUTES[route], layerwise=SPEC), np.random.default_rng(5)
    read, write = random.permutation(200)[:150], random.permutation(200)[:150]
    point = np.array([rig.rows(Tier.DEVICE, Kind.POINT).shape[0] - 1])
    job, others = JobId(9), torch.cuda.Stream()
    copies = [copy_of(Kind.PREFIX, "up", read, write), copy_of(Kind.POINT, "up", point, point)]
    plan = replace(plan_of(*copies, purpose=Purpose.LOAD), job=job)
    rig.run(plan)  # builds every variant of the kernel it needs
    rig.memories[Tier.DEVICE].bytes_B.zero_()
    torch.cuda._sleep(40 * LONG)  # so that the load is still waiting when its events are asked for, on a busy machine too
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(rig.copy_engine.begin(plan))
        wait_until(lambda: rig.copy_engine.events_for(job) is not None or done.done())
        events = rig.copy_engine.events_for(job)
        assert events is not None, done.result()
        assert not events.arrived("kv", 7)
        seen = {}
        with torch.cuda.stream(others):
            there = torch.from_numpy(write).pin_memory().to("cuda", non_blocking=True)
            for layer in range(8):
                for part in SPEC.parts(Kind.PREFIX):
                    events.wait(part.state, layer, others)
                    first = part.offset + layer * part.layer_stride
                    rows = rig.rows(Tier.DEVICE, Kind.PREFIX)[:, first : first + part.layer_stride]
                    seen[part.state, layer] = (first, part.layer_stride, rows[there])
            events.wait("swa", 0, others)  # not part of this load
            events.wait("ssm", 2, others)
            last = rig.rows(Tier.DEVICE, Kind.POINT)[-1].clone()
        done.result()
    others.synchronize()
    wanted = rig.pages(Tier.HOST, Kind.PREFIX, read)
    for first, size, found in seen.values():
        assert torch.equal(found.cpu(), wanted[:, first : first + size])
    assert torch.equal(last.cpu(), rig.pages(Tier.HOST, Kind.POINT, point)[0])
    assert events.arrived("kv", 7) and rig.copy_engine.events_for(job) is None
    assert len(events._events) > 1 and rig.counters["copy_fallbacks"] == 0


def test_saves_and_plain_loads_have_no_layer_events() -> None:
    rig, ids = Rig(layerwise=SPEC), np.arange(4)
    rig.run(plan_of(copy_of(Kind.PREFIX, "down", ids, ids)))
    assert rig.copy_engine.events_for(JobId(1)) is None
