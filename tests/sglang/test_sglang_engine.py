"""A whole engine of SGLang's, killed and started again over Stepwell's store: it answers alike, and computes almost nothing.

Engines end by SIGKILL, as SGLang always ends its schedulers: nothing is closed. Three starts, each of up to a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes_of_sglang import asked_for, life

PROMPT, PAGE = 1500, 64

pytestmark = asked_for


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    root: Path = tmp_path_factory.mktemp("engine")
    return {name: life("engine_life.py", storage, root) for name, storage in (
        ("first", "stepwell"), ("again", "stepwell"), ("without", "none"),
    )}  # fmt: skip


def test_a_restarted_engine_resumes_the_prompt_from_the_store(answers: Mapping[str, Any]) -> None:
    assert answers["first"]["cached"] == 0 and answers["without"]["cached"] == 0
    assert answers["again"]["cached"] == (PROMPT - 1) // PAGE * PAGE
    assert answers["again"]["details"]["storage_backend"] == "StepwellHiCache"


def test_its_answer_is_that_of_an_engine_without_a_cache(answers: Mapping[str, Any]) -> None:
    for name in ("first", "again"):
        assert answers[name]["tokens"] == answers["without"]["tokens"]
        assert answers[name]["logprobs"] == pytest.approx(answers["without"]["logprobs"], abs=2e-5)
