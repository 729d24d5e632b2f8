"""Loads cut into layers: every byte once, and a layer is there with the step that it is waited for by."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from stepwell import Kind, ModelSpec, Point, Prefix, StateSpec, Window  # noqa: E402
from stepwell.base.spec import Part  # noqa: E402
from stepwell.transfer import layer_events  # noqa: E402
from stepwell.transfer.layer_events import LayerEvents, LayerSteps, layer_steps  # noqa: E402
from stepwell.transfer.page_tables import PagePairs, PageTable  # noqa: E402
from waiting import wait_until  # noqa: E402

SPEC = ModelSpec(
    name="layers",
    page_tokens=4,
    states=(
        StateSpec(name="kv", shape=Prefix(), layers=6, row_bytes=8, dtype="u8"),
        StateSpec(name="index", shape=Prefix(), layers=3, row_bytes=4, dtype="u8"),
        StateSpec(name="draft", shape=Prefix(), layers=1, row_bytes=8, dtype="u8", required=False),
        StateSpec(name="swa", shape=Window(tokens=8), layers=5, row_bytes=16, dtype="u8"),
        StateSpec(name="ssm", shape=Point(), layers=2, row_bytes=40, dtype="u8"),
    ),
)
PAGES = {Kind.PREFIX: 5, Kind.WINDOW: 2, Kind.POINT: 1}


def loads() -> list[tuple[Kind, PagePairs]]:
    found = []
    for kind, pages in PAGES.items():
        table = PageTable.of(torch.zeros(8, 512, dtype=torch.uint8)[:, : SPEC.object_bytes(kind)])
        ids = np.arange(pages, dtype=np.int32)
        found.append((kind, PagePairs(source=table, target=table, source_ids=ids, target_ids=ids)))
    return found


def bytes_after(cut: LayerSteps, step: int, pairs: PagePairs) -> np.ndarray:
    """How often each byte of a page was copied when a step is done."""
    times = np.zeros(pairs.page_bytes, np.int64)
    for pieces in cut.steps[: step + 1]:
        for piece in pieces:
            if piece.pairs is pairs:
                times[piece.start : piece.start + piece.size_bytes] += 1
    return times


def layer_bytes(part: Part, layer: int) -> np.ndarray:
    rows = part.offset + layer * part.layer_stride + np.arange(part.rows) * part.row_stride
    return (rows[:, None] + np.arange(part.row_bytes)[None, :]).ravel()


@pytest.mark.parametrize("step_bytes", [1, 20, 30, 60, 100, 1 << 20])
def test_every_byte_is_copied_once_and_a_layer_is_there_with_its_step(step_bytes: int) -> None:
    of_kind = loads()
    cut = layer_steps(SPEC, of_kind, step_bytes=step_bytes)
    for kind, pairs in of_kind:
        assert (bytes_after(cut, len(cut.steps), pairs) == 1).all()
        for part in SPEC.parts(kind):
            for layer in range(part.layers):
                there = bytes_after(cut, cut.step_of[part.state][layer], pairs)
                assert there[layer_bytes(part, layer)].all(), f"layer {layer} of {part.state} comes after its step"


def test_states_with_few_layers_come_early_enough_and_drafts_last() -> None:
    cut = layer_steps(SPEC, loads(), step_bytes=1)
    assert len(cut.steps) == 6
    assert cut.step_of["kv"] == [0, 1, 2, 3, 4, 5]
    assert cut.step_of["index"] == [0, 2, 4] and cut.step_of["ssm"] == [0, 3]
    assert cut.step_of["swa"] == [0, 1, 2, 3, 4] and cut.step_of["draft"] == [5]


def test_a_small_load_is_one_step_of_whole_pages() -> None:
    of_kind = loads()
    cut = layer_steps(SPEC, of_kind)
    assert [piece.size_bytes for piece in cut.steps[0]] == [pairs.page_bytes for _, pairs in of_kind] and len(cut.steps) == 1
    assert all(step == 0 for steps in cut.step_of.values() for step in steps)


def test_a_part_whose_layers_are_interleaved_comes_whole_with_its_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = next(part for part in SPEC.parts(Kind.PREFIX) if part.state == "kv")
    mixed = replace(kv, layer_stride=kv.row_bytes, row_stride=kv.layers * kv.row_bytes)
    assert layer_events._layers_are_ranges(kv) and not layer_events._layers_are_ranges(mixed)
    assert layer_events._cuts(SPEC, mixed, 3) == [0, 6, 6, 6]
    assert layer_events._bytes_of_layers(mixed, 0, 6) == (kv.offset, kv.size_bytes)
    assert layer_events._bytes_of_layers(mixed, 6, 6)[1] == 0


def test_a_load_of_nothing_is_one_empty_step() -> None:
    cut = layer_steps(SPEC, [])
    assert cut.steps == ((),) and not cut.step_of


class Stream:
    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event.name)


class Event:
    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, stream: object) -> None:
        self.name += " recorded"

    def query(self) -> bool:
        return True


def test_waiting_asks_for_the_event_behind_the_layers_step() -> None:
    stream: Any = Stream()
    recorded: list[Any] = [Event("first"), Event("second")]
    events = LayerEvents({"kv": [0, 0, 1], "ssm": [0]}, recorded)
    for step in range(2):
        events.record(step, stream)
    events.wait("kv", 2, stream)
    events.wait("ssm", 0, stream)
    events.wait("swa", 0, stream)
    wanted = ["second recorded", "first recorded"]
    assert stream.waited == wanted, "a state that is not loaded is not waited for"


def test_a_layer_whose_copies_are_not_queued_yet_is_waited_for_here() -> None:
    stream: Any = Stream()
    recorded: list[Any] = [Event("first"), Event("second")]
    events = LayerEvents({"kv": [0, 1]}, recorded)
    events.record(0, stream)
    assert events.arrived("kv", 0) and not events.arrived("kv", 1)
    events.wait("kv", 0, stream)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(events.wait, "kv", 1, stream)
        wait_until(lambda: bool(events._changed._waiters))  # type: ignore[attr-defined]
        assert not waiting.done() and stream.waited == ["first recorded"], "no stream may pass an event that is not recorded"
        events.record(1, stream)
        waiting.result(timeout=60)
    assert stream.waited[1:] == ["second recorded"]


def test_nobody_waits_for_steps_that_will_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_events, "LONGEST_WAIT_S", 60.0)
    stream: Any = Stream()
    events = LayerEvents({"kv": [0, 1]}, [Event("first"), Event("second")])  # type: ignore[list-item]
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(events.wait, "kv", layer, stream) for layer in range(2)]
        wait_until(lambda: len(events._changed._waiters) == 2)  # type: ignore[attr-defined]
        events.queued()
        for each in waiting:
            each.result(timeout=60)
    events.wait("kv", 1, stream)


def test_a_worker_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_events, "LONGEST_WAIT_S", 0.01)
    events = LayerEvents({"kv": [0]}, [Event("first")])  # type: ignore[list-item]
    stream: Any = Stream()
    with pytest.raises(TimeoutError, match="not queued within"):
        events.wait("kv", 0, stream)
    assert not stream.waited
