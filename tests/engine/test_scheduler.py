"""Who begins when; and waiting for a prefix that another computes, found by comparing prompts once and not in every step."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from engine.small import PAGE, alone, greedy, prompt, run, small, tokens_of
from stepwell.base.ids import Tier
from stepwell.engine import Finish, Limits
from stepwell.engine.scheduling import scheduler
from stepwell.engine.scheduling.scheduler import COMPARED, _shared_bytes
from waiting import run_to_the_end, run_until, settle


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 3))
def test_shared_beginnings_are_whole_units(one: int, other: int, alike: int, tail: int) -> None:
    unit, random = 8, Random(one * other)
    same = random.randbytes(alike * unit + tail)
    left, right = (same + fill * (count * unit) for fill, count in ((b"a", one), (b"b", other)))
    assert _shared_bytes(left, right, unit) == len(same) // unit * unit
    assert _shared_bytes(left, left, unit) == len(left) // unit * unit


def test_prompts_are_compared_once_however_long_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def counted(one: bytes, other: bytes, unit: int) -> int:
        compared.append((one, other))
        return _shared_bytes(one, other, unit)

    monkeypatch.setattr(scheduler, "_shared_bytes", counted)
    shared = prompt(40 * PAGE)
    asks = [greedy(shared + prompt(20, seed=seed), 4) for seed in range(1, 5)]
    with small() as engine:
        answers = run(engine, asks)
        assert engine.passes > 10
        assert engine.scheduler._compared == {}, "what is known of leases goes with them"
    assert len(compared) == len(set(compared)) <= 6, "of four requests there are six pairs"
    assert [tokens_of(each) for each in answers] == alone("llama", asks)
    computed = [deltas[-1].usage.sources.computed for deltas in answers if deltas[-1].usage is not None]
    assert sum(count > len(shared) for count in computed) == 1, "one computes what all share"


def test_who_waited_too_long_begins_before_those_who_are_urgent() -> None:
    with small(limits=Limits(max_running=1, patience_s=60.0)) as engine:
        now = engine.clock.now()
        urgent = [engine.submit(greedy(prompt(20, seed=seed), 1, priority=1, arrived_s=now)) for seed in range(COMPARED + 8)]
        late = [engine.submit(greedy(prompt(40, seed=-at), 1, arrived_s=now - 100 + at)) for at in (2, 1)]
        patient = engine.submit(greedy(prompt(10, seed=99), 1, arrived_s=now))
        ended = [delta.request for delta in run_to_the_end(engine) if delta.finish is not None]
    assert ended[:2] == [late[1], late[0]] and ended[-1] == patient
    assert sorted(ended[2:-1]) == urgent


def test_a_request_that_was_put_back_has_only_begun_to_wait() -> None:
    """However long ago it came: else it would begin before those for whom it was preempted, and be preempted again."""
    with small(limits=Limits(max_running=1, patience_s=60.0)) as engine:
        now = engine.clock.now()
        old = engine.submit(greedy(prompt(20), 5, arrived_s=now - 100))
        run_until(engine, lambda: old in engine.scheduler.active)
        engine.scheduler.put_back(engine.scheduler.active[old])
        urgent = engine.submit(greedy(prompt(20, seed=1), 1, priority=1))
        ended = [delta.request for delta in run_to_the_end(engine) if delta.finish is not None]
    assert ended == [urgent, old]


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_a_request_that_does_not_fit_alone_begins_anew_on_an_empty_device(family: str) -> None:
    """Else it would find its pages again where they lie, as scattered as before, and fail at the same token."""
    ask = greedy(prompt(9 * PAGE + 3), 20)
    with small(family) as engine:
        number = engine.submit(ask)
        deltas = run_until(engine, lambda: any(each.answer_tokens > 4 for each in engine.scheduler.active.values()))
        settle(engine.cache)
        (request,) = engine.scheduler.active.values()
        engine.scheduler._make_alone_fit(request)
        assert engine.cache.stats().tier(Tier.DEVICE).used_bytes == 0 and number in engine.scheduler.waiting
        deltas += run_to_the_end(engine)
        engine.cache.audit()
        assert tokens_of(deltas) == alone(family, [ask])[0]
        assert deltas[-1].usage is not None and deltas[-1].usage.preemptions == 1


@pytest.mark.parametrize(("chunk_tokens", "decoding"), [(8, 7), (4, 4), (4, 7), (1, 3), (64, 7)])
def test_a_prompt_is_computed_however_many_requests_decode(chunk_tokens: int, decoding: int) -> None:
    """A quarter of every pass is reserved for prompts, even if as many requests decode as a pass has tokens, or more."""
    limits = Limits(chunk_tokens=chunk_tokens, max_running=8)
    with small(limits=limits, device_memory="16MiB") as engine:
        for at in range(decoding):
            engine.submit(greedy(prompt(2, seed=at), 200))
        active = engine.scheduler.active
        run_until(engine, lambda: sum(each.answer_tokens > 0 for each in active.values()) == decoding)
        passes = engine.passes
        late = engine.submit(greedy(prompt(40, seed=99), 1))
        ended = run_until(engine, lambda: late not in engine._answering.requests)
        assert [delta.finish for delta in ended if delta.request == late] == [Finish.LENGTH]
        assert engine.num_open == decoding, "the others still decode"
        assert engine.passes - passes <= -(-40 // max(chunk_tokens // 4, 1)) + 1
