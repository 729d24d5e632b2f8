"""Runs the demo: the conversation three times, and a table with the cost of each turn.

    cold         every turn under a salt of its own, so that all of its prompt is computed
    first life   as two users talk; device and host are too small, the disk is not
    kill -9      once everything is on disk
    second life  a new process over the same disk: the same turns again

Starts servers, asks, compares; computes nothing itself.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from stepwell.base.errors import ConfigError
from stepwell.cli.command import Command
from stepwell.cli.demo.picture import draw
from stepwell.cli.demo.progress import Watch, watching
from stepwell.cli.demo.script import opening, turns
from stepwell.cli.demo.server import Reply, Server, serving

if TYPE_CHECKING:
    from rich.console import Console

REAL, RANDOM = "gemma-3-270m", "random-hybrid"
LIVES = FIRST, COLD, SECOND = "first life", "cold", "second life"  # in their order
SIZES = {  # device and host hold a part of the conversation, the disk all of it
    REAL: ("--device-memory", "42MiB", "--host-memory", "112MiB", "--store-budget", "1GiB", "--chunk-tokens", "256"),
    RANDOM: ("--device-memory", "12MiB", "--host-memory", "24MiB", "--store-budget", "256MiB"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One turn in all three lives."""

    person: str
    turn: int
    question: str
    cold: Reply
    first: Reply
    second: Reply

    @property
    def identical(self) -> bool:
        return self.cold.text == self.first.text == self.second.text


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model", help=f"a checkpoint by path or name (default: {REAL}, or {RANDOM} where that is not installed)"
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of each user (default: 5)")
    parser.add_argument("--answer", type=int, default=16, metavar="TOKENS", help="length of an answer (default: 16)")
    parser.add_argument(
        "--html", type=Path, default=Path("demo.html"), metavar="FILE", help="write an HTML page (default: demo.html)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")


def _run(args: Namespace) -> int:
    if args.turns < 1 or args.answer < 1:
        raise ConfigError(f"the demo needs at least one turn and one token, got {args.turns} and {args.answer}")
    from rich.console import Console

    console = Console()
    model = args.model or installed(console)
    with TemporaryDirectory(prefix="stepwell-demo-") as directory:
        rows = _play(model, args.turns, args.answer, Path(directory))
    _show(console, model, rows)
    args.html.write_text(draw(model, [_document(row) for row in rows]))
    console.print(f"the same as a picture: {args.html}")
    if args.json is not None:
        args.json.write_text(json.dumps({"model": model, "turns": [_document(row) for row in rows]}, indent=1) + "\n")
    return 0 if all(row.identical for row in rows) else 1


def installed(console: Console) -> str:
    """The real model where its weights are here, else a random one; says which, and why. Raises ModuleNotFoundError without
    PyTorch, which the server of either needs.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    from stepwell.engine.loading.known import find_known

    try:
        find_known(REAL, Path.home() / ".cache")
        return REAL
    except ConfigError as error:
        console.print(f"[bold]no real weights here[/bold] ({error}); using random ones instead: {RANDOM}", soft_wrap=True)
        return RANDOM


def _play(model: str, rounds: int, answer: int, directory: Path) -> list[Row]:
    """All turns three times."""
    sizes = SIZES.get(model, SIZES[REAL])
    arguments = ["--model", model, "--served-model-name", "demo", "--store", f"log:{directory / 'store'}"]
    arguments += [*sizes, "--prefetch-policy", "wait_complete"]  # on a busy machine too: this shows where states are
    arguments += ["--checkpoint-delay", "0"]  # every turn is asked again
    with watching(2 * rounds, LIVES) as watch:
        watch.begin(FIRST, "starting a server (some 10 s; a minute on a busy machine)")
        with serving(arguments, directory / "first.log") as server:
            first = _talk(server, rounds, answer, watch)
            watch.begin(COLD, "the same turns again, with nothing cached")
            cold = _talk(server, rounds, answer, watch, cold=True)
        watch.begin(SECOND, "the server was killed (-9); starting another on the same disk")
        with serving(arguments, directory / "second.log") as server:
            second = _talk(server, rounds, answer, watch)
    said = list(turns(rounds))
    return [
        Row(person=turn.person, turn=turn.number, question=turn.new[-1]["content"], cold=a, first=b, second=c)
        for turn, a, b, c in zip(said, cold, first, second, strict=True)
    ]


def _talk(server: Server, rounds: int, answer: int, watch: Watch, *, cold: bool = False) -> list[Reply]:
    """Both conversations to their ends. An answer is part of the next prompt."""
    histories: dict[str, list[dict[str, Any]]] = {}
    replies = []
    for number, turn in enumerate(turns(rounds)):
        history = histories.setdefault(turn.person, [opening()])
        history += turn.new
        replies.append(server.ask(history, max_tokens=answer, salt=f"cold {number}" if cold else None))
        history.append({"role": "assistant", "content": replies[-1].text})
        if not cold:
            server.wait_until_stored()
        watch.turn(turn, replies[-1])
    return replies


def _show(console: Console, model: str, rows: list[Row]) -> None:
    from rich import box
    from rich.table import Table

    console.print(
        f"Asha and Bo talk with one assistant in turns. Here is how Asha began; {model} is small, and may talk nonsense:"
    )
    console.print(f"  Asha: {rows[0].question}\n  {model}: {rows[0].second.text.strip()} ...", markup=False)
    table = Table(title="where the tokens of each prompt came from", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("", "turn", "prompt", "device", "host", "store", "computed", "same answer"):
        table.add_column(head, justify="left" if head in ("", "turn") else "right", no_wrap=True)
    for name, life in (("before", "first"), ("after kill -9", "second")):
        for row in rows:
            reply: Reply = getattr(row, life)
            sources = (reply.prompt_tokens, reply.device, reply.host, reply.store, reply.computed)
            label = name if row is rows[0] else ""
            table.add_row(label, f"{row.person} {row.turn}", *map(str, sources), "yes" if row.identical else "NO")
        table.add_section()
    console.print(table)
    asked, computed = sum(row.second.prompt_tokens for row in rows), sum(row.second.computed for row in rows)
    cold, warm = (median(getattr(row, life).first_token_s for row in rows) for life in ("cold", "second"))
    console.print(f"after the restart {1 - computed / asked:.0%} of {asked:,} prompt tokens were reused")
    console.print(f"median time to the first word: {cold:.2f} s when all is computed, {warm:.2f} s after the restart")
    same = "yes" if all(row.identical for row in rows) else "NO"
    console.print(f"answers computed, cached and after the restart identical: [bold]{same}[/bold]")


def _document(row: Row) -> dict[str, Any]:
    lives = {"cold": row.cold, "first": row.first, "second": row.second}
    replies = {name: asdict(reply) | {"computed": reply.computed} for name, reply in lives.items()}
    return {"person": row.person, "turn": row.turn, "question": row.question, "identical": row.identical, **replies}


COMMAND = Command(
    name="demo",
    summary="Serve a small hybrid model, kill it, resume from its disk, and compare every answer.",
    configure=_configure,
    run=_run,
    extra="serve",
)
