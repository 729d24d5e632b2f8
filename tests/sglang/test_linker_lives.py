"""SGLang's real tree and device pools over Stepwell's linker, in processes that follow each other: what was saved comes back with
every byte, and what is damaged or of another shape does not.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes_of_sglang import asked_for, life
from test_lives import CHUNK, FLIPPED, KINDS, LEAVES_AT, PAGE, TOKENS, flip

WINDOW_PAGES = 4

pytestmark = asked_for


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Saved by one process, damaged here, and resumed by another."""
    root: Path = tmp_path_factory.mktemp("linker")
    said = life("linker_life.py", "save", root)
    shutil.copytree(root / "full", root / "flipped")
    flip(root / "flipped", bytes.fromhex(said["piece"]))
    return {**said, **life("linker_life.py", "resume", root)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_device_has_lost_comes_back_from_the_host_with_every_byte(outcomes: Mapping[str, Any], kind: str) -> None:
    assert outcomes[f"{kind} host"] == [TOKENS, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_process_resumes_from_the_store_with_every_byte(outcomes: Mapping[str, Any], kind: str) -> None:
    assert outcomes[f"{kind} store"] == [TOKENS, True, True]
    beside = {"swa": WINDOW_PAGES, "mamba": 1}.get(kind, 0)
    assert outcomes[f"{kind} fetched"] == TOKENS // PAGE + beside  # and nothing that is not needed


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_leaves_the_path_resumes_where_all_pools_can(outcomes: Mapping[str, Any], kind: str) -> None:
    deepest = LEAVES_AT // CHUNK * CHUNK if kind == "mamba" else LEAVES_AT // PAGE * PAGE  # state is at ends of chunks only
    assert outcomes[f"{kind} branch"] == [deepest, True, True]


def test_a_flipped_bit_ends_the_prompt_before_it(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["flipped"] == [FLIPPED * PAGE, True, True]


def test_pages_of_another_layout_or_dtype_are_misses(outcomes: Mapping[str, Any]) -> None:
    assert outcomes["dtype"] == outcomes["layout"] == 0


def test_a_host_smaller_than_the_prompt_gives_what_it_can_hold(outcomes: Mapping[str, Any]) -> None:
    tokens, loaded, same = outcomes["small"]
    assert 0 < tokens < TOKENS and loaded and same


def test_what_is_saved_again_is_copied_once(outcomes: Mapping[str, Any]) -> None:
    first, second, saved = outcomes["again"]
    assert first == [TOKENS, True, True] and second == [TOKENS // 2, True, True] and saved == TOKENS // PAGE
