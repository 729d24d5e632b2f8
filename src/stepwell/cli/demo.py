"""`stepwell demo`: conversations through the real cache, killed in the middle and resumed from disk, every byte checked.

    first life     some turns, device and host too small or too forgetful, everything also on disk
    kill -9        with no warning, right after an answer
    second life    a new process over the same directory: the same conversations go on

Starts and watches the two lives (`demo_life.py`); decides nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from stepwell.base.errors import ConfigError, StepwellError
from stepwell.base.units import format_bytes
from stepwell.cli.command import Command
from stepwell.cli.demo_life import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Which turns one process plays, and how it ends."""

    name: str
    first: int
    last: int
    killed: bool


def play(act: Act, directory: Path, users: int, seed: int, on_turn: Callable[[], None]) -> list[Turn]:
    """Runs one life as a process of its own; kills it without warning after its last turn if the act says so."""
    command = [sys.executable, "-m", "stepwell.cli.demo_life", str(directory)]
    numbers = {"users": users, "seed": seed, "first": act.first, "last": act.last}
    command += [f"--{name}={value}" for name, value in numbers.items()]
    turns: list[Turn] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            turns.append(Turn(**json.loads(line)))
            on_turn()
            if act.killed and len(turns) == users * (act.last - act.first + 1):
                process.kill()
                break
        status = process.wait()
    if len(turns) != users * (act.last - act.first + 1) or (status and not act.killed):
        raise StepwellError(f"the {act.name} life ended early, with status {status}: what it said is above")
    return turns


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("--users", type=int, default=4, help="people talking in turns (default 4)")
    parser.add_argument("--turns", type=int, default=4, help="turns each of them takes before the kill (default 4)")
    parser.add_argument("--seed", type=int, default=1, help="of the texts (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")


def _run(args: Namespace) -> int:
    if args.users < 1 or args.turns < 1 or args.users > 26:
        raise ConfigError(f"the demo needs 1 to 26 users and at least one turn, got {args.users} and {args.turns}")
    acts = [
        Act(name="first", first=1, last=args.turns, killed=True),
        Act(name="second", first=args.turns + 1, last=args.turns + 2, killed=False),
    ]
    with TemporaryDirectory(prefix="stepwell-demo-") as directory:
        lives = _watch(acts, Path(directory) / "store", args.users, args.seed)
    _show(acts, lives)
    if args.json is not None:
        document = [{"life": act.name, **asdict(turn)} for act, turns in zip(acts, lives, strict=True) for turn in turns]
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _watch(acts: list[Act], directory: Path, users: int, seed: int) -> list[list[Turn]]:
    from rich.console import Console
    from rich.progress import Progress

    lives = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for act in acts:
            task = progress.add_task(f"{act.name} life", total=users * (act.last - act.first + 1))
            lives.append(play(act, directory, users, seed, lambda task=task: progress.advance(task)))  # type: ignore[misc]
    return lives


def _show(acts: list[Act], lives: list[list[Turn]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="where each prompt's tokens came from", caption="at least one token of a prompt is always computed")
    for column in ("life", "turn", "user", "prompt", "device", "host", "store", "computed", "checked"):
        table.add_column(column, justify="left" if column in ("life", "user") else "right", no_wrap=True)
    for act, turns in zip(acts, lives, strict=True):
        for turn in turns:
            cells = (turn.prompt_tokens, turn.device, turn.host, turn.store, turn.computed)
            name = act.name if turn is turns[0] else ""
            table.add_row(
                name, str(turn.turn), turn.user.removeprefix("user "), *map(str, cells), format_bytes(turn.bytes_checked)
            )
        table.add_section()
    console.print(table)
    after = lives[1][: len(lives[1]) // 2]  # everybody's first turn after the kill
    asked, stored = sum(turn.prompt_tokens for turn in after), sum(turn.store for turn in after)
    every = [turn for turns in lives for turn in turns]
    prompt, computed = sum(turn.prompt_tokens for turn in every), sum(turn.computed for turn in every)
    checked = format_bytes(sum(turn.bytes_checked for turn in every))
    console.print(
        f"the first process was killed (SIGKILL) after turn {acts[0].last}. The second found its disk: everybody's next prompt "
        f"came to {stored / asked:.0%} from the store ({stored:,} of {asked:,} tokens)"
    )
    console.print(
        f"{(prompt - computed) / prompt:.0%} of {prompt:,} prompt tokens were reused; "
        f"{checked} read back, every byte as it was saved: [bold]yes[/bold]"
    )
    console.print(f"the last prompt, explained: it {every[-1].explanation}")


COMMAND = Command(
    name="demo",
    summary="play conversations through the cache, kill it, resume from disk, and check every byte",
    configure=_configure,
    run=_run,
)
