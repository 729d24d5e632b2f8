"""Passes of prompts that are queued before the pass before them is read: in which order the host does what, and that nothing of
it shows in answers or in what is cached.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from engine.late_device import LateDevice
from engine.small import PAGE, greedy, prompt, run, small, tokens_of
from stepwell.base.config import PlacementConfig
from stepwell.base.errors import NoRoom
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import ManualClock
from stepwell.engine import Engine, GenerateRequest, Limits, Sampling
from stepwell.memory.arena import READY
from stepwell.tiers import publish
from waiting import empty_device, run_to_the_end, run_until, settle

pytest.importorskip("transformers")

CHUNK = 64
FAMILIES = ["llama", "mistral", "gemma3", "gpt_oss", "qwen3_next", "falcon_h1", "mamba2", "deepseek_v3", "deepseek_v4"]
STOPS = PlacementConfig(interval_tokens=5 * PAGE, decode_interval_tokens=2 * PAGE)


def asks(seed: int, *, most: int = 300) -> list[GenerateRequest]:
    """Prompts of several chunks, some alike at first, that arrive together."""
    draw, shared = Random(seed), prompt(100, seed=seed)
    made = []
    for at in range(6):
        tokens = [*shared[: draw.randrange(100)], *prompt(draw.randrange(1, most), seed=100 * seed + at)]
        sampling = Sampling(max_tokens=draw.choice([1, 2, 20, 40]), temperature=draw.choice([0, 0, 0.8]), seed=at)
        made.append(GenerateRequest(tokens=tokens, sampling=sampling))
    return made


def expected(family: str, many: list[GenerateRequest], **settings: Any) -> list[list[int]]:
    """By an engine that reads every pass at once."""
    with small(family, **settings) as engine:
        return [tokens_of(deltas) for deltas in run(engine, many)]


# ---- in which order -----------------------------------------------------------------------------------


def test_every_chunk_of_a_prompt_is_queued_before_the_one_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with small() as engine:
        device = LateDevice(engine, monkeypatch)
        run(engine, [greedy(prompt(5 * CHUNK), 4)])
        assert [chunk.end for (chunk,) in device.passes[:5]] == [CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK, 5 * CHUNK]
        assert device.read_late() == list(range(len(device.passes) - 1)), device.log
        assert max(queued - read for read, queued in _queued_when_read(device.log)) == 1, "never more than one pass ahead"


def _queued_when_read(log: list[tuple[str, int]]) -> list[tuple[int, int]]:
    """For each pass that is read, its number and that of the last one in the queue."""
    return [
        (number, max(each for of, each in log[:at] if of == "queue")) for at, (kind, number) in enumerate(log) if kind == "read"
    ]


def test_the_next_prompts_are_queued_with_the_token_of_the_last_one_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that begin to answer and prompts under way share passes, and all those passes are queued in time."""
    with small() as engine:
        device = LateDevice(engine, monkeypatch)
        run(engine, [greedy(prompt(40 + at, seed=at), 12) for at in range(8)])
        mixed = [chunks for chunks in device.passes if len({chunk.size > 1 for chunk in chunks}) == 2]
        assert len(mixed) > 3 and len(device.read_late()) == len(device.passes) - 1


def test_a_page_is_ready_and_known_only_once_its_pass_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(4 * CHUNK)
    with small() as engine:
        device = LateDevice(engine, monkeypatch)
        states = engine.cache._state.arena(Tier.DEVICE).state[Kind.PREFIX]
        compute = device.compute_upto

        def looking(number: int) -> None:
            (chunk,) = device.passes[number]
            request = chunk.request
            assert request.lease is not None and request.position == chunk.start < request.reached
            assert not (states[request.lease.prefix_pages[-(-chunk.start // PAGE) :]] == READY).any()
            assert engine.cache.lookup(tokens).known_tokens <= chunk.start
            compute(number)

        monkeypatch.setattr(device, "compute_upto", looking)
        run(engine, [greedy(tokens, 4)])
        assert len(device.read_late()) > 4 and engine.cache.lookup([*tokens, 1]).known_tokens == 4 * CHUNK


def test_point_state_is_copied_behind_its_pass_so_that_nobody_waits_at_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    with small("mamba2", placement=STOPS) as engine:
        device = LateDevice(engine, monkeypatch)
        (deltas,) = run(engine, [greedy(prompt(300), 4 * PAGE)])
        assert device.read_late() == list(range(len(device.passes) - 1)) and not engine.cache.counters["fork_jobs"]
        for boundary in range(5 * PAGE, 300, 5 * PAGE):
            assert engine.cache.lookup(prompt(300)[: boundary + 1]).restore_tokens == boundary
        assert engine.cache.lookup([*prompt(300), *tokens_of(deltas)]).restore_tokens == 352


@pytest.mark.parametrize("ask", [{"use_cache": False}, {}], ids=["not published", "published"])
def test_nobody_waits_at_the_pages_of_an_answer(ask: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not published nothing is left there, and nothing copied."""
    with small("mamba2", placement=PlacementConfig(interval_tokens=0)) as engine:
        device = LateDevice(engine, monkeypatch)
        run(engine, [greedy(prompt(20), 6 * PAGE, **ask), greedy(prompt(30, seed=1), 6 * PAGE)])
        assert device.read_late() == list(range(len(device.passes) - 1))


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no space for the copy that a pass would make."""
    monkeypatch.setattr(publish, "copy_point", lambda *_: None)


@pytest.mark.usefixtures("no_copies")
def test_nobody_goes_over_a_stop_where_point_state_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint would hold what a later pass made of it."""
    with small("mamba2", placement=STOPS) as engine:
        device = LateDevice(engine, monkeypatch)
        run(engine, [greedy(prompt(300), 4)])
        stops = set(range(5 * PAGE, 300, 5 * PAGE))
        ends = [chunk.end for (chunk,) in device.passes]
        assert stops <= set(ends)
        late = {ends[number] for number in device.read_late()}
        assert not late & stops and late, "chunks between stops are queued in time"


@pytest.mark.usefixtures("no_copies")
def test_nobody_is_queued_before_a_state_is_handed_over_whose_request_would_wait_for_that_pass_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small("mamba2", placement=STOPS, limits=Limits(chunk_tokens=CHUNK, max_running=8)) as engine:
        device = LateDevice(engine, monkeypatch)
        for seed in range(3):
            engine.submit(greedy(prompt(10, seed=90 + seed), 60))
        number = engine.submit(greedy(prompt(400, seed=5), 2))
        run_to_the_end(engine)
        ends = {at: chunk.end for at, chunks in enumerate(device.passes) for chunk in chunks if chunk.request.id == number}
        at_stops = [at for at, end in ends.items() if end < 400 and end % (5 * PAGE) == 0]
        assert len(at_stops) == len(range(5 * PAGE, 400, 5 * PAGE)) and not set(at_stops) & set(device.read_late())
        assert device.read_late(), "others are read late"


def test_windows_are_no_reason_to_wait_at_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages are full there, and no pass writes them again."""
    with small("gemma3", placement=STOPS) as engine:
        device = LateDevice(engine, monkeypatch)
        run(engine, [greedy(prompt(300), 4)])
        assert device.read_late() == list(range(len(device.passes) - 1))
        for boundary in range(5 * PAGE, 300, 5 * PAGE):
            assert engine.cache.lookup(prompt(300)[: boundary + 1]).restore_tokens == boundary


# ---- the same answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_of_an_engine_that_reads_at_once(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"placement": STOPS, "limits": Limits(chunk_tokens=CHUNK, max_running=4)}
    with small(family, **how) as engine:
        device = LateDevice(engine, monkeypatch)
        found = [tokens_of(deltas) for deltas in run(engine, asks(seed))]
        assert device.read_late()
    assert found == expected(family, asks(seed), **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_cached_is_resumed_from_the_host_to_the_same_answer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, turn = greedy(prompt(230), 40), prompt(30, seed=9)
    with small(family, placement=STOPS) as engine:
        answered = tokens_of(run(engine, [first])[0])
        follow = greedy([*first.tokens, *answered, *turn], 20)
        again = tokens_of(run(engine, [follow])[0])
    with small(family, placement=STOPS) as engine:
        LateDevice(engine, monkeypatch)
        assert tokens_of(run(engine, [first])[0]) == answered
        settle(engine.cache)
        _empty_device(engine)
        (deltas,) = run(engine, [follow])
        assert tokens_of(deltas) == again
        usage = deltas[-1].usage
        assert usage is not None and usage.sources.host > 100 and usage.sources.computed < 100


def _empty_device(engine: Engine) -> None:
    empty_device(engine.cache)


def test_requests_that_share_a_prompt_still_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what is in a pass in flight; and no stop is requested behind which a pass was queued."""
    shared, each = prompt(250, seed=3), [prompt(40, seed=50 + at) for at in range(4)]
    for family in ("llama", "gemma3", "mamba2"):
        with small(family) as engine:
            LateDevice(engine, monkeypatch)
            engine.submit(greedy([*shared, *each[0]], 4))
            for _ in range(2):
                engine.step()
            numbers = [engine.submit(greedy([*shared, *more], 4)) for more in each[1:]]
            sources = {d.request: d.usage.sources for d in run_to_the_end(engine) if d.usage is not None}
            assert all(sources[number].computed < 120 for number in numbers), (family, sources)


def test_too_little_room_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(chunk_tokens=48, max_running=6)
    many = [greedy(prompt(100 + 10 * at, seed=at), 60) for at in range(8)]
    with small(limits=limits, device_memory="512KiB", host_memory="1MiB") as engine:
        engine.passing.reads_later = True
        found = run(engine, many)
        assert sum(deltas[-1].usage.preemptions for deltas in found) > 0, "this was to be tight"
    assert [tokens_of(deltas) for deltas in found] == expected("llama", many, limits=limits)


def test_nobodys_room_is_taken_while_a_pass_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that pass computed in it would be lost."""
    with small() as engine:
        engine.passing.reads_later = True
        engine.submit(greedy(prompt(40), 50))
        run_until(engine, lambda: engine.passing.unread is not None)

        def none_left(*_: object) -> None:
            raise NoRoom("none", waiting=False)

        monkeypatch.setattr(engine.cache, "grow", none_left)
        assert engine.scheduler.plan_ahead() == [] and not engine.scheduler.failed
        monkeypatch.undo()
        assert sum(len(delta.tokens) for delta in run_to_the_end(engine)) == 50


# ---- trouble ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2"])
def test_a_prompt_that_is_aborted_in_the_middle_leaves_the_others_as_they_are(family: str) -> None:
    with small(family) as engine:
        engine.passing.reads_later = True
        kept, gone = engine.submit(greedy(prompt(300), 20)), engine.submit(greedy(prompt(400, seed=4), 20))
        deltas = run_until(engine, lambda: (each := engine._answering.requests.get(gone)) is not None and each.reached > 0)
        engine.abort(gone)
        engine.cache.audit()
        deltas += run_to_the_end(engine)
        assert tokens_of([delta for delta in deltas if delta.request == kept]) == expected(family, [greedy(prompt(300), 20)])[0]
        engine.cache.audit()


def test_a_prompt_that_is_put_back_in_the_middle_begins_again_from_what_was_read() -> None:
    ask = greedy(prompt(400), 20)
    with small() as engine:
        engine.passing.reads_later = True
        number = engine.submit(ask)
        request = engine._answering.requests[number]
        deltas = run_until(engine, lambda: 0 < request.position < request.reached < len(ask.tokens))
        done = request.position
        engine.scheduler.put_back(request)
        assert request.reached == 0, "no request owns what was started"
        deltas += run_until(engine, lambda: request.lease is not None)
        assert request.lease is not None and request.lease.resume == done
        deltas += run_to_the_end(engine)
        assert tokens_of(deltas) == expected("llama", [ask])[0]
        engine.cache.audit()


def test_a_pass_that_cannot_be_queued_ends_its_requests_and_leaves_the_cache_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    with small() as engine:
        engine.passing.reads_later = True
        number, tokens = engine.submit(greedy(prompt(400), 4)), prompt(400)
        request = engine._answering.requests[number]
        run_until(engine, lambda: request.position > 0)
        done = request.position

        def failing(*_: object, **__: object) -> None:
            raise RuntimeError("no memory")

        with monkeypatch.context() as broken:
            broken.setattr(engine._runner, "run", failing)
            with pytest.raises(RuntimeError, match="no memory"):
                engine.step()
        assert [delta.error for delta in engine.step()] == ["RuntimeError: no memory"]
        assert engine.cache.lookup(tokens).known_tokens == done, "what was queued and not read is not known"
        engine.cache.audit()
        assert tokens_of(run(engine, [greedy(tokens, 4)])[0]) == expected("llama", [greedy(tokens, 4)])[0]


def test_a_prompt_whose_numbers_break_ends_alone_and_its_last_chunk_is_nobodys() -> None:
    with small() as engine:
        engine.passing.reads_later = True
        run_pass = engine._runner.run

        def spoiled(chunks: Any, **more: Any) -> Any:
            logits_BV = run_pass(chunks, **more).clone()
            completed = [chunk.request.id for chunk in chunks if chunk.completes]
            if broken in completed:
                logits_BV[completed.index(broken)] = float("nan")
            return logits_BV

        engine._runner.run = spoiled  # type: ignore[method-assign]
        broken, kept = engine.submit(greedy(prompt(100), 10)), engine.submit(greedy(prompt(90, seed=1), 10))
        ends = {delta.request: delta for delta in run_to_the_end(engine) if delta.finish is not None}
        assert (ends[broken].finish.value, ends[kept].finish.value) == ("error", "length")  # type: ignore[union-attr]
        assert engine.cache.lookup([*prompt(100), 1]).known_tokens <= CHUNK
        engine.cache.audit()


def test_logprobs_are_those_of_an_engine_that_reads_at_once() -> None:
    """Their prompts go ahead; the pass that completes them is read at once."""
    many = [
        GenerateRequest(tokens=prompt(200 + at, seed=at), sampling=Sampling(max_tokens=6, logprobs=2 if at % 2 else None))
        for at in range(4)
    ]
    with small() as engine:
        answered = run(engine, many)
    with small() as engine:
        engine.passing.reads_later = True
        found = run(engine, many)
    assert [tokens_of(each) for each in found] == [tokens_of(each) for each in answered]
    assert [sum(len(delta.logprobs) for delta in each) for each in found] == [0, 6, 0, 6]


# ---- what is measured ---------------------------------------------------------------------------------


def test_how_fast_prompts_are_computed_does_not_count_the_pass_they_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with small() as engine:
        device = LateDevice(engine, monkeypatch)
        clock, measured = ManualClock(), []
        monkeypatch.setattr(engine.cache._state, "clock", clock)
        monkeypatch.setattr(engine.cache, "_learn_speed", lambda spans, took_s: measured.append((spans, took_s)))
        compute = device.compute_upto
        monkeypatch.setattr(device, "compute_upto", lambda number: (clock.advance(1.0), compute(number)))
        run(engine, [greedy(prompt(CHUNK, seed=at), 1) for at in range(4)])
        assert measured == [([(0, CHUNK)], 1.0)] * 4
