"""Which states of a checkpoint are kept in eight bits on the host and in stores, and how long their rows are there.

    device        |x x x x ...  fp32, bf16 or fp16 ... x x|                       as the model computes with it
    host, store   |v v v v ...|s s ..|      a byte for each number, then the largest number of each group of 64

Prefix pages stay as they are. So do states whose rows may hold anything: what a page of them holds beyond the last row was
never written. Data and arithmetic; the numbers themselves are made in `transfer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.errors import SpecError
from stepwell.base.spec.shapes import Point, Window
from stepwell.base.spec.states import StateSpec

CHECKPOINT_DTYPES = ("int8", "fp8")
GROUP = 64  # numbers with one scale
CODE_VERSION = 1  # raise it when the same numbers become other bytes
_WIDTH_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of what can be narrowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """Checkpoints in eight bits: whole numbers up to 127 of a group's largest (`int8`), or float8_e4m3fn of it (`fp8`)."""

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in CHECKPOINT_DTYPES:
            raise SpecError(f"a checkpoint can be kept in {' or '.join(CHECKPOINT_DTYPES)}, or exactly; got {self.dtype!r}")

    @property
    def identity(self) -> str:
        """What a fingerprint says of it."""
        return f"{self.dtype}/{GROUP}/{CODE_VERSION}"

    def takes(self, state: StateSpec) -> bool:
        """Whether it is kept in eight bits: required windows and points of plain numbers, if every row is written.

        Not what a compressor keeps, nor what a draft may have left out, nor rows of so few numbers that it would not pay.
        """
        whole = isinstance(state.shape, Window) or (isinstance(state.shape, Point) and state.shape.period is None)
        whole = whole and not state.may_be_unwritten
        return whole and state.required and state.dtype in _WIDTH_BYTES and _narrow_bytes(state) < state.row_bytes

    def row_bytes(self, state: StateSpec) -> int:
        """The bytes of one row, where it is cached."""
        return _narrow_bytes(state) if self.takes(state) else state.row_bytes


def _narrow_bytes(state: StateSpec) -> int:
    width = _WIDTH_BYTES[state.dtype]
    numbers = state.row_bytes // width
    return numbers + -(-numbers // GROUP) * width
