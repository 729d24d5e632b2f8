"""Decode steps that are recorded and played again, with something that plays without a GPU: the answers are those without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.small import Limits, alone, greedy, prompt, run, small, tokens_of
from stepwell.base.config import PlacementConfig
from stepwell.engine import Engine
from stepwell.engine.running import graphs
from stepwell.engine.running.graphs import Graphs, Recording, Still

pytest.importorskip("transformers")

RANDOM = Random(1)
ASKS = [greedy(prompt(RANDOM.randrange(1, 90), seed=at), RANDOM.randrange(1, 60)) for at in range(10)]


class Cuda:
    """As much of `torch.cuda` as a recording needs, on two devices; knows which stream is current."""

    def __init__(self, *, broken: bool = False) -> None:
        self.current = "device 0"
        self.recorded_on: list[str] = []
        self._broken = broken

    def current_stream(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(name=self.current if device is None else "device 1", wait_stream=lambda other: None)

    def Stream(self, device: object = None) -> SimpleNamespace:
        name = "side of device 0" if device is None else "side of device 1"
        return SimpleNamespace(name=name, wait_stream=lambda other: None)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, *, stream: SimpleNamespace | None = None, **more: Any) -> Iterator[None]:
        before, self.current = self.current, "side of device 0" if stream is None else stream.name
        self.recorded_on.append(self.current)
        yield
        if self._broken:
            raise RuntimeError("operation failed due to a previous error during capture")  # torch stays on the side then
        self.current = before

    def CUDAGraph(self) -> object:
        return object()

    def graph_pool_handle(self) -> None:
        return None

    def empty_cache(self) -> None:
        pass

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=self, inf=torch.inf))


def playing(graph: Graphs, still: Still, lengths: Mapping[int | None, int]) -> Recording:
    """Computes into the same memory every time, from the tensors that a recording reads. Making it computes nothing."""
    logits = torch.empty(len(still.wanted), graph._model.vocab_size)
    played = SimpleNamespace(replay=lambda: logits.copy_(graph._model.compute(still)))
    return Recording(batch=still, graph=played, logits=logits)  # type: ignore[arg-type]


STEADY = {"deepseek_v32": (None,), "deepseek_v4": (24, None)}  # with experts that do not ask the device, as on CUDA


def recorded(engine: Engine, family: str = "llama") -> Graphs:
    model = engine._runner.model
    made = Graphs(replace(model, graph_windows=STEADY.get(family, model.graph_windows)))
    engine._runner._forward = made.forward
    return made


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3_5", "falcon_h1", "mamba2", *STEADY])
@pytest.mark.parametrize(("step", "most"), [(16, 64), (1, 3)])
def test_a_played_step_reads_the_batch_it_is_given(family: str, step: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go, tables grow, and recordings are dropped for others."""
    Cuda().replace(monkeypatch)
    monkeypatch.setattr(Graphs, "_record", playing)
    monkeypatch.setattr(graphs, "PAGES_STEP", step)
    monkeypatch.setattr(graphs, "MAX_GRAPHS", most)
    limits = Limits(chunk_tokens=64, max_running=5)
    with small(family, limits=limits) as engine:
        expected = [tokens_of(deltas) for deltas in run(engine, ASKS)]
    with small(family, limits=limits) as engine:
        made = recorded(engine, family)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS)] == expected
        assert 3 <= len(made._recordings) <= most


@pytest.mark.parametrize("selector", ["quest", "clusterkv"])
def test_a_played_step_picks_for_the_batch_it_is_given(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests pass the budget while they run. The last token of a prompt may be alone, and looks at everything."""
    Cuda().replace(monkeypatch)
    monkeypatch.setattr(Graphs, "_record", playing)
    settings = {"sparse": selector, "sparse_budget": 112, "limits": Limits(chunk_tokens=64, max_running=5)}
    asks = [greedy(prompt(length, seed=length), 40) for length in (30, 90, 129, 150, 193, 240)]
    with small(**settings) as engine:
        expected = [tokens_of(run(engine, [ask])[0]) for ask in asks]
    with small(**settings) as engine:
        made = recorded(engine)
        assert [tokens_of(deltas) for deltas in run(engine, asks)] == expected
        assert made._recordings


def test_a_step_that_cannot_be_recorded_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(broken=True)
    cuda.replace(monkeypatch)
    with small() as engine:
        expected = [tokens_of(deltas) for deltas in run(engine, ASKS[:3])]
    with small() as engine:
        made = recorded(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS[:3])] == expected
        assert cuda.current == "device 0", "what follows would run on the stream of the recording"
        assert not made._recordings and 0 < len(cuda.recorded_on) == len(made._refused), "each shape is tried once"


def test_whatever_a_library_raises_while_a_step_is_recorded_the_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda().replace(monkeypatch)

    def refuse(graph: Graphs, still: Still, lengths: Mapping[int | None, int]) -> Recording:
        raise ValueError("a buffer of the library is too small")

    monkeypatch.setattr(Graphs, "_record", refuse)
    with small() as engine:
        expected = [tokens_of(deltas) for deltas in run(engine, ASKS[:3])]
    with small() as engine:
        made = recorded(engine)
        assert [tokens_of(deltas) for deltas in run(engine, ASKS[:3])] == expected
        assert made._refused and not made._recordings


def test_a_step_is_recorded_on_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever device is current: what runs elsewhere is not in the recording."""
    cuda = Cuda()
    cuda.replace(monkeypatch)
    monkeypatch.setattr(Recording, "play", lambda self, batch: self.logits)
    with small() as engine:
        recorded(engine)
        run(engine, [greedy(prompt(20), 3)])
    assert cuda.recorded_on == ["side of device 1"] and cuda.current == "device 0"


def test_a_checkpoint_of_a_recorded_step_has_its_open_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a played step leaves open is in the point page of the boundary that it ends at."""
    Cuda().replace(monkeypatch)
    monkeypatch.setattr(Graphs, "_record", playing)
    first = greedy(prompt(37), 81)
    placement = PlacementConfig(interval_tokens=0, decode_interval_tokens=16)
    with small("deepseek_v4", placement=placement) as engine:
        made = recorded(engine, "deepseek_v4")
        answer = tokens_of(run(engine, [first])[0])
        again = greedy([*first.tokens, *answer, *prompt(20, seed=3)], 50)
        assert made._recordings
        deltas = run(engine, [again])[0]
    usage = deltas[-1].usage
    assert usage is not None and usage.sources.device == 112, "half of a group of 32 is open there"
    assert [tokens_of(deltas)] == alone("deepseek_v4", [again])
    assert [answer] == alone("deepseek_v4", [first])
