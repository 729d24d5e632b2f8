"""The README's command for SGLang as it is written: served, asked over HTTP, killed, served again, and resumed from the store.

The command gets a tiny model, a directory, and what a machine without a GPU needs. Each start takes up to a minute.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from processes_of_sglang import ROOT, asked_for, life
from servers_of_sglang import PATIENCE_S, ask, recipe, served, server

from stepwell.store.log.disk.files import Disk
from stepwell.store.log.inspect import stat_directory

PAGE = 64
PROMPT = [(at * 37 + 11) % 900 + 3 for at in range(1500)]
WHOLE = (len(PROMPT) - 1) // PAGE * PAGE  # tokens that can be resumed: the last one is always computed

pytestmark = asked_for


def wait_for_pages(directory: Path, count: int) -> None:
    """The server says nothing of what it has stored."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := stat_directory(directory, Disk()).values) < count:
        assert time.monotonic() < deadline, f"only {found} pages were stored"
        time.sleep(0.1)


def answers(tmp_path: Path, having: str) -> list[dict[str, Any]]:
    """What two servers say to one prompt, the second after the first was killed."""
    root, store = tmp_path, tmp_path / "store"
    life("engine_life.py", "model", root)
    arguments = served(recipe(ROOT / "README.md", having), model=root / "model", store=store)
    said = []
    for number in (1, 2):
        with server(arguments, root / f"server{number}.log") as address:
            said.append(ask(address, PROMPT, answer=8))
            wait_for_pages(store / "rank0", len(PROMPT) // PAGE)
    return said


def test_the_readme_command_serves_and_a_second_server_resumes_from_the_store(tmp_path: Path) -> None:
    first, again = answers(tmp_path, "StepwellHiCache")
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == WHOLE
    assert again["meta_info"]["cached_tokens_details"]["storage_backend"] == "StepwellHiCache"
    assert again["output_ids"] == first["output_ids"]


def test_the_readme_command_of_the_linker_does_too(tmp_path: Path) -> None:
    first, again = answers(tmp_path, "StepwellLinker")
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == WHOLE
    assert again["output_ids"] == first["output_ids"]
