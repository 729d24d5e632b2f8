"""What a model remembers, as data: a list of states, and everything that follows from the list.

Sizes, the parts of a prefix page, legal boundaries and the fingerprint are all computed here from the
states alone. Knows no model by name, holds no bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import lcm

from stepwell.base.errors import SpecError
from stepwell.base.ids import CACHED_KINDS, Kind
from stepwell.base.spec.narrow import Narrow
from stepwell.base.spec.schedule import LayerSpec, Schedule, layers_of
from stepwell.base.spec.shapes import Point, Prefix, Shape, Window
from stepwell.base.spec.spill import Spill
from stepwell.base.spec.states import Part, StateSpec, part_of

MOST_RANKS_NAMED = 64  # that an error proposes
LAYOUT_VERSION = 1  # raise it when bytes inside an object change their meaning in a way that `Part` does not show


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All states of a model, cut into pages of `page_tokens` tokens."""

    name: str
    states: tuple[StateSpec, ...]
    page_tokens: int = 64
    spill: Spill | None = None  # not in the fingerprint: hosts and stores hold the same bytes with and without
    narrow: Narrow | None = None  # how checkpoints are kept on the host and in stores; None: as on the device
    schedule: Schedule = ()  # the states that each layer keeps; not in the fingerprint: it moves no bytes
    row_order: str | None = None  # how an engine orders the bytes inside rows, where it does so in a way of its own

    def __post_init__(self) -> None:
        if not self.states:
            raise SpecError(f"model {self.name!r} has no states: there is nothing to cache")
        names = [state.name for state in self.states]
        if len(set(names)) != len(names):
            raise SpecError(f"model {self.name!r} names a state twice: {', '.join(names)}")
        if self.page_tokens < 1:
            raise SpecError(f"page_tokens must be at least 1, got {self.page_tokens}")
        for state in self.states:
            ratio = state.shape.ratio if isinstance(state.shape, Prefix) else 1
            if self.page_tokens % ratio and ratio % self.page_tokens:
                raise SpecError(
                    f"page_tokens {self.page_tokens} does not fit model {self.name!r}: state {state.name!r} keeps one row per "
                    f"{ratio} tokens; choose a multiple or a divisor of {ratio}"
                )
        layers_of(self.schedule, self.states)  # raises SpecError
        if self.spill is not None:
            self.spill.check(self.name, self.states)
        if self.narrow is not None and not any(map(self.narrow.takes, self.states)):
            raise SpecError(
                f"model {self.name!r} has no window or point state that could be kept in {self.narrow.dtype}: "
                "leave the checkpoint dtype out"
            )

    def of_shape(self, shape: type[Shape]) -> tuple[StateSpec, ...]:
        return tuple(state for state in self.states if isinstance(state.shape, shape))

    def state(self, name: str) -> StateSpec:
        return next(state for state in self.states if state.name == name)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the model, in order; none for a spec that was made without a schedule."""
        return layers_of(self.schedule, self.states)

    # ---- boundaries -------------------------------------------------------------------------------

    @cached_property
    def align(self) -> int:
        """Every legal boundary is a multiple of this many tokens (and of the page)."""
        return lcm(*(state.align for state in self.states))

    @cached_property
    def boundary_step(self) -> int:
        return lcm(self.align, self.page_tokens)

    @cached_property
    def needs_checkpoint(self) -> bool:
        """True when prefix pages alone are not enough to resume."""
        return any(isinstance(s.shape, Window) and s.required for s in self.states) or bool(self.parts(Kind.POINT))

    @cached_property
    def free_step(self) -> int | None:
        """Boundaries at multiples of this need no checkpoint: no state has bytes of its own there. None when all need one."""
        if any(isinstance(s.shape, Window) and s.required for s in self.states):
            return None
        periods = [s.shape.period for s in self.states if isinstance(s.shape, Point) and s.point_rows(self.boundary_step)]
        return None if None in periods else lcm(self.boundary_step, *(period for period in periods if period is not None))

    def needs_checkpoint_at(self, boundary: int) -> bool:
        return boundary > 0 and (self.free_step is None or boundary % self.free_step != 0)

    def is_legal(self, boundary: int) -> bool:
        return boundary >= 0 and boundary % self.boundary_step == 0

    def floor(self, tokens: int) -> int:
        """The deepest legal boundary at or below `tokens`."""
        return tokens - tokens % self.boundary_step

    def usable(self, prompt_tokens: int) -> int:
        """The deepest boundary a prompt can resume from where at least one of its tokens is left to compute."""
        return self.floor(max(prompt_tokens - 1, 0))

    def needed_at(self, boundary: int) -> tuple[StateSpec, ...]:
        """The states that must have bytes at `boundary`, each in its own shape."""
        if boundary == 0:
            return ()
        return tuple(s for s in self.states if not isinstance(s.shape, Point) or s.shape.rows_at(boundary))

    # ---- windows ----------------------------------------------------------------------------------

    @cached_property
    def window_tokens(self) -> int:
        """The longest look-back of any window state, 0 without one: what a running request keeps."""
        return max((s.shape.tokens for s in self.states if isinstance(s.shape, Window)), default=0)

    @cached_property
    def checkpoint_window_tokens(self) -> int:
        """The longest look-back that resuming depends on, and that checkpoints keep. Optional windows get what that covers."""
        return max((s.shape.tokens for s in self.states if isinstance(s.shape, Window) and s.required), default=0)

    @cached_property
    def window_page_tokens(self) -> int:
        """Tokens of one window page: the largest divisor of the page that is not longer than the window."""
        longest = min(self.window_tokens or self.page_tokens, self.page_tokens)
        return next(size for size in range(longest, 0, -1) if self.page_tokens % size == 0)

    def window_span(self, boundary: int) -> range:
        """The window pages, by index on the path, that a checkpoint at `boundary` consists of."""
        if not self.window_tokens:
            return range(0)
        size = self.window_page_tokens
        return range(max(boundary - self.checkpoint_window_tokens, 0) // size, boundary // size)

    # ---- bytes ------------------------------------------------------------------------------------

    def parts(self, kind: Kind) -> tuple[Part, ...]:
        """The layout `[state][layer][row]` of one object of `kind`, as it is cached. Nothing for ROWS, which are the device's."""
        return self._parts[kind]

    def device_parts(self, kind: Kind) -> tuple[Part, ...]:
        """The same on the device, which differs where rows may spill (`spill.py`) or checkpoints are narrow (`narrow.py`)."""
        return self._device_parts[kind]

    def is_narrow(self, kind: Kind) -> bool:
        """Whether objects of `kind` hold other numbers where they are cached than on the device."""
        narrow = self.narrow
        return narrow is not None and any(narrow.takes(self.state(part.state)) for part in self.parts(kind))

    def cached_span(self, kind: Kind) -> tuple[int, int]:
        """Where the cached bytes of a device object of `kind` lie in a host page: from which byte on, up to which.

        In the device object itself they are the first bytes.
        """
        if self.spill is None or kind not in (Kind.PREFIX, Kind.ROWS):
            return 0, self.object_bytes(kind)  # of a narrow kind: what crosses the bus, in other numbers
        rows = self.device_bytes(Kind.ROWS)
        return (0, rows) if kind is Kind.ROWS else (rows, self.object_bytes(Kind.PREFIX))

    @cached_property
    def _parts(self) -> dict[Kind, tuple[Part, ...]]:
        return {kind: tuple(self._lay_out(kind)) for kind in CACHED_KINDS} | {Kind.ROWS: ()}

    @cached_property
    def _device_parts(self) -> dict[Kind, tuple[Part, ...]]:
        if self.narrow is not None:
            return replace(self, narrow=None)._device_parts
        if self.spill is None:
            return self._parts
        return self._parts | self.spill.device_parts(self.parts(Kind.PREFIX), self.page_tokens)

    def _lay_out(self, kind: Kind) -> list[Part]:
        parts, offset = [], 0
        for state in self.states:
            rows = self._rows(state, kind)
            if rows:
                parts.append(part_of(state.name, offset, layers=state.layers, rows=rows, row_bytes=self._row_bytes(state)))
                offset += parts[-1].size_bytes
        return parts

    def _row_bytes(self, state: StateSpec) -> int:
        """The bytes of a row where it is cached."""
        return state.row_bytes if self.narrow is None else self.narrow.row_bytes(state)

    def _rows(self, state: StateSpec, kind: Kind) -> int:
        match (kind, state.shape):
            case (Kind.PREFIX, Prefix()):
                return state.rows_per_page(self.page_tokens)
            case (Kind.WINDOW, Window()):
                return self.window_page_tokens
            case (Kind.POINT, Point()):
                return state.point_rows(self.boundary_step)
        return 0

    def object_bytes(self, kind: Kind) -> int:
        """Payload bytes of one object of `kind`, as it is cached; 0 when the model has none."""
        return self._object_bytes[kind]

    def device_bytes(self, kind: Kind) -> int:
        """The same on the device."""
        return self._device_bytes[kind]

    @cached_property
    def _object_bytes(self) -> dict[Kind, int]:
        return {kind: sum(part.size_bytes for part in self.parts(kind)) for kind in Kind}

    @cached_property
    def _device_bytes(self) -> dict[Kind, int]:
        return {kind: max((part.offset + part.size_bytes for part in self.device_parts(kind)), default=0) for kind in Kind}

    def state_bytes_per_token(self, state: StateSpec) -> Fraction:
        """Bytes that grow with each token; only Prefix states grow."""
        return Fraction(state.layers * state.row_bytes, state.shape.ratio) if isinstance(state.shape, Prefix) else Fraction(0)

    def state_checkpoint_bytes(self, state: StateSpec, boundary: int | None = None) -> int:
        """Bytes this state adds to a checkpoint at `boundary`, or to the largest one, as it is cached."""
        match state.shape:
            case Window(tokens=tokens):
                kept = min(tokens, self.checkpoint_window_tokens)
                return state.layers * self._row_bytes(state) * (kept if boundary is None else min(kept, boundary))
            case Point():
                rows = state.point_rows(self.boundary_step) if boundary is None else state.shape.rows_at(boundary)
                return state.layers * self._row_bytes(state) * rows
        return 0

    @property
    def bytes_per_token(self) -> Fraction:
        return sum((self.state_bytes_per_token(state) for state in self.states), Fraction(0))

    def checkpoint_bytes(self, boundary: int | None = None) -> int:
        """Bytes of window and point state one must keep to resume at `boundary`, or at the costliest one, as they are cached."""
        return sum(self.state_checkpoint_bytes(state, boundary) for state in self.states)

    # ---- identity and ranks -----------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Differs whenever two specs would read each other's bytes wrongly: where each row lies counts, the name does not."""
        facts: dict[str, object] = {
            "layout": LAYOUT_VERSION,
            "page_tokens": self.page_tokens,
            "states": [_facts(state) for state in self.states],
            "parts": {kind.label: [asdict(part) for part in self.parts(kind)] for kind in CACHED_KINDS},
        }
        if self.row_order is not None:
            facts["row_order"] = self.row_order
        if self.narrow is not None:
            facts["narrow"] = self.narrow.identity
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.blake2b(canonical, digest_size=16).hexdigest()

    def for_ranks(self, ranks: int) -> ModelSpec:
        """What one of `ranks` equal ranks keeps: a share of sharded states, all of replicated ones.

        `StateSpec.spans_of` says which bytes of whole rows those are. Raises SpecError, which says how many ranks could.
        """
        if ranks < 1:
            raise SpecError(f"ranks must be at least 1, got {ranks}")
        try:
            return replace(self, states=tuple(state.for_ranks(ranks) for state in self.states))
        except SpecError as error:
            units = [piece.units for state in self.states for piece in state.pieces]
            fitting = [
                each
                for each in range(1, min(max(units), MOST_RANKS_NAMED) + 1)
                if all(n % each == 0 or each % n == 0 for n in units)
            ]
            words = f"{', '.join(map(str, fitting))} or a multiple of {lcm(*units)}"
            raise SpecError(f"{error}; for model {self.name!r} use {words}") from None

    def with_page_tokens(self, page_tokens: int) -> ModelSpec:
        return replace(self, page_tokens=page_tokens)

    def with_checkpoint_dtype(self, dtype: str | None) -> ModelSpec:
        """The same with checkpoints in eight bits on the host and in stores. Raises SpecError where there are none to narrow."""
        return replace(self, narrow=None if dtype is None else Narrow(dtype=dtype))


def _facts(state: StateSpec) -> dict[str, object]:
    """What a fingerprint says of a state."""
    facts = asdict(state) | {"shape": str(state.shape)}
    del facts["cuts"], facts["may_be_unwritten"]
    return facts
