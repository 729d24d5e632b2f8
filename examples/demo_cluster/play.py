"""The same conversations on one server and on a cluster, and a table of what each turn cost.

    one server    every turn under a salt of its own, so that all of its prompt is computed
    the cluster   a router, a prefill and two decode servers; one decode server is killed (-9) in the middle of an answer,
                  which is asked again
    last server   one that starts over the same Mooncake cluster: the same turns again

Transfer engines listen on all interfaces and know no keys, so everything runs in a private network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from demo_cluster.parts import Cluster, cluster, find_smg
from demo_cluster.private_network import inside, why_not
from stepwell.base.errors import ConfigError, StepwellError
from stepwell.cli.command import EXIT_USER_ERROR
from stepwell.cli.demo.command import RANDOM, REAL, installed
from stepwell.cli.demo.progress import Watch, watching
from stepwell.cli.demo.script import Message, Turn, opening, turns
from stepwell.cli.demo.server import Reply, serving
from stepwell.jobs.children import start_child

if TYPE_CHECKING:
    from rich.console import Console

LIVES = ALONE, MANY, NEW = "one server", "the cluster", "last server"
SIZES = {
    REAL: ("--device-memory", "128MiB", "--host-memory", "192MiB", "--chunk-tokens", "256"),
    RANDOM: ("--device-memory", "24MiB", "--host-memory", "48MiB"),
}
AGAIN_S, PAUSE_S = 60.0, 0.5  # how long a turn is asked again after a server was killed, and how often
_CUT_OFF = (StepwellError, OSError, HTTPException)  # how an answer ends whose server is gone, or one that it cannot be asked for
CLEAN_UP_S = 30.0  # for what runs in the private network, after Ctrl-C
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One turn, played three times."""

    person: str
    turn: int
    alone: Reply
    many: Reply
    new: Reply
    answered_by: str
    asked: int  # times; more than once where a server was killed

    @property
    def identical(self) -> bool:
        return self.alone.text == self.many.text == self.new.text


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when all answers are the same, 1 when they differ, 2 when something is missing."""
    try:
        return _run(_arguments(argv))
    except StepwellError as error:
        print(f"demo-cluster: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _arguments(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="demo_cluster", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help=f"a checkpoint by path or name (default: {REAL}, or {RANDOM} where that is not installed)"
    )
    parser.add_argument("--turns", type=int, default=3, help="turns of each person (default: 3)")
    parser.add_argument("--answer", type=int, default=24, metavar="TOKENS", help="length of answers (default: 24)")
    parser.add_argument("--router", metavar="SMG", help="the program smg (default: the one on the path)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    parser.add_argument(
        "--this-network", action="store_true",
        help="run in the network of this machine, where all others can reach the ports of transfer engines",
    )  # fmt: skip
    return parser.parse_args(argv)


def _run(args: Namespace) -> int:
    if args.turns < 1 or args.answer < 2:
        raise ConfigError(f"the demo needs at least one turn and two tokens, got {args.turns} and {args.answer}")
    if not args.this_network and why_not():  # first: a router takes a download, and is of no use without these
        raise ConfigError(f"{why_not()}; --this-network needs no private network, but all others can then reach its ports")
    smg = find_smg(args.router)
    if not args.this_network:
        return _run_inside(args, smg)
    from rich.console import Console

    console, started = Console(), time.monotonic()
    model = args.model or installed(console)
    with TemporaryDirectory(prefix="stepwell-demo-") as directory:
        rows = _play(model, args.turns, args.answer, smg, Path(directory))
    _show(console, model, rows)
    console.print(f"the demo took {time.monotonic() - started:.0f} s")
    if args.json is not None:
        args.json.write_text(json.dumps({"model": model, "turns": [_document(row) for row in rows]}, indent=1) + "\n")
    return 0 if all(row.identical for row in rows) else 1


def _run_inside(args: Namespace, smg: str) -> int:
    """The same command in a private network. Ctrl-C reaches it too, and it is waited for while it cleans up."""
    again = ["--turns", str(args.turns), "--answer", str(args.answer), "--router", smg, "--this-network"]
    again += [each for name in ("model", "json") if getattr(args, name) for each in (f"--{name}", str(getattr(args, name)))]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = inside([sys.executable, "-m", "demo_cluster", *again])
    with start_child(command, env=os.environ | {"PYTHONPATH": path}) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLEAN_UP_S)
            raise
        finally:
            process.kill()


def _play(model: str, rounds: int, answer: int, smg: str, directory: Path) -> list[Row]:
    arguments = ["--model", model, "--served-model-name", "demo", *SIZES.get(model, SIZES[REAL])]
    said = list(turns(rounds))
    with watching(len(said), LIVES) as watch:
        watch.begin(ALONE, "starting one server, which computes every prompt from nothing")
        with serving(arguments, directory / "alone.log") as server:
            alone = _talk(said, watch, lambda turn, history: server.ask(history, max_tokens=answer, salt=_name(turn)))
        watch.begin(MANY, "starting Mooncake's master, a prefill server, two decode servers and the router")
        with cluster(arguments, smg, directory) as many:
            player = _Player(many, answer, kill_at=said[len(said) // 2])
            together = _talk(said, watch, player.ask)
            many.prefill.wait_until_stored()
            watch.begin(NEW, "starting a server over the same Mooncake cluster")
            for each in many.decodes:
                each.kill()
            waits = ["--prefetch-policy", "wait_complete"]
            with serving([*arguments, *many.store, *waits], directory / "new.log") as server:
                new = _talk(said, watch, lambda turn, history: server.ask(history, max_tokens=answer))
    return [
        Row(person=turn.person, turn=turn.number, alone=a, many=b, new=c, answered_by=by, asked=asked)
        for turn, a, b, c, (by, asked) in zip(said, alone, together, new, player.answered, strict=True)
    ]


def _talk(said: Sequence[Turn], watch: Watch, ask: Callable[[Turn, list[Message]], Reply]) -> list[Reply]:
    """All conversations to their ends. What the assistant said is part of what it is asked next."""
    histories: dict[str, list[Message]] = {}
    replies = []
    for turn in said:
        history = histories.setdefault(turn.person, [opening()])
        history += turn.new
        replies.append(ask(turn, history))
        history.append({"role": "assistant", "content": replies[-1].text})
        watch.turn(turn, replies[-1])
    return replies


def _name(turn: Turn) -> str:
    return f"{turn.person} {turn.number}"


class _Player:
    """Asks the router, notes who answers, and kills the decode server that answers one of the turns."""

    def __init__(self, many: Cluster, answer: int, *, kill_at: Turn) -> None:
        self._many, self._answer, self._kill_at = many, answer, kill_at
        self._names = {f"decode {number}": each for number, each in enumerate(many.decodes, 1)}
        self._answering = ""
        self.answered: list[tuple[str, int]] = []  # by whom, and asked how many times

    def ask(self, turn: Turn, history: list[Message]) -> Reply:
        """Again and again, where the server was killed that had begun to answer."""
        if turn is not self._kill_at:
            return self._ask(history, self._look, asked=1)
        try:
            return self._ask(history, self._kill, asked=1)
        except _CUT_OFF:
            asked, deadline = 2, time.monotonic() + AGAIN_S
        while True:
            try:
                return self._ask(history, self._look, asked=asked)
            except _CUT_OFF:
                if time.monotonic() > deadline:
                    raise
                asked += 1
                time.sleep(PAUSE_S)

    def _ask(self, history: list[Message], at_first_word: Callable[[], None], *, asked: int) -> Reply:
        reply = self._many.router.ask(history, max_tokens=self._answer, at_first_word=at_first_word)
        self.answered.append((self._answering, asked))
        return reply

    def _look(self) -> None:
        self._answering = next((name for name, each in self._names.items() if each.is_answering()), "?")

    def _kill(self) -> None:
        self._look()
        killed = self._names.pop(self._answering, None)
        if killed is not None:
            killed.kill()


def _show(console: Console, model: str, rows: Sequence[Row]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{model}: where each prompt's tokens came from", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for head in ("turn", "answered by", "prompt", "handed over", "memory", "computed", "s", "alone s", "same"):
        table.add_column(head, justify="left" if head in ("turn", "answered by") else "right", no_wrap=True)
    for row in rows:
        reply, by = row.many, row.answered_by + (" *" if row.asked > 1 else "")
        sources = (reply.prompt_tokens, reply.store, reply.device + reply.host, reply.computed)
        times = (f"{each.first_token_s:.2f}" for each in (reply, row.alone))
        table.add_row(f"{row.person} {row.turn}", by, *map(str, sources), *times, "yes" if row.identical else "NO")
    console.print(table)
    console.print("as decode servers saw it; seconds until the first word, alone: on one server, all computed")
    if any(row.asked > 1 for row in rows):
        console.print("*: the decode server that answered was killed (-9) after its first word; asked again, the other one did")
    asked, stored, computed = (sum(getattr(row.new, name) for row in rows) for name in ("prompt_tokens", "store", "computed"))
    console.print(f"a server started at the end computed {computed:,} of {asked:,} prompt tokens: {stored:,} came from the")
    console.print("Mooncake cluster, the others were in its memory by then")
    same = "yes" if all(row.identical for row in rows) else "NO"
    console.print(f"answers of one server, of the cluster and of the last server identical: [bold]{same}[/bold]")


def _document(row: Row) -> dict[str, Any]:
    lives = {"alone": row.alone, "many": row.many, "new": row.new}
    replies = {name: asdict(reply) | {"computed": reply.computed} for name, reply in lives.items()}
    about = {"identical": row.identical, "answered_by": row.answered_by, "asked": row.asked}
    return {"person": row.person, "turn": row.turn, **about, **replies}
