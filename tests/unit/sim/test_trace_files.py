"""Traces are read in every format, as the same requests, and hostile files are refused by name and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from small_traces import branching

from stepwell.sim.describe import describe
from stepwell.sim.files import TraceFile, write_trace
from stepwell.sim.formats import MOST_PROMPT_TOKENS, TraceError
from stepwell.sim.tally import Ceiling
from stepwell.sim.trace import MAX_BLOCK_ID, TraceRequest, prompt_of, runs_of

HEADER = {"format": "stepwell-trace", "version": 1, "block_tokens": 64}
GOOD = {"t": 1.5, "session": 3, "in": 200, "out": 7, "runs": [[10, 2], [2**53 - 1, 1]]}


def lines(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def fields(request: TraceRequest) -> tuple[float, str, int, int, list[int]]:
    return request.at_s, request.session, request.prompt_tokens, request.output_tokens, request.blocks.tolist()


def test_our_own_format(tmp_path: Path) -> None:
    trace = TraceFile(lines(tmp_path / "t.jsonl", HEADER, GOOD))
    assert (trace.format, trace.block_tokens) == ("stepwell", 64)
    assert [fields(each) for each in trace] == [(1.5, "3", 200, 7, [10, 11, 2**53 - 1])]
    assert [fields(each) for each in trace] == [(1.5, "3", 200, 7, [10, 11, 2**53 - 1])], "a trace can be read twice"
    assert trace.read_bytes == trace.size_bytes


def test_mooncake(tmp_path: Path) -> None:
    line = {"timestamp": 2500, "input_length": 1100, "output_length": 5, "hash_ids": [4, 9, 2]}
    trace = TraceFile(lines(tmp_path / "t.jsonl", line))
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert [fields(each) for each in trace] == [(2.5, "", 1100, 5, [4, 9, 2])]


def test_token_ids_share_blocks_exactly_as_far_as_they_are_equal(tmp_path: Path) -> None:
    base = list(range(100))
    other = [*base[:40], 7, *base[41:]]
    trace = TraceFile(lines(tmp_path / "t.jsonl", base, {"tokens": other, "t": 2, "session": "a", "out": 3}, base[:35]))
    first, second, third = trace
    assert (trace.format, trace.block_tokens, first.prompt_tokens, second.at_s, second.output_tokens) == ("tokens", 16, 100, 2, 3)
    assert (first.blocks[:2] == second.blocks[:2]).all()
    assert not set(first.blocks[2:].tolist()) & set(second.blocks[2:].tolist()), "what follows a difference has another history"
    assert third.blocks.tolist() == first.blocks[:2].tolist()


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    requests = branching(40, seed=1)
    assert write_trace(tmp_path / name, requests, block_tokens=4, source="test") == 40
    trace = TraceFile(tmp_path / name)
    assert [fields(each) for each in trace] == [fields(each) for each in requests]
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith(".gz") else b'{"')


def test_a_trace_can_be_converted_onto_itself(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", list(range(40)), list(range(50)))
    trace = TraceFile(path)
    before = [fields(each) for each in trace]
    write_trace(path, trace, block_tokens=trace.block_tokens, source="itself")
    assert [fields(each) for each in TraceFile(path)] == before
    assert [each.name for each in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_failed_conversion_leaves_what_was_there(tmp_path: Path) -> None:
    source, out = lines(tmp_path / "in.jsonl", [1, 2], "x"), tmp_path / "out.jsonl"
    out.write_text("precious")
    with pytest.raises(TraceError):
        write_trace(out, TraceFile(source), block_tokens=16, source="")
    assert out.read_text() == "precious"
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


BAD_REQUESTS = {
    "not an object": 7,
    "no time": {key: value for key, value in GOOD.items() if key != "t"},
    "time is not a number": GOOD | {"t": float("nan")},
    "time before the start": GOOD | {"t": -1},
    "no prompt": GOOD | {"in": 0},
    "prompt of a fraction": GOOD | {"in": 1.5},
    "prompt is true": GOOD | {"in": True},
    "endless prompt": GOOD | {"in": MOST_PROMPT_TOKENS + 1},
    "negative answer": GOOD | {"out": -1},
    "no runs": GOOD | {"runs": None},
    "flat runs": GOOD | {"runs": [1, 2]},
    "run of nothing": GOOD | {"runs": [[1, 0]]},
    "run of texts": GOOD | {"runs": [["a", "b"]]},
    "negative id": GOOD | {"runs": [[-1, 1]]},
    "id too large": GOOD | {"runs": [[MAX_BLOCK_ID, 1]]},
    "more blocks than tokens": GOOD | {"runs": [[0, 5]]},
    "endless run": GOOD | {"runs": [[0, 10**15]]},
}


@pytest.mark.parametrize("bad", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_named_by_file_and_line(tmp_path: Path, bad: object) -> None:
    path = lines(tmp_path / "bad.jsonl", HEADER, GOOD, bad)
    with pytest.raises(TraceError, match=r"bad\.jsonl, line 3: "):
        list(TraceFile(path))


BAD_IDS = [3, [1, [2]], [-1], [2**53], [2**70], [0.5], [1, 2, 3, 4]]


@pytest.mark.parametrize("bad", [*({"hash_ids": ids} for ids in BAD_IDS), {"timestamp": "x"}, {"input_length": None}])
def test_a_bad_mooncake_request_is_refused(tmp_path: Path, bad: dict[str, object]) -> None:
    good = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [4, 9, 2]}
    with pytest.raises(TraceError, match="line 2: "):
        list(TraceFile(lines(tmp_path / "t.jsonl", good, good | bad)))


@pytest.mark.parametrize("bad", [[], [-1], [2**31], ["a"], [[1]], [1.5], {"tokens": None}, {"tokens": [1], "t": "now"}])
def test_bad_token_ids_are_refused(tmp_path: Path, bad: object) -> None:
    with pytest.raises(TraceError, match="line 2: "):
        list(TraceFile(lines(tmp_path / "t.jsonl", [1, 2], bad)))


@pytest.mark.parametrize(
    "header",
    [{"format": "other"}, {}, 3, HEADER | {"version": 2}, HEADER | {"block_tokens": 1}, HEADER | {"block_tokens": 2**40}],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(TraceError, match="line 1: "):
        TraceFile(lines(tmp_path / "t.jsonl", header, GOOD))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(("[1, 2]\n" * 10_000).encode())
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for name, content in {"empty": b"", "cut": whole[: len(whole) // 2], "damaged": bytes(damaged), "no json": b"[1,\n",
                          "no text": b"[1]\n\xff\xfe", "deep": b"[" * 100_000 + b"\n"}.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=name):
            list(TraceFile(tmp_path / name))
    for missing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            TraceFile(missing)


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n[1, 2]\n\n  \n[3]\n")
    assert [each.prompt_tokens for each in TraceFile(path)] == [2, 1]


def test_prompts_share_tokens_exactly_as_far_as_blocks() -> None:
    def prompt(*blocks: int, tokens: int, number: int = 1) -> list[int]:
        request = TraceRequest(at_s=0, session="", prompt_tokens=tokens, output_tokens=0, blocks=np.array(blocks, np.int64))
        return prompt_of(request, 4, number=number).tolist()

    high = 2**53 - 1
    assert prompt(1, high, tokens=8)[:4] == prompt(1, 2, tokens=8)[:4] == [1, 0, 0, 0]
    assert prompt(high, tokens=4) == [2**31 - 1, 2**22 - 1, 0, 0]
    assert prompt(2**31, tokens=4) != prompt(0, tokens=4)
    assert prompt(1, 2, tokens=6) == [1, 0, 0, 0, 2, 0]
    assert prompt(1, tokens=10, number=1)[4:] != prompt(1, tokens=10, number=2)[4:]
    assert len(prompt(1, tokens=10)) == 10


def test_runs_are_consecutive_ids() -> None:
    assert runs_of(np.array([5, 6, 7, 2, 3, 9], np.int64)) == [[5, 3], [2, 2], [9, 1]]
    assert runs_of(np.array([], np.int64)) == []


def test_a_description_counts_blocks_that_come_again(tmp_path: Path) -> None:
    trace = TraceFile(lines(tmp_path / "t.jsonl", HEADER, GOOD, GOOD | {"t": 4.0, "in": 300}))
    found = describe(trace, block_tokens=64)
    assert (found.requests, found.sessions, found.duration_s, found.prompt_tokens, found.output_tokens) == (2, 1, 2.5, 500, 14)
    assert (found.blocks, found.distinct_blocks, found.repeated, found.prompt_tokens_max) == (6, 3, 0.5, 300)


def test_the_ceiling_counts_whole_boundaries_that_came_before() -> None:
    from toys import FULL

    ceiling = Ceiling(FULL, 4, whole_blocks=False)
    requests = branching(100, seed=3, tails=(0, 1))
    seen: set[tuple[int, ...]] = set()
    for each in requests:
        path = each.blocks.tolist()
        known = max((depth for depth in range(len(path) + 1) if tuple(path[:depth]) in seen), default=0)
        assert ceiling.reusable(each) == min(known * 4, (each.prompt_tokens - 1) // 4 * 4)
        seen |= {tuple(path[: depth + 1]) for depth in range(len(path))}
