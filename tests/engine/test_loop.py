"""The engine's thread: every request gets an answer, whatever happens to the engine."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest

from engine.small import alone, greedy, prompt, small
from stepwell.base.errors import StepwellError
from stepwell.engine import Delta, Finish
from stepwell.engine.loop import EngineLoop
from waiting import PATIENCE_S

pytest.importorskip("transformers")


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    made = EngineLoop(small())
    made.start()
    yield made
    made.stop()


def finish_of(queue: Queue[Delta]) -> Delta:
    while (delta := queue.get(timeout=PATIENCE_S)).finish is None:
        pass
    return delta


def test_answers_come_back_through_the_listener(loop: EngineLoop) -> None:
    queues: list[Queue[Delta]] = [Queue() for _ in range(3)]
    asks = [greedy(prompt(40, seed=seed)) for seed in range(3)]
    for ask, queue in zip(asks, queues, strict=True):
        loop.submit(ask, queue.put).result(PATIENCE_S)
    for expected, queue in zip(alone("llama", asks), queues, strict=True):
        tokens: list[int] = []
        while (delta := queue.get(timeout=PATIENCE_S)).finish is None:
            tokens += delta.tokens
        assert [*tokens, *delta.tokens] == expected


def test_a_bad_request_is_refused_and_the_next_is_answered(loop: EngineLoop) -> None:
    queue: Queue[Delta] = Queue()
    with pytest.raises(StepwellError):
        loop.submit(greedy([10**6]), queue.put).result(PATIENCE_S)
    loop.submit(greedy(prompt(10)), queue.put).result(PATIENCE_S)
    assert finish_of(queue).finish is Finish.LENGTH


def test_a_listener_that_fails_stops_nobody(loop: EngineLoop) -> None:
    queue: Queue[Delta] = Queue()

    def gone(delta: Delta) -> None:
        raise ConnectionError("the client has left")

    loop.submit(greedy(prompt(10)), gone).result(PATIENCE_S)
    loop.submit(greedy(prompt(12)), queue.put).result(PATIENCE_S)
    assert finish_of(queue).finish is Finish.LENGTH


def test_a_pass_that_fails_is_told_to_its_requests(loop: EngineLoop) -> None:
    queue: Queue[Delta] = Queue()

    def break_once(engine: Any) -> None:
        run = engine._runner.run

        def failing(chunks: Any) -> Any:
            engine._runner.run = run
            raise RuntimeError("out of memory")

        engine._runner.run = failing

    loop.call(break_once).result(PATIENCE_S)
    loop.submit(greedy(prompt(10)), queue.put).result(PATIENCE_S)
    assert "out of memory" in str(finish_of(queue).error)
    loop.submit(greedy(prompt(10)), queue.put).result(PATIENCE_S)
    assert finish_of(queue).finish is Finish.LENGTH


def test_stopping_ends_what_runs_and_refuses_what_comes_later() -> None:
    loop, queue = EngineLoop(small()), Queue[Delta]()
    loop.start()
    loop.submit(greedy(prompt(100), 3000), queue.put).result(PATIENCE_S)
    loop.stop()
    assert finish_of(queue).finish is Finish.ABORTED
    with pytest.raises(StepwellError, match="stopped"):
        loop.submit(greedy(prompt(10)), queue.put).result(PATIENCE_S)
    loop.abort(1)


def test_an_engine_that_breaks_tells_everybody(caplog: pytest.LogCaptureFixture) -> None:
    engine = small()
    loop, queue = EngineLoop(engine), Queue[Delta]()
    loop.start()
    number = loop.submit(greedy(prompt(100), 3000), queue.put).result(PATIENCE_S)
    release = engine.cache.release
    engine.cache.release = _broken  # type: ignore[assignment]
    loop.abort(number)
    assert "did not add up" in str(finish_of(queue).error)
    loop._thread.join(PATIENCE_S)
    assert not loop.alive
    with pytest.raises(StepwellError, match="stopped"):
        loop.call(lambda engine: engine.num_open).result(PATIENCE_S)
    engine.cache.release = release  # type: ignore[method-assign]
    for lease in list(engine.cache._leases):
        release(lease)
    engine.cache.close()


def _broken(lease: Any) -> None:
    raise AssertionError("a count did not add up")
