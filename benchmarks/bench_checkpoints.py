"""Bytes of checkpoints: what eight bits do to logits, how fast numbers are turned, and what lossless packing would give. No GPU.

    make bench-checkpoints                        print the tables, write bench-checkpoints.json (a few minutes)
    make bench-checkpoints ARGS="--model PATH"    the same for weights of yours (Qwen3-Next, Gemma 3 and other hybrids)

"rms" and "worst" are what logits are off by, against their standard deviation, when a prompt resumes from a store; "KL" is the
mean divergence of what the next token is drawn from; "same" the share of greedy choices that stay. `exact` is resumed from the
store too, with checkpoints as they are: it must be 0.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from checkpoints.logits import answers_of, moved, prompts_of
from checkpoints.packing import disk_mb_s, packed, states_of
from checkpoints.random_models import NAMES
from engine.machine import machine
from stepwell.base.spec.narrow import CHECKPOINT_DTYPES
from stepwell.base.units import format_bytes
from stepwell.transfer.narrow_rows import RowCode

ROOT = Path(__file__).parents[1]
TURNED_BYTES = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", help=f"by name or path; repeat it (default: {', '.join(NAMES)})")
    parser.add_argument("--beginning", type=int, default=1024, help="tokens before the checkpoint (default: %(default)s)")
    parser.add_argument("--rest", type=int, default=4, help="tokens of each prompt behind it (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="that go on from there (default: %(default)s)")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--only", choices=("logits", "turning", "packing"), help="one of the tables")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-checkpoints.json", help="(default: bench-checkpoints.json)")
    args = parser.parse_args()
    console, found = Console(width=120), {"machine": machine("cpu")}
    parts = {"logits": _logits, "turning": _turning, "packing": _packing}
    for name, part in parts.items():
        if args.only in (None, name):
            found[name] = part(args, console)
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"written to {args.json.name}")


def _logits(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    table = _table("Logits of prompts that resume from a store", "model", "kept in", "a checkpoint", "rms", "worst", "KL", "same")
    rows = []
    for model in args.model or NAMES:
        prompts = prompts_of(model, beginning=args.beginning, rest=args.rest, count=args.prompts)
        _, exact = answers_of(model, None, prompts, args.answer)
        for dtype in (None, *CHECKPOINT_DTYPES):
            size, answers = answers_of(model, dtype, prompts, args.answer)
            off = moved(exact, answers)
            rows.append({"model": model, "dtype": dtype or "exact", "checkpoint_bytes": size, **asdict(off)})
            cells = (f"{off.rms:.4f}", f"{off.worst:.3f}", f"{off.divergence:.1e}", f"{off.same_choice:.0%} of {off.compared}")
            table.add_row(model, dtype or "exact", format_bytes(size), *cells)
        table.add_section()
    console.print(table)
    return rows


def _turning(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Bytes of exact numbers a second, on one thread."""
    table = _table("Numbers turned, MB/s of exact ones", "numbers", "kept in", "bytes", "save", "load")
    rows = []
    for wide, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x_RB = torch.randn(TURNED_BYTES // dtype.itemsize // 4096, 4096).to(dtype).view(torch.uint8)
        for name in CHECKPOINT_DTYPES:
            code = RowCode(name, wide)
            narrow_RB = code.encode(x_RB)
            save, load = _mb_s(lambda code=code, x=x_RB: code.encode(x)), _mb_s(lambda code=code, x=narrow_RB: code.decode(x))  # type: ignore[misc]
            share = narrow_RB.numel() / x_RB.numel()
            rows.append({"numbers": wide, "dtype": name, "share": share, "save_mb_s": save, "load_mb_s": load})
            table.add_row(wide, name, f"{share:.1%}", f"{save:,.0f}", f"{load:,.0f}")
    console.print(table)
    return rows


def _packing(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=ROOT) as directory:
        write, read = disk_mb_s(Path(directory))
    table = _table(
        f"Lossless packing, one thread, beside a disk of {write:,.0f} MB/s (write, synced) and {read:,.0f} (read)",
        "model", "state", "as", "compressor", "ratio", "limit", "pack MB/s", "unpack MB/s",
    )  # fmt: skip
    rows = []
    for model in args.model or NAMES:
        tokens = prompts_of(model, beginning=args.beginning, rest=0, count=1)[1]
        for state, x in states_of(model, tokens).items():
            for dtype in (torch.float32, torch.bfloat16):
                for each in packed(state, x, dtype):
                    rows.append({"model": model, **asdict(each)})
                    table.add_row(model, state, each.dtype, each.compressor, f"{each.ratio:.2f}", f"{each.limit:.2f}",
                                  f"{each.pack_mb_s:,.0f}", f"{each.unpack_mb_s:,.0f}")  # fmt: skip
        table.add_section()
    console.print(table)
    return {"disk_write_mb_s": write, "disk_read_mb_s": read, "packed": rows}


def _mb_s(work: Any) -> float:
    best = float("inf")
    for _ in range(3):
        started = perf_counter()
        work()
        best = min(best, perf_counter() - started)
    return TURNED_BYTES / best / 1e6


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        words = head in ("model", "kept in", "state", "as", "compressor", "numbers")
        table.add_column(head, justify="left" if words else "right")
    return table


if __name__ == "__main__":
    main()
