"""Where `stepwell serve` publishes: nowhere by default, and on this machine without an address."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace

import pytest

from stepwell.base.errors import ConfigError
from stepwell.base.extras import install
from stepwell.cli import kv_events
from waiting import PATIENCE_S


def parsed(*argv: str) -> Namespace:
    parser = ArgumentParser()
    kv_events.configure(parser)
    return parser.parse_args(argv)


def test_nothing_is_published_unless_asked_for() -> None:
    assert kv_events.open_socket(parsed()) is None and kv_events.summary(parsed()) == []


def test_without_an_address_it_is_this_machine_alone() -> None:
    assert kv_events.summary(parsed("--kv-events")) == [("KV events", "tcp://127.0.0.1:5557")]


def test_addresses_that_others_may_reach_come_with_a_warning() -> None:
    args = parsed("--kv-events", "tcp://*:5557", "--kv-events-replay", "tcp://127.0.0.1:5558")
    (_, where), (label, warning) = kv_events.summary(args)
    assert where == "tcp://*:5557, replay at tcp://127.0.0.1:5558"
    assert label == "warning" and "tcp://*:5557 can read prompts" in warning


@pytest.mark.parametrize("argv", [("--kv-events-replay", "tcp://127.0.0.1:1"), ("--kv-events-topic", "kv@a@b")])
def test_options_of_nothing_are_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="need --kv-events"):
        kv_events.open_socket(parsed(*argv))


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from stepwell.cli.main import main
sys.exit(main(["serve", "--model", "random-hybrid", "--port", "0", "--kv-events", "tcp://127.0.0.1:*"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2 and install("events") in done.stderr, done.stderr
