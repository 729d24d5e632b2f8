"""Whole caches in processes of their own, over one shared log."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from shared_log_fixtures import OPTIONS

from processes import Peer

CACHE = Path(__file__).parents[1] / "cache_peer.py"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_cache(stack: ExitStack, directory: Path, log: Path, policy: str = "wait_complete", **options: str) -> Peer:
    options = {**OPTIONS, "budget": "64MiB", "segment": "4MiB", **options}
    peer = Peer(CACHE, options, [policy, f"shared-log:{directory}"], log)
    stack.callback(peer.kill)
    return peer


def test_what_one_cache_computed_another_resumes_from(stack: ExitStack, directory: Path, tmp_path: Path) -> None:
    left, right = (start_cache(stack, directory, tmp_path / f"{name}.log") for name in ("left", "right"))
    assert left.ask("serve", prompt=1, tokens=200)["computed"] == 200
    shared = right.ask("serve", prompt=1, tokens=200)
    assert (shared["store"], shared["computed"]) == (192, 8), "every byte of it was checked there"
    assert right.ask("serve", prompt=1, tokens=200)["device"] == 192
    assert right.ask("serve", prompt=2, tokens=100)["computed"] == 100
    assert left.ask("serve", prompt=2, tokens=100)["store"] == 96


def test_a_cache_resumes_from_what_a_killed_one_stored(stack: ExitStack, directory: Path, tmp_path: Path) -> None:
    left, right = (start_cache(stack, directory, tmp_path / f"{name}.log") for name in ("left", "right"))
    right.ask("serve", prompt=3, tokens=100)
    assert left.ask("serve", prompt=1, tokens=200)["computed"] == 200
    left.kill()  # the owner: it was there first
    assert right.ask("serve", prompt=1, tokens=200)["store"] == 192
    third = start_cache(stack, directory, tmp_path / "third.log")
    assert third.ask("serve", prompt=1, tokens=200)["store"] == 192 and third.ask("serve", prompt=3, tokens=100)["store"] == 96


def test_a_cache_goes_on_beside_a_stopped_owner(stack: ExitStack, directory: Path, tmp_path: Path) -> None:
    left = start_cache(stack, directory, tmp_path / "left.log")
    right = start_cache(stack, directory, tmp_path / "right.log", "timeout", timeout="1")
    left.ask("serve", prompt=1, tokens=200)
    os.kill(left.pid, signal.SIGSTOP)
    alone = [right.ask("serve", prompt=prompt, tokens=100) for prompt in range(1, 4)]
    assert all(each["computed"] == 100 for each in alone), "a miss, and nothing worse"
    os.kill(left.pid, signal.SIGCONT)
