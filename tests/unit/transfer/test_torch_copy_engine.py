"""What a copy engine queues on its streams and waits for, on a stand-in for CUDA: host memory, and streams that take notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from stepwell import CacheConfig, Kind, Tier  # noqa: E402
from stepwell.base.ids import JobId  # noqa: E402
from stepwell.base.meters import Counters  # noqa: E402
from stepwell.base.tasks import Copy, Plan, Purpose, Span  # noqa: E402
from stepwell.cache.build import layouts_for  # noqa: E402
from stepwell.transfer import layer_events, torch_copy_engine  # noqa: E402
from stepwell.transfer.block_tables import BlockTables, LayerBlocks  # noqa: E402
from stepwell.transfer.layer_events import LayerEvents  # noqa: E402
from stepwell.transfer.page_copier import PageCopier, Route, Routed, StagedIds  # noqa: E402
from stepwell.transfer.page_tables import PagePairs, PageTable  # noqa: E402
from stepwell.transfer.torch_copy_engine import TorchCopyEngine  # noqa: E402
from stepwell.transfer.torch_memory import TorchMemory  # noqa: E402
from toys import HYBRID  # noqa: E402

LAYOUTS = layouts_for(HYBRID, CacheConfig(device_bytes=64 * 32, host_bytes=32 * 32), alignment=16)
JOB = JobId(7)


class Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_event(self, event: Event) -> None:
        self.notes.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self, notes: list[str], blocking: bool) -> None:
        self.notes, self.blocking, self.name = notes, blocking, "nothing"

    def record(self, stream: Stream) -> None:
        self.name = f"{stream.name}#{len(self.notes)}"
        self.notes.append(f"event on {stream.name}")

    def query(self) -> bool:
        """Only at the third look."""
        self.notes.append(f"looked at {self.name.partition('#')[0]}")
        return self.notes.count(self.notes[-1]) % 3 == 0

    def synchronize(self) -> None:
        how = "asleep" if self.blocking else "spinning"
        self.notes.append(f"waited {how} for {self.name.partition('#')[0]}")


class StandIn:
    """A copy engine between two memories of the host, one of them said to be a device's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        self.notes: list[str] = []
        self.counters = Counters()
        streams = iter(("loading", "saving"))
        cuda = SimpleNamespace(
            Stream=lambda device: Stream(next(streams), self.notes),
            Event=lambda blocking=False: Event(self.notes, blocking),
            stream=self._on_stream,
            device=lambda device: nullcontext(),
            current_stream=lambda device: Stream("engine", self.notes),
        )
        memories = {tier: TorchMemory(HYBRID, layout) for tier, layout in LAYOUTS.items()}
        for memory in memories.values():
            memory.bytes_B.copy_(torch.randint(0, 256, memory.bytes_B.shape, dtype=torch.uint8))
        self.memories = memories
        there = SimpleNamespace(bytes_B=SimpleNamespace(device=SimpleNamespace(type="cuda")), rows=memories[Tier.DEVICE].rows,
                                spec=HYBRID)  # fmt: skip
        monkeypatch.setattr(torch_copy_engine, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(torch_copy_engine, "StagedIds", lambda device: StagedIds(torch.device("cpu")))
        self.copy_engine = TorchCopyEngine({**memories, Tier.DEVICE: there}, counters=self.counters, **options)  # type: ignore[arg-type, dict-item]
        self.notes.clear()

    @contextmanager
    def _on_stream(self, stream: Stream) -> Iterator[None]:
        yield

    def plan(self, purpose: Purpose, read: list[int], write: list[int]) -> Plan:
        tiers = (Tier.HOST, Tier.DEVICE) if purpose is Purpose.LOAD else (Tier.DEVICE, Tier.HOST)
        spans = [
            Span(tier=tier, kind=Kind.PREFIX, ids=np.array(ids, np.int32)) for tier, ids in zip(tiers, (read, write), strict=True)
        ]
        return Plan(job=JOB, purpose=purpose, copies=(Copy(source=spans[0], target=spans[1]),))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def test_loads_and_saves_have_their_streams_follow_the_engine_and_wait_for_themselves_alone(stand_in: StandIn) -> None:
    rows = {tier: memory.rows(Kind.PREFIX) for tier, memory in stand_in.memories.items()}
    stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, [3, 5], [8, 1]))()
    assert stand_in.notes == [
        "event on engine", "loading waits for engine#0", "event on loading", "event on loading",
        "looked at engine", "waited asleep for engine", "waited spinning for loading",
    ]  # fmt: skip
    assert torch.equal(rows[Tier.DEVICE][8], rows[Tier.HOST][3]) and torch.equal(rows[Tier.DEVICE][1], rows[Tier.HOST][5])
    stand_in.notes.clear()
    stand_in.copy_engine.begin(stand_in.plan(Purpose.SAVE, [60], [9]))()
    assert stand_in.notes[1] == "saving waits for engine#0" and stand_in.notes[-1] == "waited spinning for saving"
    assert torch.equal(rows[Tier.HOST][9], rows[Tier.DEVICE][60])


def test_blocks_of_an_engine_that_owns_its_memory_are_copied_on_these_streams_too(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part for kind in (Kind.PREFIX, Kind.WINDOW, Kind.POINT) for part in HYBRID.parts(kind)]
    layers = [
        LayerBlocks(
            state=part.state, layer=layer, rows_NB=torch.zeros(9, part.layer_stride, dtype=torch.uint8), blocks_per_page=1
        )
        for part in parts
        for layer in range(part.layers)
    ]
    blocks = BlockTables(HYBRID, layers)
    monkeypatch.setattr(blocks, "device", SimpleNamespace(type="cuda"))
    there = StandIn(monkeypatch, blocks=blocks)
    host = there.memories[Tier.HOST].rows(Kind.PREFIX)
    before, columns = host[3].clone(), blocks.columns[Kind.PREFIX]

    def copy(page: int, block: int, purpose: Purpose) -> list[str]:
        ours = Span(tier=Tier.HOST, kind=Kind.PREFIX, ids=np.array([page], np.int32))
        theirs = Span(tier=Tier.ENGINE, kind=Kind.PREFIX, ids=np.full((1, columns), block, np.int32))
        read, written = (ours, theirs) if purpose is Purpose.LOAD else (theirs, ours)
        there.notes.clear()
        there.copy_engine.begin(Plan(job=JOB, purpose=purpose, copies=(Copy(source=read, target=written),)))()
        return [there.notes[1], there.notes[-1]]

    assert copy(3, 7, Purpose.LOAD) == ["loading waits for engine#0", "waited spinning for loading"]
    assert copy(5, 7, Purpose.SAVE) == ["saving waits for engine#0", "waited spinning for saving"]
    assert torch.equal(host[5], before) and not torch.equal(host[5], torch.zeros_like(host[5]))


def test_a_worker_looks_now_and_then_while_much_is_copied_and_spins_while_little_is(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = stand_in.plan(Purpose.SAVE, [60, 3], [9, 1])
    size = 2 * HYBRID.object_bytes(Kind.PREFIX)
    for spun, looks in ((size, 0), (size - 1, 3)):
        monkeypatch.setattr(torch_copy_engine, "SPUN_BYTES", spun)
        stand_in.copy_engine.begin(plan)()
        assert stand_in.notes.count("looked at saving") == looks and stand_in.notes[-1] == "waited spinning for saving"


def test_only_so_many_parts_of_a_plan_are_queued_at_a_time(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_copy_engine, "PART_BYTES", 2 * HYBRID.object_bytes(Kind.PREFIX))
    monkeypatch.setattr(torch_copy_engine, "MOST_QUEUED_BYTES", 3 * HYBRID.object_bytes(Kind.PREFIX))
    read, write = [3, 9, 1, 4, 8, 2, 7], [8, 1, 2, 3, 4, 9, 30]
    rows = {tier: memory.rows(Kind.PREFIX) for tier, memory in stand_in.memories.items()}
    stand_in.copy_engine.begin(stand_in.plan(Purpose.SAVE, read, write))()
    looked = [note for note in stand_in.notes if note.startswith(("event on sav", "looked at sav"))]
    three = ["looked at saving"] * 3
    assert looked == [*["event on saving"] * 2, *three, "event on saving", *three, "event on saving", "event on saving"]
    assert torch.equal(rows[Tier.HOST][write], rows[Tier.DEVICE][read])


@pytest.mark.parametrize("every", ["bytes", "copies"])
def test_now_and_then_nothing_of_a_plan_is_queued(every: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = HYBRID.object_bytes(Kind.PREFIX)
    monkeypatch.setattr(torch_copy_engine, "PART_BYTES", page_bytes)
    monkeypatch.setattr(torch_copy_engine, f"PAUSE_EVERY_{every.upper()}", 3 * page_bytes if every == "bytes" else 3)
    read, write = [3, 9, 1, 4, 8, 2, 7], [8, 1, 2, 3, 4, 9, 30]
    rows = {tier: memory.rows(Kind.PREFIX) for tier, memory in stand_in.memories.items()}
    stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, read, write))()
    waited = [note for note in stand_in.notes if note in ("event on loading", "waited spinning for loading")]
    three, done = ["event on loading"] * 3, ["waited spinning for loading"] * 3
    assert waited == [*three, *done, *three, *done, "event on loading", "event on loading", "waited spinning for loading"]
    assert torch.equal(rows[Tier.DEVICE][write], rows[Tier.HOST][read])


def test_fast_ways_that_cannot_be_had_are_counted_at_the_start(stand_in: StandIn) -> None:
    assert stand_in.counters["copy_fallbacks"] == 2, "there is no driver here, and nothing for Triton to build a kernel for"


def test_a_plan_that_fails_half_way_still_waits_for_what_it_had_queued(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PageCopier, routed: Routed, staged: StagedIds, stream: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(PageCopier, "queue", fail)
    spare = stand_in.copy_engine._spare.qsize()
    with pytest.raises(RuntimeError, match="the device is gone"):
        stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, [3], [8]))()
    assert stand_in.notes[-4:] == [
        "event on loading", "looked at engine", "waited asleep for engine", "waited spinning for loading"
    ]  # fmt: skip
    assert stand_in.copy_engine._spare.qsize() == spare and stand_in.copy_engine.events_for(JOB) is None


def test_a_page_that_is_not_there_fails_before_anything_is_queued(stand_in: StandIn) -> None:
    work = stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, [0, 32], [1, 2]))
    with pytest.raises(IndexError):
        work()
    assert stand_in.notes == ["event on engine"]


def test_layer_events_are_there_until_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, layerwise=HYBRID)
    seen: list[LayerEvents | None] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: seen.append(stand_in.copy_engine.events_for(JOB)))
    stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, [3], [8]))()
    events, at_the_end = seen
    assert events is not None and events is at_the_end and stand_in.copy_engine.events_for(JOB) is None
    events.wait("kv", 1, Stream("pass", stand_in.notes))  # type: ignore[arg-type]
    assert stand_in.notes[-1].startswith("pass waits for loading#")
    stand_in.copy_engine.begin(stand_in.plan(Purpose.SAVE, [3], [8]))()
    assert seen[2:] == [None, None], "saves have none"


def test_a_load_that_fails_half_way_keeps_nobody_waiting_for_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, layerwise=HYBRID)
    seen: list[LayerEvents | None] = []

    def fail(self: PageCopier, routed: Routed, staged: StagedIds, stream: object) -> None:
        seen.append(stand_in.copy_engine.events_for(JOB))
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(PageCopier, "queue", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, [3], [8]))()
    (events,) = seen
    assert events is not None and stand_in.copy_engine.events_for(JOB) is None
    assert events._num_queued == len(events._events), "no pass waits for what will not come"


def test_a_device_that_is_gone_keeps_nobody_waiting_either(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, layerwise=HYBRID)
    seen: list[LayerEvents | None] = []
    work = stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, [3], [8]))

    def fail(*_: object) -> None:
        seen.append(stand_in.copy_engine.events_for(JOB))
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(PageCopier, "queue", fail)
    for name in ("record", "query", "synchronize"):
        monkeypatch.setattr(Event, name, fail)
    spare = stand_in.copy_engine._spare.qsize()
    with pytest.raises(RuntimeError, match="the device is gone"):
        work()
    events = seen[0]
    assert events is not None and events._num_queued == len(events._events)
    assert stand_in.copy_engine.events_for(JOB) is None
    assert stand_in.copy_engine._spare.qsize() == spare - 1, "its page ids may still be read"


def test_what_is_copied_on_the_device_is_waited_for_with_the_first_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, layerwise=HYBRID)
    seen: list[LayerEvents | None] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: seen.append(stand_in.copy_engine.events_for(JOB)))
    here = [Span(tier=Tier.DEVICE, kind=Kind.POINT, ids=np.array([each], np.int32)) for each in (0, 1)]
    load = stand_in.plan(Purpose.LOAD, [3], [8])
    for copies in ((Copy(source=here[0], target=here[1]),), (*load.copies, Copy(source=here[0], target=here[1]))):
        stand_in.copy_engine.begin(replace(load, copies=copies))()
        events = seen.pop()
        assert events is not None
        for part in HYBRID.parts(Kind.POINT):
            stand_in.notes.clear()
            events.wait(part.state, 0, Stream("pass", stand_in.notes))  # type: ignore[arg-type]
            assert len(stand_in.notes) == 1


def test_without_the_kernel_a_load_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, layerwise=HYBRID)
    monkeypatch.setattr(layer_events, "STEP_BYTES", 1)
    steps = stand_in.copy_engine._steps(stand_in.plan(Purpose.LOAD, [3, 9], [8, 1]))
    assert len(steps.steps) == 1 and steps.step_of == {"kv": [0, 0]}


def test_page_ids_are_staged_once_for_all_steps_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, layerwise=HYBRID)
    on_device = {
        (tier, Kind.PREFIX): replace(PageTable.of(memory.rows(Kind.PREFIX)), on_device=tier is Tier.DEVICE)
        for tier, memory in stand_in.memories.items()
    }
    calls: list[tuple[list[int], list[int], int]] = []

    class Kernel:
        def copy_pages(self, source_B: object, target_B: object, read: object, write: object, **sizes: int) -> None:
            calls.append((read.tolist(), write.tolist(), sizes["size_bytes"]))  # type: ignore[attr-defined]

    route = Route(crossover_bytes=1 << 40, programs=2, least_runs=1)
    stand_in.copy_engine._tables = on_device
    stand_in.copy_engine._copier = PageCopier(route, kernel=Kernel())  # type: ignore[arg-type]
    monkeypatch.setattr(layer_events, "STEP_BYTES", 1)
    stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, [3, 9], [8, 1]))()
    assert calls == [([3, 9], [8, 1], 16)] * 2, "two layers of 16 bytes"
    staged = list[int]()
    stage = StagedIds.stage

    def noted(self: StagedIds, pairs: Sequence[PagePairs]) -> None:
        staged.append(len(pairs))
        stage(self, pairs)

    monkeypatch.setattr(StagedIds, "stage", noted)
    monkeypatch.setattr(torch_copy_engine, "PART_BYTES", 16)
    calls.clear()
    stand_in.copy_engine.begin(stand_in.plan(Purpose.LOAD, [3, 9], [8, 1]))()
    assert calls == [([3], [8], 16), ([9], [1], 16)] * 2 and staged == [2], "parts are cut alike in every layer"
