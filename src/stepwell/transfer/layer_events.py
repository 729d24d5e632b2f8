"""A load layer by layer: which step copies which bytes, and an event after each step that a stream can wait for.

    page      |kv: layer 0|1|2|3|index: layer 0|1|2|3|      step 0: the first layers of every state, of all pages
    steps          0      0 1 1      0          0 1 1       step 1: the next ones ...

A pass may begin as soon as the load does, and waits for layer k of a state when it reaches it. Copies nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Condition

import torch

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec, Part
from stepwell.transfer.page_tables import PagePairs, Piece

LONGEST_WAIT_S = 30.0  # the maximum time of a copy: a worker that has not queued it by then hangs
STEP_BYTES = 4 * 2**20  # of each state, or more: some 70 us on a bus, longer than it takes to queue a copy


class LayerEvents:
    """When each layer of one load is complete. From any thread; valid for as long as it is referenced."""

    def __init__(
        self, step_of: Mapping[str, Sequence[int]], events: Sequence[torch.cuda.Event], device: torch.device | None = None
    ) -> None:
        self._device = device
        self._step_of = step_of
        self._events = events
        self._num_queued = 0  # steps whose events are recorded: a stream must not wait for others
        self._changed = Condition()

    def record(self, step: int, stream: torch.cuda.Stream) -> None:
        """Records that all copies of a step, and of those before, are queued on this stream."""
        self._events[step].record(stream)
        self._end_waits(step + 1)

    def queued(self) -> None:
        """Records that no more steps will come, also if some failed: ends all waiting."""
        self._end_waits(len(self._events))

    def _end_waits(self, steps: int) -> None:
        with self._changed:
            self._num_queued = steps
            self._changed.notify_all()

    def wait(self, state: str, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Makes what is queued from now on on `stream`, or on the device's current one, wait for one layer of a state, as
        `batch.rows(state, layer)` counts them.

        A state that is not part of the load needs no wait. Blocks only until the layer's copies are queued. Raises TimeoutError
        if that takes too long: the results of the pass must not be used then.
        """
        if state in self._step_of:
            self._wait(self._step_of[state][layer], stream or torch.cuda.current_stream(self._device))

    def arrived(self, state: str, layer: int) -> bool:
        """Whether its bytes have arrived."""
        if state not in self._step_of:
            return True
        step = self._step_of[state][layer]
        return step < self._num_queued and self._events[step].query()

    def _wait(self, step: int, stream: torch.cuda.Stream) -> None:
        if step >= self._num_queued:
            with self._changed:
                if not self._changed.wait_for(lambda: step < self._num_queued, timeout=LONGEST_WAIT_S):
                    raise TimeoutError(f"copies of step {step} were not queued within {LONGEST_WAIT_S:.0f} s")
        stream.wait_event(self._events[step])

    def __repr__(self) -> str:
        return f"LayerEvents({', '.join(self._step_of)}, steps={len(self._events)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSteps:
    """The pieces to copy in each step, and the step that completes each layer of a state."""

    steps: tuple[tuple[Piece, ...], ...]
    step_of: Mapping[str, Sequence[int]]

    @property
    def total_bytes(self) -> int:
        return sum(piece.total_bytes for pieces in self.steps for piece in pieces)


def layer_steps(spec: ModelSpec, loads: Sequence[tuple[Kind, PagePairs]], *, step_bytes: int | None = None) -> LayerSteps:
    """Divides a load into steps: the layers of the state with most layers, or fewer steps if they would be too small."""
    cached = {state.name for state in spec.states}
    parts = {kind: [part for part in spec.device_parts(kind) if part.state in cached] for kind, _ in loads}
    states = [part for of_kind in parts.values() for part in of_kind]
    total = sum(pairs.whole().total_bytes for _, pairs in loads)
    least = (step_bytes or STEP_BYTES) * max(len(states), 1)
    count = min(total // least, max((part.layers for part in states), default=1))
    if count < 2:
        whole = tuple(pairs.whole() for _, pairs in loads)
        return LayerSteps(steps=(whole,), step_of={part.state: [0] * part.layers for part in states})
    cuts = {part.state: _cuts(spec, part, count) for part in states}
    steps = tuple(
        tuple(
            Piece(pairs=pairs, start=start, size_bytes=size)
            for kind, pairs in loads
            for part in parts[kind]
            for start, size in [_bytes_of_layers(part, *cuts[part.state][step : step + 2])]
            if size
        )
        for step in range(count)
    )
    return LayerSteps(steps=steps, step_of={part.state: _step_of_layers(cuts[part.state]) for part in states})


def _cuts(spec: ModelSpec, part: Part, count: int) -> list[int]:
    """The layer of a part at which each step begins, and the number of layers. Layer l of n comes with step l * count / n."""
    if not spec.state(part.state).required:
        return [0] * count + [part.layers]  # it is needed only after everything else has arrived
    if not _layers_are_ranges(part):
        return [0] + [part.layers] * count  # the whole part, with its first layer
    return [-(-part.layers * step // count) for step in range(count + 1)]


def _layers_are_ranges(part: Part) -> bool:
    """Whether a layer's rows are contiguous, after those of the previous layer."""
    return part.layers == 1 or (part.rows - 1) * part.row_stride + part.row_bytes <= part.layer_stride


def _bytes_of_layers(part: Part, first: int, end: int) -> tuple[int, int]:
    """Where these layers begin in a page, and how many bytes they have."""
    if (first, end) == (0, part.layers):
        return part.offset, part.size_bytes
    stop = part.size_bytes if end == part.layers else end * part.layer_stride
    return part.offset + first * part.layer_stride, max(stop - first * part.layer_stride, 0) if end > first else 0


def _step_of_layers(cuts: Sequence[int]) -> list[int]:
    return [step for step, (first, end) in enumerate(pairwise(cuts)) for _ in range(first, end)]
