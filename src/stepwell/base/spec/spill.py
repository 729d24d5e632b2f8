"""Which rows of a prefix page may be on the host alone, and what the device keeps of such a page instead.

    host, store   |-- kv --|-- index --|                      one object, as without a spill
    device ROWS   |-- kv --|                                  may be missing: the rows are then read on the host
    device PREFIX          |-- index --|-- slot --|- header -|    always there; what follows the index is the device's own

Says nothing about when rows are on the host alone: that is decided in `tiers`. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stepwell.base.errors import SpecError
from stepwell.base.ids import Kind
from stepwell.base.spec.shapes import Prefix
from stepwell.base.spec.states import Part, StateSpec, part_of

SLOT = "slot"  # of a PREFIX page on the device: int32 [group][row], where to look for a row among the hot ones
HEADER = "header"  # of the same: three int32, as in `HEADER_FIELDS`
HEADER_FIELDS = ("ordinal", "rows", "host")  # which page of its path it is; its ROWS page, its host page, or -1
WORD_BYTES = 4  # of both


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """States whose rows may be on the host alone: the first of a prefix page, with one row a token.

    `group_of` says for each layer of each of them whose selection of rows it follows. Layers of one group always need the same
    rows. Groups are numbered from 0.
    """

    states: tuple[str, ...]
    group_of: Mapping[str, tuple[int, ...]] = field(hash=False)

    def __post_init__(self) -> None:
        if not self.states or set(self.group_of) != set(self.states):
            raise SpecError(f"a spill names states and a group for each of their layers, got {self.states} and {self.group_of}")
        groups = {group for each in self.group_of.values() for group in each}
        if groups != set(range(len(groups))):
            raise SpecError(f"groups of layers must be numbered from 0 without gaps, got {sorted(groups)}")

    @property
    def num_groups(self) -> int:
        return 1 + max(group for groups in self.group_of.values() for group in groups)

    def check(self, model: str, states: tuple[StateSpec, ...]) -> None:
        """Raises SpecError unless these states of a model can spill so."""
        first = states[: len(self.states)]
        if not all(isinstance(state.shape, Prefix) for state in states):
            raise SpecError(f"model {model!r} has states that are not Prefix: rows of such models cannot spill")
        if tuple(state.name for state in first) != self.states or not all(s.shape == Prefix() and s.required for s in first):
            raise SpecError(
                f"what spills must be the first states of model {model!r}, required and with one row a token: "
                f"got {', '.join(self.states)}"
            )
        if any(len(self.group_of[state.name]) != state.layers for state in first):
            raise SpecError(f"the spill of model {model!r} needs a group for each layer of {', '.join(self.states)}")
        if {SLOT, HEADER} & {state.name for state in states}:
            raise SpecError(f"model {model!r} has a state called {SLOT!r} or {HEADER!r}, which the device needs for itself")

    def device_parts(self, prefix: tuple[Part, ...], page_tokens: int) -> dict[Kind, tuple[Part, ...]]:
        """What the device keeps, in two objects, of a page that has `prefix` parts where it is cached."""
        rows = tuple(part for part in prefix if part.state in self.states)
        rows_bytes = sum(part.size_bytes for part in rows)
        others = tuple(replace(part, offset=part.offset - rows_bytes) for part in prefix[len(rows) :])
        start = -(-sum(part.size_bytes for part in others) // WORD_BYTES) * WORD_BYTES
        slot = part_of(SLOT, start, layers=self.num_groups, rows=page_tokens, row_bytes=WORD_BYTES)
        end = slot.offset + slot.size_bytes
        header = part_of(HEADER, end, layers=1, rows=1, row_bytes=len(HEADER_FIELDS) * WORD_BYTES)
        return {Kind.ROWS: rows, Kind.PREFIX: (*others, slot, header)}
