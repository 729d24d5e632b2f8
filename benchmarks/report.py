"""What benchmarks report: rows of figures, some with a goal, as tables and as JSON with the machine and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

ROOT = Path(__file__).parents[1]

Figures = Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`value` must be at least `limit`, or with `most` at most."""

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
    """All calls of one kernel in a step."""

    name: str
    calls: float
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case. `note` names what was left out and why; `kernels` are those that took longest, where a profile was made."""

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
    """One column for each figure of any row."""
    columns = list(dict.fromkeys(name for row in rows for name in row.figures))
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("note")
    for row in rows:
        table.add_row(row.what, *(_shown(row.figures.get(column, "")) for column in columns), row.note)
    return table


def kernels_of(rows: Sequence[Row]) -> Table | None:
    """The kernels of every case with a profile; None where there is none."""
    table = Table(title="Kernels of a step that took longest", title_justify="left")
    for head in ("case", "kernel", "calls", "us"):
        table.add_column(head, justify="right" if head in ("calls", "us") else "left")
    for row in rows:
        for number, kernel in enumerate(row.kernels):
            table.add_row("" if number else row.what, kernel.name[:100], _shown(kernel.calls), _shown(kernel.us))
    return table if table.row_count else None


def goals_of(parts: Mapping[str, Sequence[Row]]) -> Table:
    table = Table(title="Goals", title_justify="left")
    for head in ("part", "case", "value", "goal", ""):
        table.add_column(head, justify="right" if head == "value" else "left")
    for part, rows in parts.items():
        for row in rows:
            if row.goal is not None:
                table.add_row(part, row.what, _shown(row.goal.value), str(row.goal), "met" if row.goal.met else "MISSED")
            elif row.note:
                table.add_row(part, row.what, "-", "", row.note)
    return table


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a run was measured on, for the JSON with its figures."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    found: dict[str, Any] = {
        "cpu": platform.machine(), "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
        "load": os.getloadavg(), "commit": commit or None,
    }  # fmt: skip
    try:
        import torch
    except ModuleNotFoundError:
        return found
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return found | {"torch": torch.__version__, "threads": torch.get_num_threads(), "gpu": gpu}


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
