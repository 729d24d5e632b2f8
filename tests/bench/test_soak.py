"""A short soak: every kind of trouble once, and what the soak itself makes of wrong answers and of memory that grows."""

from __future__ import annotations

import asyncio
import sys
from math import inf
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from soaking.asking import Tally
from soaking.backend import Footprint
from soaking.growing import JUDGED_FROM_S, Sample, growth
from soaking.known import Known, Shape
from soaking.servers_said import keep, traces, warnings
from soaking.soaked import LEFT_BYTES_A_REQUEST, NOISE_BYTES, Plan, Verdict, grown_too_much, soak
from soaking.troubles import flip

LONGEST_S = 900.0  # that a soak of half a minute may take on a machine that is busy with something else
SMALL = Shape(instructions=1, sessions=3, turns=3, instruction_tokens=(70, 100), turn_tokens=(20, 80), answer_tokens=5)


@pytest.mark.skipif(sys.platform != "linux", reason="shared-log needs Linux")
@pytest.mark.soak
def test_servers_answer_rightly_through_one_trouble_of_each_kind(tmp_path: Path) -> None:
    plan = Plan(seed=3, seconds=3600, clients=3, pause_s=(0.0, 1.0), rounds=1, shape=SMALL)  # rounds end it, not time
    verdict = asyncio.run(asyncio.wait_for(soak(plan, tmp_path, lambda what: None), LONGEST_S))
    assert not verdict.faults
    assert min(verdict.troubles.values()) >= 1 and len(verdict.troubles) >= 8
    assert verdict.answered_after == SMALL.count and verdict.tally.outcomes["left"]


def test_an_answer_is_right_only_with_the_right_tokens_and_logprobs() -> None:
    known = Known(number=0, prompt=(1,), tokens=(5, 6), words=("a", "b"), logprobs=(-1.0, -2.0))
    assert known.wrong(["a", "b"], [-1.0, -2.00005], whole=True) is None
    assert known.wrong(["a"], [-1.0], whole=False) is None and known.wrong([], [], whole=False) is None
    assert "1 tokens came" in str(known.wrong(["a"], [-1.0], whole=True))
    assert "right is" in str(known.wrong(["a", "c"], [-1.0, -2.0], whole=True))
    assert "right is" in str(known.wrong(["c"], [-1.0], whole=False))
    assert "off by" in str(known.wrong(["a", "b"], [-1.0, -2.0005], whole=True))


def samples(
    bytes_a_second: float, *, seconds: float = 1800, files: float = 0.0, connected: int = 0, owns_from_s: float = inf
) -> list[Sample]:
    """A process that fills its tiers for 100 s, and has waves of noise ever after; connections in the end. As the log's owner
    it has those of all others too, with a thread for each.
    """
    random = Random(1)

    def found(at: int) -> Footprint:
        memory = min(at, 100) * 2e6 + at * bytes_a_second + random.uniform(0, 8e6)
        late = connected if at > 0.7 * seconds and at % 100 else 0
        owns, theirs = at >= owns_from_s, 30 if at >= owns_from_s else 0
        return Footprint(memory_bytes=int(memory), files=int(20 + files * at) + late + theirs, threads=9 + theirs, owns=owns)

    return [Sample(at_s=at, found=found(at)) for at in range(int(seconds))]


def test_memory_that_fills_and_stays_is_flat_and_memory_that_grows_is_told() -> None:
    requests = 3000
    allowed = (NOISE_BYTES + LEFT_BYTES_A_REQUEST * requests * 2 / 3) / 1200  # bytes a second after the warm-up
    assert grown_too_much(growth(samples(0.0)), requests) == []
    assert grown_too_much(growth(samples(0.8 * allowed)), requests) == []
    assert "memory grew" in grown_too_much(growth(samples(1.3 * allowed)), requests)[0]
    assert "more files" in grown_too_much(growth(samples(0.0, files=0.1)), requests)[0]
    assert grown_too_much(growth(samples(0.0, connected=40)), requests) == []  # they come and go
    assert grown_too_much(growth(samples(0.0, owns_from_s=1300)), requests) == []  # it was never the owner before
    assert "more files" in grown_too_much(growth(samples(0.0, files=0.1, owns_from_s=700)), requests)[0]
    assert grown_too_much(growth(samples(1e6, seconds=JUDGED_FROM_S)), requests) == []  # too short a watch
    assert grown_too_much(growth([]), requests) == []


def test_memory_is_called_flat_only_where_it_was_watched_for_long_enough() -> None:
    def says(seconds: float, *faults: str) -> str:
        plan, grown = Plan(seed=1, seconds=seconds), growth(samples(0.0, seconds=seconds))
        return Verdict(
            plan=plan, tally=Tally(), troubles={}, growth=grown, counters={}, answered_after=0, damaged=0, warned={},
            took_s=seconds, faults=list(faults),
        ).says  # fmt: skip

    assert "memory flat" in says(1800) and "memory flat" not in says(120) and "not judged" in says(2)
    assert says(1800, "a wrong answer") == "1 faults"


def test_a_flipped_bit_is_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "0001.seg"
    path.write_bytes(bytes(100))
    flip(path, Random(1))
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    flip(tmp_path / "gone.seg", Random(1))


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in step\nIndexError: 9\n'


def test_every_exception_in_a_log_is_told_with_what_stands_around_it_up_to_a_few(tmp_path: Path) -> None:
    apart = "2026-01-31T12:00:00.000Z info request ended id=1\n" * 200
    (quiet := tmp_path / "quiet.log").write_text(apart)
    (broken := tmp_path / "broken.log").write_text(f"{apart}error a pass failed\n{TRACE}During handling\n{TRACE}{apart}{TRACE}")
    (looping := tmp_path / "looping.log").write_text((TRACE + apart) * 20)
    assert traces([quiet]) == []
    first, second = traces([quiet, broken])
    assert first.startswith("broken.log: ") and "a pass failed" in first and first.count("IndexError: 9") == 2
    assert second.count("IndexError: 9") == 1
    assert len(traces([looping])) == 5


def test_warnings_are_counted_by_what_they_say(tmp_path: Path) -> None:
    (path := tmp_path / "server.log").write_text(
        "2026-01-31T12:00:00.000Z warning process 17 is slow\n2026-01-31T12:00:01.000Z info ready\n"
        "2026-01-31T12:00:02.000Z warning process 18 is slow\n2026-01-31T12:00:03.000Z error a pass failed\nno line of a log\n"
    )
    assert warnings([path, path]) == {"warning process N is slow": 4, "error a pass failed": 2}


def test_logs_are_kept_in_place_of_those_of_the_same_servers(tmp_path: Path) -> None:
    (log := tmp_path / "steady-0.log").write_bytes(b"short")
    (kept := tmp_path / "kept").mkdir()
    for name in ("steady-17.log", "notes.log"):
        (kept / name).touch()
    keep([log], kept)
    assert {path.name for path in kept.iterdir()} == {"steady-0.log", "notes.log"}
    assert (kept / "steady-0.log").read_bytes() == b"short"
