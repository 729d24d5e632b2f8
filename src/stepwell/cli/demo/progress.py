"""Progress of a demo: bars on a terminal, a plain line for each step in a file or a pipe.

Bars go to stderr and vanish; lines go to stdout, at once, and stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from stepwell.cli.demo.script import Turn
from stepwell.cli.demo.server import Reply

if TYPE_CHECKING:
    from rich.progress import Progress


class Watch(Protocol):
    """Notified of every step, in order."""

    def begin(self, life: str, what: str) -> None: ...

    def turn(self, turn: Turn, reply: Reply) -> None: ...


@contextmanager
def watching(turns: int, lives: Sequence[str]) -> Iterator[Watch]:
    """Progress of a demo with `turns` turns in each life."""
    if not sys.stdout.isatty():
        yield Lines(turns)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield _Bars(progress, turns, lives)


class Lines:
    """One line for each step."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._life, self._done = "", 0

    def begin(self, life: str, what: str) -> None:
        self._life, self._done = life, 0
        print(f"{life}: {what}", flush=True)

    def turn(self, turn: Turn, reply: Reply) -> None:
        self._done += 1
        print(
            f"{self._life} {self._done}/{self._turns}: {turn.person} {turn.number}, {reply.prompt_tokens} prompt tokens, "
            f"{reply.computed} computed, first word after {reply.first_token_s:.2f} s",
            flush=True,
        )


class _Bars:
    """One bar for each life."""

    def __init__(self, progress: Progress, turns: int, lives: Sequence[str]) -> None:
        self._progress = progress
        self._tasks = {life: progress.add_task(life, total=turns) for life in lives}
        self._life = lives[0]

    def begin(self, life: str, what: str) -> None:
        self._life = life

    def turn(self, turn: Turn, reply: Reply) -> None:
        self._progress.advance(self._tasks[self._life])
