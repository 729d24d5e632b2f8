"""The commands of docs/sglang.md as they are written: served, asked over HTTP, killed, served again, and resumed from the store.

The command gets a tiny model, a directory, and what a machine without a GPU needs. Each start takes up to a minute.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes_of_sglang import ROOT, asked_for, life
from servers_of_sglang import PATIENCE_S, ask, logprobs, recipe, served, server

from stepwell.store.log.disk.files import Disk
from stepwell.store.log.inspect import stat_directory

PAGE = 64
PROMPT = [(at * 37 + 11) % 900 + 3 for at in range(1500)]
SMALL = ("--max-total-tokens", "2560")
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE  # tokens that can be resumed: the last one is always computed

pytestmark = asked_for


def wait_for_pages(directory: Path, count: int) -> None:
    """The server says nothing of what it has stored."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := stat_directory(directory, Disk()).values) < count:
        assert time.monotonic() < deadline, f"only {found} pages were stored"
        time.sleep(0.1)


def is_same(said: dict[str, Any], other: dict[str, Any]) -> None:
    assert said["output_ids"] == other["output_ids"]
    assert logprobs(said) == pytest.approx(logprobs(other), abs=2e-5)


def answers(tmp_path: Path, having: str) -> list[dict[str, Any]]:
    """What two servers say to one prompt, the second after the first was killed."""
    root, store = tmp_path, tmp_path / "store"
    life("engine_life.py", "model", root)
    arguments = served(recipe(ROOT / "docs" / "sglang.md", having), model=root / "model", store=store)
    said = []
    for number in (1, 2):
        with server(arguments, root / f"server{number}.log") as address:
            said.append(ask(address, PROMPT, answer=8))
            wait_for_pages(store / "rank0", len(PROMPT) // PAGE)
    return said


def test_the_documented_command_serves_and_a_second_server_resumes_from_the_store(tmp_path: Path) -> None:
    first, again = answers(tmp_path, "StepwellHiCache")
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == WHOLE
    assert again["meta_info"]["cached_tokens_details"]["storage_backend"] == "StepwellHiCache"
    is_same(again, first)


def test_the_documented_command_of_the_linker_does_too(tmp_path: Path) -> None:
    first, again = answers(tmp_path, "StepwellLinker")
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == WHOLE
    is_same(again, first)


def test_many_prompts_over_a_small_device_are_answered_as_they_were_computed(tmp_path: Path) -> None:
    """Six prompts over a device for two, three at a time, in turns: loaded from the host again and again."""
    life("engine_life.py", "model", tmp_path)
    arguments = served(recipe(ROOT / "docs" / "sglang.md", "StepwellLinker"), model=tmp_path / "model", store=tmp_path / "store")
    prompts = [[(at * (37 + 2 * number) + number) % 900 + 3 for at in range(900)] for number in range(4)]
    prompts += [[*prompts[number][:500], *prompts[number + 2][500:]] for number in range(2)]  # that share half with others
    with server([*arguments, *SMALL], tmp_path / "server.log") as address, ThreadPoolExecutor(3) as askers:
        rounds = [list(askers.map(lambda prompt: ask(address, prompt, answer=8), prompts)) for _ in range(4)]
    for said in rounds[1:]:
        for first, again in zip(rounds[0], said, strict=True):
            is_same(again, first)
    cached = [sum(each["meta_info"]["cached_tokens"] for each in said) for said in rounds]
    assert min(cached[1:]) > sum(map(len, prompts)) * 0.8  # no device of this size could have kept most of them
