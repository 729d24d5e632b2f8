"""What a part found: rows of figures, some with a goal beside them; as a table, and as one table of all goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

Figures = Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`value` is what counts, at least `limit`; at most with `most`."""

    value: float
    limit: float
    most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.most else self.value >= self.limit

    def __str__(self) -> str:
        return f"{'at most' if self.most else 'at least'} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Of all calls of one kernel in a step."""

    name: str
    calls: float
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case. `note` says what was left out, and why; `kernels` are those that took longest, if a profile was made."""

    what: str
    figures: Figures = field(default_factory=dict)
    goal: Goal | None = None
    note: str = ""
    kernels: tuple[KernelTime, ...] = ()

    def as_json(self) -> dict[str, Any]:
        met = {} if self.goal is None else {"met": self.goal.met}
        written = asdict(self) | met
        return written if self.kernels else {name: value for name, value in written.items() if name != "kernels"}


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """All figures that any of the rows has, one column each."""
    columns = list(dict.fromkeys(name for row in rows for name in row.figures))
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("note")
    for row in rows:
        table.add_row(row.what, *(_said(row.figures.get(column, "")) for column in columns), row.note)
    return table


def kernels_of(rows: Sequence[Row]) -> Table | None:
    """What steps spend their time on, of every case with a profile; None where there is none."""
    table = Table(title="Kernels of a step that took longest", title_justify="left")
    for head in ("case", "kernel", "calls", "us"):
        table.add_column(head, justify="right" if head in ("calls", "us") else "left")
    for row in rows:
        for number, kernel in enumerate(row.kernels):
            table.add_row("" if number else row.what, kernel.name[:100], _said(kernel.calls), _said(kernel.us))
    return table if table.row_count else None


def goals_of(parts: Mapping[str, Sequence[Row]]) -> Table:
    table = Table(title="Goals", title_justify="left")
    for head in ("part", "case", "value", "goal", ""):
        table.add_column(head, justify="right" if head == "value" else "left")
    for part, rows in parts.items():
        for row in rows:
            if row.goal is not None:
                table.add_row(part, row.what, _said(row.goal.value), str(row.goal), "met" if row.goal.met else "MISSED")
            elif row.note:
                table.add_row(part, row.what, "-", "", row.note)
    return table


def _said(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
