"""Progress of the demo where no bars are drawn."""

from __future__ import annotations

import io
import sys

import pytest

from stepwell.cli.demo.command import COLD, FIRST, LIVES
from stepwell.cli.demo.progress import watching
from stepwell.cli.demo.script import turns
from stepwell.cli.demo.server import Reply

REPLY = Reply(text="x", first_token_s=0.25, prompt_tokens=90, device=16, host=0, store=64)


class Output(io.StringIO):
    """A file or a terminal that knows what has been flushed into it."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.flushed, self._terminal = "", terminal

    def isatty(self) -> bool:
        return self._terminal

    def flush(self) -> None:
        super().flush()
        self.flushed = self.getvalue()


def test_a_file_gets_a_line_for_every_step_as_soon_as_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Output(terminal=False)
    monkeypatch.setattr(sys, "stdout", out)
    asha, bo = turns(1)
    expected = ""
    with watching(2, LIVES) as watch:
        for step, line in (
            (lambda: watch.begin(FIRST, "starting a server"), "first life: starting a server\n"),
            (lambda: watch.turn(asha, REPLY), "first life 1/2: Asha 1, 90 prompt tokens, 10 computed, first word after 0.25 s\n"),
            (lambda: watch.turn(bo, REPLY), "first life 2/2: Bo 1, 90 prompt tokens, 10 computed, first word after 0.25 s\n"),
            (lambda: watch.begin(COLD, "again"), "cold: again\n"),
            (lambda: watch.turn(asha, REPLY), "cold 1/2: Asha 1, 90 prompt tokens, 10 computed, first word after 0.25 s\n"),
        ):
            step()
            expected += line
            assert out.flushed == expected


def test_a_terminal_gets_bars_and_no_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    (turn, _) = turns(1)
    with watching(2, LIVES) as watch:
        watch.begin(FIRST, "starting a server")
        watch.turn(turn, REPLY)
    assert out.getvalue() == ""
