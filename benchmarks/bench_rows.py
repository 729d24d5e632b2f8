"""What rows in eight bits lose: bytes of a row, the error of what is read again, and what attention makes of it.

    make bench-rows        measure, print the table, write bench-rows.json (a few seconds, on the CPU)

Every format beside plain bf16, on the same random rows: normal ones, and heavy-tailed ones (Student's t of 3 degrees of freedom),
whose largest numbers take the scale away from the others. Errors are against the rows in fp32. "rms" is the error's root mean
square against that of the rows; "worst" the largest error of a number against the root mean square of its row; "attention" the
rms error of what queries see over all the rows, computed in float64; "picks" how many of the best rows an index still finds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stepwell.engine.passes.rows import PLAIN, RowFormat, latent_rows, shared_rows

ROOT = Path(__file__).parents[1]
SPREAD = 2.0  # of scores before their softmax: sharp enough that some rows count for much
DEGREES = 3.0

Draw = Callable[[tuple[int, int]], torch.Tensor]
DRAWS: dict[str, Draw] = {
    "normal": torch.randn,
    "heavy-tailed": lambda shape: torch.distributions.StudentT(torch.tensor(DEGREES)).sample(shape),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows of one state. `seen` channels of a row are what attention returns; an index is not attended to, but picked from."""

    name: str
    width: int
    exact: int
    heads: int
    kept: RowFormat
    seen: int | None = None

    @property
    def channels(self) -> int:
        return self.width + self.exact


CASES = (
    Case(name="latent 512 + 64", width=512, exact=64, heads=16, kept=latent_rows("fp8", 512, 64), seen=512),
    Case(name="index key 128", width=128, exact=0, heads=64, kept=latent_rows("fp8", 128, 0)),
    Case(name="DeepSeek-V4 448 + 64", width=448, exact=64, heads=16, kept=shared_rows("fp8", 448, 64), seen=512),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--context", type=int, default=4096, help="rows that are attended to (default: %(default)s)")
    parser.add_argument("--queries", type=int, default=32, help="tokens that attend (default: %(default)s)")
    parser.add_argument("--picks", type=int, default=512, help="rows that an index picks (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-rows.json", help="(default: bench-rows.json)")
    args = parser.parse_args()
    console, started = Console(width=110), time.monotonic()
    table = Table(title=f"Rows as they are read again, {args.context:,} of them", title_justify="left")
    for head in ("rows", "kept in", "drawn", "bytes", "of bf16", "rms", "worst", "attention", "picks"):
        table.add_column(head, justify="left" if head in ("rows", "kept in", "drawn") else "right")
    results = []
    for case in CASES:
        for drawn, draw in DRAWS.items():
            torch.manual_seed(args.seed)
            x_NC = draw((args.context, case.channels))
            query_QHC = torch.randn(args.queries, case.heads, case.channels)
            for name, kept in (("bf16", PLAIN), ("fp8", case.kept)):
                found = {"rows": case.name, "kept_in": name, "drawn": drawn, **measure(case, kept, x_NC, query_QHC, args.picks)}
                results.append(found)
                table.add_row(*_cells(found))
        table.add_section()
    console.print(table)
    machine = {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    settings = {"context": args.context, "queries": args.queries, "picks": args.picks, "seed": args.seed}
    args.json.write_text(json.dumps({"machine": machine, **settings, "results": results}, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; written to {args.json.name}")


def measure(case: Case, kept: RowFormat, x_NC: torch.Tensor, query_QHC: torch.Tensor, picks: int) -> dict[str, Any]:
    stored_NE = x_NC.bfloat16() if kept is PLAIN else kept.encode(x_NC)
    found_NC = kept.decode(stored_NE, torch.float32)
    error_NC = (found_NC - x_NC).double()
    row_bytes = stored_NE.shape[1] * stored_NE.element_size()
    scale = SPREAD / (case.channels**0.5 * float(x_NC.square().mean().sqrt()))
    right, mine = (query_QHC.double() @ each.double().T * scale for each in (x_NC, found_NC))
    attention = picked = None
    if case.seen is None:
        picked = _picked_alike(right, mine, picks)
    else:
        seen, expected = mine.softmax(-1) @ found_NC[:, : case.seen].double(), right.softmax(-1) @ x_NC[:, : case.seen].double()
        attention = _rms(seen - expected) / _rms(expected)
    return {
        "bytes": row_bytes, "of_bf16": row_bytes / (2 * case.channels), "rms": _rms(error_NC) / _rms(x_NC.double()),
        "worst": float((error_NC.abs().amax(1) / x_NC.double().square().mean(1).sqrt()).max()),
        "attention": attention, "picks_alike": picked,
    }  # fmt: skip


def _picked_alike(right_QHN: torch.Tensor, mine_QHN: torch.Tensor, picks: int) -> float:
    """Which part of the rows with the best scores is found, scores being what heads find positive, added up."""
    best, found = (each.relu().sum(1).topk(picks, dim=-1).indices for each in (right_QHN, mine_QHN))
    return sum(len(set(a) & set(b)) for a, b in zip(best.tolist(), found.tolist(), strict=True)) / best.numel()


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _cells(found: dict[str, Any]) -> list[str]:
    attention, picked = found["attention"], found["picks_alike"]
    return [
        found["rows"], found["kept_in"], found["drawn"], f"{found['bytes']:,}", f"{found['of_bf16']:.0%}", f"{found['rms']:.2%}",
        f"{found['worst']:.1%}", "" if attention is None else f"{attention:.2%}", "" if picked is None else f"{picked:.1%}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
