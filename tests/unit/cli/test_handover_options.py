"""`--role` and what belongs to it, before anything is loaded."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from stepwell.base.errors import ConfigError
from stepwell.cli import serve
from stepwell.cli.handover import Handover, read

TOKEN = "0123456789abcdef"


def given(*arguments: str, **environment: str) -> Handover | None:
    parser = ArgumentParser()
    serve.configure(parser)
    return read(parser.parse_args(["--model", "m", *arguments]), environment)


def test_without_a_role_there_is_nothing() -> None:
    assert given() is None


def test_a_decode_server_knows_whom_to_ask() -> None:
    made = given("--role", "decode", "--peer", "a:1", "--peer", "[::1]:8000", STEPWELL_PEER_TOKEN=TOKEN)
    assert made is not None and made.peers == (("a", 1), ("::1", 8000)) and made.token == TOKEN


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--peer", "a:1"), "--role"),
        (("--peer-token", TOKEN), "--role"),
        (("--role", "prefill"), "peer token"),
        (("--role", "prefill", "--peer-token", "short"), "peer token"),
        (("--role", "prefill", "--peer-token", TOKEN + "\n"), "peer token"),
        (("--role", "prefill", "--peer-token", TOKEN, "--peer", "a"), "HOST:PORT"),
        (("--role", "prefill", "--peer-token", TOKEN, "--write-policy", "back"), "through"),
        (("--role", "decode", "--peer-token", TOKEN), "--peer HOST:PORT"),
        (("--role", "decode", "--peer-token", TOKEN, "--peer", "a"), "HOST:PORT"),
        (("--role", "decode", "--peer-token", TOKEN, "--peer", "a:70000"), "HOST:PORT"),
        (("--role", "decode", "--peer-token", TOKEN, "--peer", "a:1", "--store", "memory:"), "--store"),
    ],
)
def test_what_cannot_work_is_said_at_once(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        given(*arguments)
