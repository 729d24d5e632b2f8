"""The log of a toy engine that is killed, at every moment at which its store acknowledged something. `tests/vllm` kills vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from toy_runs import Make, computed_by, text
from toy_vllm import MODELS

from stepwell.base.tasks import ItemStatus, Outcome, PutCheckpoint, PutPages
from stepwell.store_tier import prefetch
from stepwell.transfer.store_worker import Sealed, StoreWorker


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_that_is_killed_loses_nothing_that_the_store_acknowledged(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """The next one resumes there. Where a model needs a checkpoint, pages without one are a miss."""
    put, acknowledged = StoreWorker.put, list[list[PutPages | PutCheckpoint]]()

    def put_and_copy(self: StoreWorker, group: Sequence[Sealed], cancelled: Any) -> list[Outcome]:
        outcomes = put(self, group, cancelled)
        assert {status for outcome in outcomes for status in outcome.statuses} == {ItemStatus.OK}
        acknowledged.append([sealed.task for sealed in group])
        copytree(tmp_path / "log", tmp_path / f"{len(acknowledged) - 1}")
        return outcomes

    monkeypatch.setattr(StoreWorker, "put", put_and_copy)
    first, prompt = make(model, store=f"log:{tmp_path / 'log'}", store_budget="64MiB"), text(1, 45)
    computed_by(first, prompt)
    first.close()
    monkeypatch.setattr(StoreWorker, "put", put)
    monkeypatch.setattr(prefetch, "is_worth_it", lambda *_: True)  # the toy computes sooner than any store delivers
    spec, promised = first.connector._scheduler.cache.spec, 0
    for number, tasks in enumerate(acknowledged):
        for task in tasks:
            pages = task.page if isinstance(task, PutCheckpoint) else 0 if spec.needs_checkpoint else task.first + len(task.keys)
            promised = max(promised, min(pages, 44 // spec.page_tokens) * spec.page_tokens)
        second = make(model, store=f"log:{tmp_path / str(number)}", store_budget="64MiB", prefetch="wait_complete")
        assert 49 - computed_by(second, prompt) == promised, f"after {acknowledged[: number + 1]}"
        second.close()
    assert promised >= 40
