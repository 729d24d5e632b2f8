"""Who asks the cluster of the demo: a turn whose server was killed is asked again, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from demo_cluster import play
from demo_cluster.parts import Cluster
from demo_cluster.play import _Player, main
from stepwell.base.errors import StepwellError
from stepwell.cli.demo.script import turns
from stepwell.cli.demo.server import Reply

FIRST, SECOND = turns(1)


class Decode:
    def __init__(self, *, answering: bool) -> None:
        self.answering, self.alive = answering, True

    def is_answering(self) -> bool:
        return self.answering

    def kill(self) -> None:
        self.alive = False


class Router:
    """Cuts an answer off when its server is gone after the first word; fails `fails` times first."""

    def __init__(self, decodes: list[Decode], *, fails: int = 0) -> None:
        self._decodes, self.fails = decodes, fails

    def ask(self, history: list[Any], *, max_tokens: int, at_first_word: Callable[[], None]) -> Reply:
        if self.fails:
            self.fails -= 1
            raise OSError("no server can be reached")
        at_first_word()
        answering = next(each for each in self._decodes if each.answering)
        if not answering.alive:
            answering.answering, self._decodes[1].answering = False, True
            raise StepwellError("the server answered: it is gone")
        return Reply(text="x", first_token_s=0.1, prompt_tokens=1, device=0, host=0, store=0)


def player(*, fails: int = 0) -> tuple[_Player, list[Decode]]:
    decodes = [Decode(answering=True), Decode(answering=False)]
    router: Any = Router(decodes, fails=fails)
    known: Any = decodes
    prefill: Any = None
    return _Player(Cluster(router=router, prefill=prefill, decodes=known, store=()), 8, kill_at=SECOND), decodes


def test_the_server_that_answers_is_killed_and_the_other_is_asked() -> None:
    made, (killed, other) = player()
    made.ask(FIRST, [])
    made.ask(SECOND, [])
    assert made.answered == [("decode 1", 1), ("decode 2", 2)]
    assert not killed.alive and other.alive


def test_any_other_turn_is_asked_once() -> None:
    made, _ = player(fails=1)
    with pytest.raises(OSError, match="no server"):
        made.ask(FIRST, [])
    assert made.answered == []


def test_a_missing_library_is_named_before_a_router_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(play, "why_not", lambda: "libibverbs.so.1 is missing")
    assert main(["--router", "/no/router"]) == 2
    said = capsys.readouterr().err
    assert "libibverbs.so.1 is missing" in said and "router" not in said
