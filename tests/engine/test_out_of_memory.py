"""A device without memory for a pass: captured graphs are dropped, and every request gets the tokens it would have had."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from engine.families import checkpoint
from engine.small import DEFAULTS, Limits, alone, greedy, prompt, run, small, tokens_of
from engine.test_graphs import Cuda, playing, recorded
from stepwell.engine import Engine, EngineConfig, Finish, build_engine
from stepwell.engine.ops.guarded import Guarded, Report
from stepwell.engine.running.graphs import Graphs
from waiting import run_to_the_end

pytest.importorskip("transformers")

RANDOM = Random(3)
ASKS = [greedy(prompt(RANDOM.randrange(1, 90), seed=at), RANDOM.randrange(8, 40)) for at in range(8)]
LIMITS = Limits(chunk_tokens=64, max_running=5)


class Full:
    """A model whose passes find no memory at their very end, every so often, as long as there are recordings to drop."""

    def __init__(self, graphs: Graphs, every: int) -> None:
        self._graphs, self._real, self._every = graphs, graphs._model, every
        self._calls = 0
        self.raised = 0
        self.before: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def compute(self, *args: Any) -> torch.Tensor:
        return self._then_full(self._real.compute(*args))

    def forward(self, *args: Any) -> torch.Tensor:
        return self._then_full(self._real.forward(*args))

    def _then_full(self, logits: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        self.before()
        if self._graphs._recordings and self._calls % self._every == 0:
            self.raised += 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (simulated)")
        return logits


def filling(engine: Engine, family: str, monkeypatch: pytest.MonkeyPatch, *, every: int = 5) -> tuple[Graphs, Full]:
    Cuda().replace(monkeypatch)
    monkeypatch.setattr(Graphs, "_record", playing)
    made = recorded(engine, family)
    monkeypatch.setattr(engine._runner, "_graphs", made)
    full = Full(made, every)
    monkeypatch.setattr(made, "_model", full)
    return made, full


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "mamba2", "deepseek_v4"])
def test_no_request_fails_and_all_get_their_tokens(family: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prefills and decode steps, of models whose states a failed pass has moved on, and with a pass in flight."""
    expected = alone(family, ASKS)
    with small(family, limits=LIMITS) as engine:
        made, full = filling(engine, family, monkeypatch)
        full.before = lambda: setattr(made, "_most", 8)  # once it has no graphs left, none are dropped
        engine.passing.reads_later = later
        played = run(engine, ASKS)
        assert all(deltas[-1].finish is Finish.LENGTH for deltas in played)
        assert [tokens_of(deltas) for deltas in played] == expected
        assert full.raised >= 2 and engine.cache.counters["graphs_dropped"] == full.raised


def test_fewer_graphs_are_kept_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with small("llama", limits=LIMITS) as engine:
        made, full = filling(engine, "llama", monkeypatch, every=1)
        run(engine, ASKS)
        assert full.raised and made._most < 2 and len(made._recordings) <= made._most


def test_choosing_tokens_and_drafting_are_parts_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone("llama", ASKS)
    config = EngineConfig(**(DEFAULTS | {"limits": LIMITS}), draft_tokens=3)
    with build_engine(checkpoint("llama"), config, draft=checkpoint("llama")) as engine:
        monkeypatch.setattr(engine._runner, "drop_graphs", lambda: True)
        speculation, raised = engine._speculation, []
        assert speculation is not None
        for owner, name in ((speculation._draft, "propose"), (speculation._draft, "follow"), (engine._runner, "choices")):
            real, calls = getattr(owner, name), []

            def full(*args: Any, real: Any = real, calls: list[int] = calls, name: str = name) -> Any:
                calls.append(1)
                made = real(*args)
                if len(calls) % 7 == 3:
                    raised.append(name)
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory (simulated)")
                return made

            monkeypatch.setattr(owner, name, full)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == expected
        assert set(raised) == {"propose", "follow", "choices"}


def test_without_graphs_to_drop_the_requests_of_the_pass_end_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with small() as engine:

        def full(*args: Any) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (simulated)")

        monkeypatch.setattr(engine._runner, "_forward", full)
        engine.submit(greedy(prompt(20), 4))
        with pytest.raises(torch.cuda.OutOfMemoryError):
            engine.step()
        (ended,) = run_to_the_end(engine)
        assert ended.finish is Finish.FAILED and "out of memory" in str(ended.error)


def test_a_kernel_that_finds_no_memory_to_load_is_not_broken() -> None:
    """The driver's words for it, as Triton raises them."""

    def loads() -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    report = Report(chosen={"gates": "triton"})
    with pytest.raises(RuntimeError, match="out of memory"):
        Guarded("gates", loads, lambda: None, report)()
    assert not report.failed
