"""`stepwell spec`: prints the states of a model and their sizes, from its `ModelSpec`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from fractions import Fraction
from typing import TYPE_CHECKING

from stepwell.base.errors import ConfigError
from stepwell.base.ids import CACHED_KINDS, Kind
from stepwell.base.spec import ModelSpec, StateSpec
from stepwell.base.spec.families import KV_DTYPES
from stepwell.base.spec.narrow import CHECKPOINT_DTYPES
from stepwell.base.spec.presets import load_spec, preset_names
from stepwell.base.units import format_bytes
from stepwell.cli.command import Command, printable

if TYPE_CHECKING:
    from rich.table import Table

_PIPE_WIDTH = 120  # columns if the output is not a terminal


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME_OR_CONFIG", help="a preset, a config.json, or its directory")
    parser.add_argument("--kv-dtype", metavar="DTYPE", help=f"dtype of keys and values: {', '.join(KV_DTYPES)}")
    parser.add_argument(
        "--checkpoint-dtype",
        choices=CHECKPOINT_DTYPES,
        help="store checkpoints in eight bits on the host and below (default: exact)",
    )
    parser.add_argument("--page-tokens", type=int, metavar="N", help="tokens per page (default: the model's own)")
    parser.add_argument("--draft", action="store_true", help="include the state of the model's own draft layers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--list", action="store_true", help="list the presets and exit")


def run(args: Namespace) -> int:
    if args.list:
        print("\n".join(preset_names()))
        return 0
    if args.model is None:
        raise ConfigError("name a model: `stepwell spec NAME_OR_CONFIG`, or `stepwell spec --list` for all presets")
    spec = load_spec(args.model, kv_dtype=args.kv_dtype, page_tokens=args.page_tokens, draft=args.draft)
    spec = spec.with_checkpoint_dtype(args.checkpoint_dtype)
    if args.json:
        print(json.dumps(as_json(spec), indent=2))
    else:
        _print_table(spec)
    return 0


def as_json(spec: ModelSpec) -> dict[str, object]:
    """The spec as JSON values, with unrounded figures."""
    return {
        "name": spec.name,
        "page_tokens": spec.page_tokens,
        "align": spec.align,
        "boundary_step": spec.boundary_step,
        "window_page_tokens": spec.window_page_tokens if spec.window_tokens else 0,
        "bytes_per_token": _number(spec.bytes_per_token),
        "checkpoint_bytes": spec.checkpoint_bytes(),
        "checkpoint_dtype": None if spec.narrow is None else spec.narrow.dtype,
        "object_bytes": {kind.label: spec.object_bytes(kind) for kind in CACHED_KINDS},
        "fingerprint": spec.fingerprint,
        "states": [_state_json(spec, state) for state in spec.states],
    }


def _state_json(spec: ModelSpec, state: StateSpec) -> dict[str, object]:
    return {
        "name": state.name,
        "shape": str(state.shape),
        "layers": state.layers,
        "row_bytes": state.row_bytes,
        "dtype": state.dtype,
        "required": state.required,
        "align": state.align,
        "replicated": state.replicated,
        "shards": state.shards,
        "bytes_per_token": _number(spec.state_bytes_per_token(state)),
        "page_bytes": _page_bytes(spec, state),
        "checkpoint_bytes": spec.state_checkpoint_bytes(state),
    }


def _page_bytes(spec: ModelSpec, state: StateSpec) -> int:
    """The state's share of one prefix or window page; points have no pages."""
    return sum(part.size_bytes for kind in (Kind.PREFIX, Kind.WINDOW) for part in spec.parts(kind) if part.state == state.name)


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def _print_table(spec: ModelSpec) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    console.print(_table(spec))
    for line in _notes(spec):
        console.print(line, markup=False)


def _table(spec: ModelSpec) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=f"{escape(printable(spec.name))}, pages of {spec.page_tokens} tokens", title_justify="left", show_footer=True
    )
    table.add_column("state", "total", no_wrap=True)
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("ranks")
    footers = {
        "layers": "",
        "row": "",
        "B/token": f"{round(spec.bytes_per_token):,}",
        "page": "",  # prefix and window pages are different objects: their sums are below the table
        "checkpoint": format_bytes(spec.checkpoint_bytes()),
        "align": f"{spec.align}",
    }
    for header, footer in footers.items():
        table.add_column(header, footer, justify="right")
    for state in spec.states:
        table.add_row(*_cells(spec, state))
    return table


def _cells(spec: ModelSpec, state: StateSpec) -> list[str]:
    per_token = spec.state_bytes_per_token(state)
    sizes = (_page_bytes(spec, state), spec.state_checkpoint_bytes(state))
    return [
        state.name if state.required else f"{state.name} (optional)",
        str(state.shape),
        state.dtype,
        "replicated" if state.replicated else f"{' + '.join(dict.fromkeys(str(each.units) for each in state.pieces))} shards",
        str(state.layers),
        f"{state.row_bytes:,}",
        f"{round(per_token):,}" if per_token else "-",
        *(format_bytes(size) if size else "-" for size in sizes),
        str(state.align),
    ]


def _notes(spec: ModelSpec) -> list[str]:
    objects = ", ".join(f"{kind.label} {format_bytes(size)}" for kind in Kind if (size := spec.object_bytes(kind)))
    lines = [
        f"objects       {objects}",
        f"boundaries    every {spec.boundary_step} tokens (pages of {spec.page_tokens}, alignment {spec.align})",
        f"fingerprint   {spec.fingerprint}",
    ]
    if spec.narrow is not None:
        exact = format_bytes(spec.with_checkpoint_dtype(None).checkpoint_bytes())
        lines.insert(1, f"checkpoints   {spec.narrow.dtype} on the host and in stores; {exact} on the device")
    if spec.window_tokens:
        lines.insert(1, f"window pages  {spec.window_page_tokens} tokens each, for a window of {spec.window_tokens}")
    return lines


COMMAND = Command(
    name="spec", summary="Print the state of a model per token and checkpoint, in bytes.", configure=configure, run=run
)
