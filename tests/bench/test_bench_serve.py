"""What `make bench-serve` sends and reports: arrivals that do not wait, scaled requests, and figures."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench_serve
from serve.arrivals import Arrival, Load, made_up, scaled
from serve.figures import different, fell_behind, figures, percentiles
from serve.open_loop import Heard, Played, client, play
from server.serving import Held, Running, running
from stepwell.sim.trace import TraceRequest

LOAD = Load(clients=16, rate=0.5, seconds=10, longest=600, answer_tokens=16, leaving=0.3)


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_made_up_arrivals_repeat_come_in_order_and_share_prompts() -> None:
    arrivals = made_up(LOAD)
    assert arrivals == made_up(LOAD) and len(arrivals) == LOAD.count == 80
    times = [each.at_s for each in arrivals]
    assert times == sorted(times) and times[0] == 0 and times[-1] == LOAD.seconds
    lengths = [len(each.prompt) for each in arrivals]
    assert max(lengths) == LOAD.longest and min(lengths) < LOAD.longest / 2, "long and short prompts"
    assert all(2 <= each.answer_tokens <= LOAD.answer_tokens for each in arrivals)
    leaving = [each for each in arrivals if each.leaves_after is not None]
    assert 8 < len(leaving) < 40 and all(each.leaves_after < each.answer_tokens for each in leaving if each.leaves_after)
    returning = sum(any(shared(a.prompt, b.prompt) > len(a.prompt) / 2 for b in arrivals[:at]) for at, a in enumerate(arrivals))
    assert returning > len(arrivals) / 2, "sessions come back with what they said before"


def test_scaled_requests_keep_what_they_share() -> None:
    blocks = [np.array([*range(5), *range(1000 * at + 100, 1000 * at + 105)], np.int64) for at in range(4)]
    requests = [
        TraceRequest(at_s=10.0 * at, session=str(at), prompt_tokens=1050, output_tokens=50, blocks=each)
        for at, each in enumerate(blocks)
    ]
    load = Load(clients=1, rate=1.0, seconds=4.0, longest=105, answer_tokens=5, leaving=0.0)
    arrivals = scaled(requests, 100, load)
    assert [each.at_s for each in arrivals] == pytest.approx([0, 4 / 3, 8 / 3, 4])
    assert {len(each.prompt) for each in arrivals} == {105} and {each.answer_tokens for each in arrivals} == {5}
    assert shared(arrivals[0].prompt, arrivals[1].prompt) in range(50, 54)  # half, and letters that happen to agree


def arrival(at_s: float, *, tokens: int = 20, leaves_after: int | None = None, seed: int = 0) -> Arrival:
    return Arrival(
        at_s=at_s, prompt=tuple(97 + (seed + at) % 26 for at in range(tokens)), answer_tokens=6, leaves_after=leaves_after
    )


def played(served: Running, *arrivals: Arrival, **more: object) -> Played:
    async def playing() -> Played:
        async with client() as http:
            return await play(http, served.address, list(enumerate(arrivals)), dict(more))

    return asyncio.run(playing())


def test_requests_are_sent_when_they_are_due_though_nobody_was_answered() -> None:
    with running(serving={"aliases": ("bench",)}) as served, Held(served) as held, ThreadPoolExecutor(1) as threads:
        playing = threads.submit(played, served, *(arrival(0.05 * at, seed=at) for at in range(5)))
        served.settle(lambda engine: engine.num_open == 5)
        held.let_go()
        heard = playing.result().heard
        assert [each.outcome for each in heard] == ["done"] * 5
        assert all(each.answer_tokens == 6 and sum(each.sources.values()) == 20 for each in heard)
        assert all(0 < each.chunks_s[0] <= each.ended_s for each in heard)


def test_clients_that_leave_are_refused_or_meet_nobody_are_told_apart() -> None:
    with running(serving={"aliases": ("bench",)}) as served:
        left, long = played(served, arrival(0, leaves_after=1), arrival(0, tokens=5000)).heard
        assert left.outcome == "left" and len(left.chunks_s) == 1
        assert long.outcome == "refused" and "5000" in long.error
    alone = played(served, arrival(0)).heard[0]
    assert alone.outcome == "failed" and "ConnectError" in alone.error


def heard(number: int, *, first_s: float, late_s: float = 0.0, text: str = "x") -> Heard:
    sources = {"device": 60, "host": 20, "store": 0, "computed": 20}
    return Heard(
        arrival=number, late_s=late_s, outcome="done", chunks_s=[first_s, first_s + 0.1, first_s + 0.4], ended_s=first_s + 0.5,
        text=text, prompt_tokens=100, answer_tokens=3, sources=sources,
    )  # fmt: skip


def test_figures_count_what_clients_heard() -> None:
    failed = Heard(arrival=2, late_s=0.0)
    parts = [Played(seconds=1.0, heard=(heard(0, first_s=1.0),)), Played(seconds=3.0, heard=(heard(1, first_s=3.0), failed))]
    found = figures(parts)
    assert (found["done"], found["failed"], found["requests_per_s"], found["output_tokens_per_s"]) == (2, 1, 0.5, 1.5)
    assert found["first_token_s"] == {"p50": 1.0, "p90": 3.0, "p99": 3.0} and found["hit_share"] == pytest.approx(0.8)
    assert found["between_tokens_s"]["p50"] == pytest.approx(0.1) and found["between_tokens_s"]["p99"] == pytest.approx(0.3)
    assert percentiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99} and percentiles([]) is None


def test_a_load_generator_that_falls_behind_says_so() -> None:
    quick = figures([Played(seconds=1.0, heard=(heard(0, first_s=1.0, late_s=0.001),))])
    slow = figures([Played(seconds=1.0, heard=(heard(0, first_s=1.0, late_s=0.2),))])
    assert fell_behind(quick) is None and fell_behind(slow) == 0.2


def test_answers_that_differ_between_cases_are_found() -> None:
    one, other = ([Played(seconds=1.0, heard=(heard(0, first_s=1), heard(1, first_s=1, text=text)))] for text in ("x", "y"))
    assert different({"tiers": one, "none": one}) == [] and different({"tiers": one, "none": other}) == [1]


@pytest.mark.parametrize(
    ("serve_args", "device", "gpu"),
    [
        (["--device", "cuda", "--dtype", "fp32"], "cuda", "a GPU"),
        (["--dtype", "bf16"], "cuda", "a GPU"),  # as the server finds it for itself
        (["--device=cpu", "--kernels", "torch"], "cpu", None),
    ],
)
def test_what_the_servers_ran_on_and_were_told_is_kept(
    serve_args: list[str], device: str, gpu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", "--quick", "--serve-args", *serve_args])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    found = bench_serve._served_on(bench_serve._arguments())
    assert (found["serve_args"], found["device"], found["machine"]["gpu"]) == (serve_args, device, gpu)


def test_the_whole_bench_runs_and_a_control_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    for name, value in (("RATE", 1.0), ("LEAVING", 0.0)):
        monkeypatch.setattr(bench_serve, name, value)
    small = {"clients": [2], "seconds": 2.0, "rounds": 1, "longest": 200, "answer": 4}
    monkeypatch.setattr(bench_serve, "QUICK", bench_serve.QUICK | small)
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", "--quick", "--control", "--json", str(file)])
    assert bench_serve.main() == 0
    found = json.loads(file.read_text())
    assert [each["case"] for each in found["results"]] == ["tiers", "device", "none", "again"]
    assert found["different_answers"].keys() == found["different_without_reuse"].keys() == {"2"}
    assert (found["serve_args"], found["device"]) == ([], "cuda" if found["machine"]["gpu"] else "cpu")
    assert all(each["done"] > 0 for each in found["results"]) and "without reuse, played twice" in capsys.readouterr().out
