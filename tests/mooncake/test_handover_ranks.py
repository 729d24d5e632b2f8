"""Servers with a role whose model is on two ranks hand over as those of one rank do, also after a rank was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from asking import ARGUMENTS, client, complete, hand_over, prompt_of, stored, text_of

from stepwell.cli.demo.server import Server, serving
from waiting import wait_until

TWO = ("--tensor-parallel", "2", "--restart-workers")


class Trio:
    """A prefill server of two ranks, and decode servers of two ranks and of one. Killed at the end."""

    def __init__(self, folder: Path, lives: ExitStack) -> None:
        self.server: Server = lives.enter_context(serving([*ARGUMENTS, *TWO, "--role", "prefill"], folder / "prefill.log"))
        self.prefill = lives.enter_context(client(self.server.address))
        peer = self.server.address.removeprefix("http://")
        decode = [*ARGUMENTS, "--role", "decode", "--peer", peer, "--prefetch-policy", "wait_complete"]
        self.decodes = [
            lives.enter_context(client(lives.enter_context(serving([*decode, *ranks], folder / f"decode{at}.log")).address))
            for at, ranks in enumerate((TWO, ()))
        ]

    def computed_anew(self, prompt: str) -> str:
        return text_of(complete(self.prefill, prompt, 12, cache_salt="computed anew"))


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with ExitStack() as lives:
        yield Trio(tmp_path_factory.mktemp("trio"), lives)


def must_go_on(decode: httpx.Client, trio: Trio, prompt: str, expected: str) -> None:
    answer = complete(decode, prompt, 12, kv_transfer_params=hand_over(trio.prefill, prompt))
    assert stored(answer) > answer["usage"]["prompt_tokens"] // 2
    assert text_of(answer) == expected


def test_two_ranks_hand_over_to_two_and_to_one(trio: Trio) -> None:
    prompt = prompt_of("shares")
    for decode in trio.decodes:
        must_go_on(decode, trio, prompt, trio.computed_anew(prompt))


def test_what_was_computed_before_a_rank_was_killed_is_handed_over_behind_it(trio: Trio) -> None:
    prompt = prompt_of("losses")
    expected = trio.computed_anew(prompt)
    complete(trio.prefill, prompt, 1)
    trio.server.wait_until_stored()
    os.kill(trio.server.state()["ranks"]["pids"][1], signal.SIGKILL)
    wait_until(lambda: trio.server.state()["ranks"]["losses"] == 1, "the loss of a rank", pause_s=0.05)
    wait_until(lambda: trio.prefill.get("/ready").status_code == 200, "new ranks", pause_s=0.05)
    again = complete(trio.prefill, prompt, 1)["usage"]["prompt_tokens_details"]
    assert again["host_tokens"] > 0, "its host memory is as it was"
    for decode in trio.decodes:
        must_go_on(decode, trio, prompt, expected)
