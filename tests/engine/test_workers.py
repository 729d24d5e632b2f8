"""Ranks in processes of their own compute, cache and store what one rank does; one that is lost takes nothing else along."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Timer
from time import monotonic

import pytest

from engine.worker_engines import FETCHED, PATIENT, answers, open_engine, prompt, same
from stepwell.base.errors import ConfigError
from stepwell.base.inherited_block import InheritedBlock
from stepwell.engine import Engine, Finish, GenerateRequest, Sampling
from stepwell.engine.engine import UPKEEP_S
from stepwell.engine.running.runner import PassesLost, PassFailed
from stepwell.engine.workers.messages import COPY
from stepwell.engine.workers.rank_workers import RankWorkers, _merged
from stepwell.engine.workers.ranked_runner import RankedRunner
from stepwell.jobs.channel import Message
from waiting import run_to_the_end, run_until, settle, wait_until

pytest.importorskip("transformers")

FAMILIES = ("llama", "gemma3", "qwen3_next", "falcon_h1", "deepseek_v32", "deepseek_v4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one_from_every_tier_and_leave_each_other_their_store(
    family: str, root: Path, tmp_path: Path
) -> None:
    asked = [prompt(300), prompt(300)[:260] + prompt(60, seed=2)]
    with open_engine(family, root, 1) as alone:
        expected = answers(alone, asked)
    store = f"log:{tmp_path / 'store'}"
    with open_engine(family, root, 2, store=store, store_config=FETCHED) as two:
        same(answers(two, asked), expected)  # computed, and from the device
        settle(two.cache)
        two.cache.lose_device()
        found = answers(two, asked)
        same(found, expected)
        assert found[0].usage.sources.host > 0, found[0].usage.sources
        settle(two.cache)
        two.cache.flush()
        found = answers(two, asked)
        same(found, expected)
        assert found[0].usage.sources.store > 0, found[0].usage.sources
        settle(two.cache)
        two.cache.audit()
    with open_engine(family, root, 1, store=store, store_config=FETCHED) as one:  # what two ranks stored serves one
        found = answers(one, asked)
        same(found, expected)
        assert found[0].usage.sources.store > 0, found[0].usage.sources
        settle(one.cache)
        one.cache.audit()


# ---- what is lost -------------------------------------------------------------------------------


@pytest.fixture
def engine(root: Path) -> Iterator[Engine]:
    """Two ranks that are started anew when one is lost; a stopped one counts as lost after a while."""
    limits = replace(PATIENT, silent_s=8.0)
    with open_engine("gemma3", root, 2, restart_workers=True, worker_limits=limits) as made:
        yield made


def pids(engine: Engine) -> tuple[int, ...]:
    assert engine.ranks is not None
    return engine.ranks.pids


def workers_of(engine: Engine) -> RankWorkers:
    assert isinstance(engine._runner, RankedRunner)
    return engine._runner.workers


@pytest.mark.parametrize(("sign", "says"), [(signal.SIGKILL, "ended by SIGKILL"), (signal.SIGSTOP, "did not respond")])
def test_a_lost_rank_fails_its_requests_and_comes_back_with_a_warm_host(engine: Engine, sign: int, says: str) -> None:
    before = answers(engine, [prompt(300)])
    settle(engine.cache)
    number = engine.submit(GenerateRequest(tokens=prompt(200, seed=7), sampling=Sampling(max_tokens=500, ignore_eos=True)))
    run_until(engine, lambda: engine.passes > 20)
    lost = pids(engine)
    os.kill(lost[1], sign)
    ends = [delta for delta in run_to_the_end(engine) if delta.finish is not None]
    assert [(each.request, each.finish) for each in ends] == [(number, Finish.FAILED)]
    assert "rank 1" in str(ends[0].error)
    assert engine.ranks is not None and engine.ranks.losses == 1 and says in str(engine.ranks.last_loss), engine.ranks
    engine.cache.audit()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in lost), "a rank of before is still there"
    after = answers(engine, [prompt(300)])  # waits for the new ones
    same(after, before)
    assert after[0].usage.sources.host >= 256, after[0].usage.sources
    settle(engine.cache)
    engine.cache.audit()


def test_a_rank_that_only_pauses_is_waited_for(engine: Engine) -> None:
    expected = answers(engine, [prompt(200, seed=7)])
    stopped = pids(engine)[1]
    os.kill(stopped, signal.SIGSTOP)
    goes_on = Timer(1.0, os.kill, (stopped, signal.SIGCONT))
    goes_on.start()
    same(answers(engine, [prompt(200, seed=7)]), expected)
    goes_on.join()
    assert engine.ranks is not None and engine.ranks.losses == 0


def test_a_rank_that_is_stopped_while_it_loads_is_missed_long_before_its_start_is_late(engine: Engine) -> None:
    expected = answers(engine, [prompt(100)])
    processes = workers_of(engine)._processes
    os.kill(pids(engine)[0], signal.SIGKILL)
    run_until(engine, lambda: engine.ranks is not None and engine.ranks.state == "starting" and processes._ranks[1].spoke)
    os.kill(pids(engine)[1], signal.SIGSTOP)
    processes.silent_s = 8.0  # not the three times as long that it would have
    run_until(engine, lambda: engine.ranks is not None and engine.ranks.losses == 2)
    assert engine.ranks is not None and "rank 1 was lost: it did not respond" in str(engine.ranks.last_loss)
    same(answers(engine, [prompt(100)]), expected)


def test_a_rank_killed_amid_copies_leaves_the_cache_sound(engine: Engine) -> None:
    expected = answers(engine, [prompt(300)])
    for round_ in range(3):
        wait_until(lambda: engine.step() is not None and engine.lost is None)
        for seed in range(4):
            engine.submit(GenerateRequest(tokens=prompt(290, seed=50 * round_ + seed), sampling=Sampling(max_tokens=4)))
        passes = engine.passes
        run_until(engine, lambda passes=passes, round_=round_: engine.passes > passes + 3 * round_)  # type: ignore[misc]
        os.kill(pids(engine)[round_ % 2], signal.SIGKILL)
        run_to_the_end(engine)
        engine.cache.audit()
    same(answers(engine, [prompt(300)]), expected)
    settle(engine.cache)
    engine.cache.audit()


def test_a_pass_that_somebody_interrupts_is_not_taken_for_the_next_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does in a script: the ranks finish that pass, and no request gets what they say of it."""
    asked = [prompt(100), prompt(100, seed=3)]
    expected = answers(engine, asked)
    workers = workers_of(engine)
    wait = workers._await_answers

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_await_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt(100, seed=9), max_tokens=20)
    assert workers._await_answers == wait and not workers._answers.open, "the engine waited for it before it released pages"
    same(answers(engine, asked), expected)
    assert engine.ranks is not None and engine.ranks.losses == 0
    settle(engine.cache)
    engine.cache.audit()


def test_what_a_store_brings_while_ranks_start_is_copied_when_they_run(root: Path, tmp_path: Path) -> None:
    store = f"log:{tmp_path / 'store'}"
    with open_engine("gemma3", root, 2, store=store, store_config=FETCHED) as engine:
        expected = answers(engine, [prompt(300)])
    with open_engine("gemma3", root, 2, store=store, store_config=FETCHED, restart_workers=True) as engine:
        answers(engine, [prompt(60, seed=4)])
        os.kill(pids(engine)[0], signal.SIGKILL)
        run_until(engine, lambda: engine.ranks is not None and engine.ranks.losses == 1)
        found = answers(engine, [prompt(300)])  # looked for while new ranks load
        same(found, expected)
        assert found[0].usage.sources.store > 0, found[0].usage.sources
        settle(engine.cache)
        assert engine.cache.copying == 0
        engine.cache.audit()


def test_without_restarts_requests_are_refused_with_the_rank(root: Path) -> None:
    with open_engine("llama", root, 2) as engine:
        first = engine.submit(GenerateRequest(tokens=prompt(100), sampling=Sampling(max_tokens=200, ignore_eos=True)))
        run_until(engine, lambda: engine.passes > 5)
        os.kill(pids(engine)[0], signal.SIGKILL)
        ends = [delta for delta in run_to_the_end(engine) if delta.finish is not None]
        assert [(each.request, each.finish) for each in ends] == [(first, Finish.FAILED)] and "rank 0" in str(ends[0].error)
        with pytest.raises(PassesLost, match="rank 0 was lost"):
            engine.submit(GenerateRequest(tokens=prompt(100)))
        assert engine.gone
        engine.cache.audit()


def test_what_ranks_cannot_do_is_said_before_anything_is_loaded(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 ranks cannot share the 2 parts of state 'kv' equally"):
        open_engine("llama", root, 3)
    with pytest.raises(ConfigError, match="restart_workers is for ranks"):
        open_engine("llama", root, 1, restart_workers=True)
    with pytest.raises(ConfigError, match="worker_limits is for ranks"):
        open_engine("llama", root, 1, worker_limits=PATIENT)


@pytest.mark.parametrize("given", [{"draft": "mtp"}, {"sparse": "quest"}, {"checkpoint_dtype": "int8"}])
def test_what_would_be_ignored_is_refused_with_what_to_do(given: dict[str, object], root: Path) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"{name} works on one rank only, so far: leave it out, or use tensor_parallel 1"):
        open_engine("llama", root, 2, **given)


def test_a_rank_that_cannot_start_says_why(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank \d was lost: it failed: .*cannot hold one page"):
        open_engine("llama", root, 2, device_memory="8KiB")


# ---- what goes wrong on ranks that live ---------------------------------------------------------


def send_instead(engine: Engine, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...]) -> None:
    """Sends some ranks a token, in the next pass, that the model does not know."""
    workers = workers_of(engine)

    def send_all(message: Message) -> None:
        monkeypatch.undo()
        ints = message.arrays[0].copy()
        ints[message.numbers[3]] = 9999  # behind what each row goes on from: the first token
        wrong = replace(message, arrays=[ints, *message.arrays[1:]])
        for rank in range(workers.size):
            workers._processes.send(rank, wrong if rank in ranks else message, work=True)

    monkeypatch.setattr(workers, "send_all", send_all)


def test_a_pass_that_fails_on_all_ranks_ends_its_requests_and_no_rank(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, before = answers(engine, [prompt(100)]), pids(engine)
    settle(engine.cache)
    number = engine.submit(GenerateRequest(tokens=prompt(50, seed=5)))
    send_instead(engine, monkeypatch, (0, 1))
    with pytest.raises(PassFailed, match="rank 0: ValueError: tokens out of range"):
        run_to_the_end(engine)
    assert [(each.request, each.finish) for each in engine.step()] == [(number, Finish.FAILED)]
    same(answers(engine, [prompt(100)]), expected)
    assert pids(engine) == before and engine.ranks is not None and engine.ranks.losses == 0
    settle(engine.cache)
    engine.cache.audit()


def test_a_pass_that_fails_on_one_rank_alone_loses_it_for_the_others_wait_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(engine, [prompt(100)])
    settle(engine.cache)
    number = engine.submit(GenerateRequest(tokens=prompt(50, seed=5)))
    send_instead(engine, monkeypatch, (1,))
    ends = [delta for delta in run_to_the_end(engine) if delta.finish is not None]
    assert [(each.request, each.finish) for each in ends] == [(number, Finish.FAILED)] and "rank 1" in str(ends[0].error)
    assert engine.ranks is not None and "rank 1 was lost: it failed: ValueError" in str(engine.ranks.last_loss)
    same(answers(engine, [prompt(100)]), expected)


def test_kernels_that_fail_again_on_new_ranks_are_counted_again(engine: Engine) -> None:
    workers, counters = workers_of(engine), engine.cache.counters
    for count in (1, 2):
        workers.kernels.failed["attend"] = "rank 1: as a worker says it"
        engine.generate(prompt(40), max_tokens=1)
        assert counters["kernel_fallbacks"] == count
        if count == 1:
            os.kill(pids(engine)[0], signal.SIGKILL)
            run_until(engine, lambda: engine.lost is not None)
            run_until(engine, lambda: engine.lost is None)
            assert not workers.kernels.failed


def test_what_a_ranks_library_leaves_to_plain_torch_is_heard(engine: Engine) -> None:
    workers = workers_of(engine)
    engine.generate(prompt(40), max_tokens=1)
    workers._answers.begin()
    said = {"error": "", "left": {"attention": "heads of 80 channels"}}
    workers._take(0, Message(kind="broke", numbers=(workers._answers.number, 0), fields=said))
    assert "torch for heads of 80 channels" in workers.kernels.lines()["attention"]


def test_nobody_asks_without_end_while_ranks_are_down(engine: Engine) -> None:
    engine.generate(prompt(40), max_tokens=1)
    os.kill(pids(engine)[0], signal.SIGKILL)
    run_until(engine, lambda: engine.lost is not None)
    engine.submit(GenerateRequest(tokens=prompt(40), sampling=Sampling(max_tokens=1)))
    assert engine.idle and engine.pause_s == UPKEEP_S
    run_to_the_end(engine)
    assert engine.lost is None


def test_closing_does_not_wait_for_copies_of_a_rank_that_is_gone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("gemma3", root, 2)
    workers, send_all = workers_of(engine), workers_of(engine).send_all
    copies: list[Message] = []

    def stop_before_copies(message: Message) -> None:
        if message.kind == COPY:
            os.kill(workers.pids[1], signal.SIGSTOP)
            copies.append(message)
        send_all(message)

    monkeypatch.setattr(workers, "send_all", stop_before_copies)
    engine.submit(GenerateRequest(tokens=prompt(300)))
    run_until(engine, lambda: bool(copies))
    os.kill(workers.pids[1], signal.SIGKILL)
    began_s = monotonic()
    engine.close()
    assert monotonic() - began_s < 15, "it waited for what never comes"


def test_an_engine_that_cannot_be_finished_leaves_no_process_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RankWorkers] = []
    start = RankWorkers.start

    def keep(self: RankWorkers) -> None:
        start(self)
        made.append(self)

    monkeypatch.setattr(RankWorkers, "start", keep)
    monkeypatch.setattr("stepwell.engine.building.build_ranked.longest_request", lambda *args, **more: 1 // 0)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ZeroDivisionError):
        open_engine("llama", root, 2, store="memory:")
    assert made and not made[0].pids
    made.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_host_memory_of_ranks_is_the_one_that_was_given(root: Path) -> None:
    blocks: list[InheritedBlock] = []

    def make(size_bytes: int) -> InheritedBlock:
        blocks.append(InheritedBlock(size_bytes))
        return blocks[0]

    with open_engine("llama", root, 2, host_block=make) as engine:
        answers(engine, [prompt(300)])
        settle(engine.cache)
        assert len(blocks) == 1 and any(blocks[0].view), "no page was saved to it"


def test_what_runs_operations_is_told_of_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    merged = _merged([{"attend": "torch", "pick": "triton"}, {"attend": "torch", "pick": "torch"}])
    assert merged.lines() == {"attend": "torch", "pick": "triton; rank 1: torch"}
    assert "ranks run pick by different libraries" in caplog.text
