"""Rows are right wherever they are, slots go to whom the rules say, and a hint is never believed. Plain torch and Triton."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from sparse.trace import STEADY, count_misses, make_trace  # noqa: E402
from stepwell.memory.row_pages import ABSENT, Changes  # noqa: E402
from stepwell.sparse import resolve as plain  # noqa: E402
from stepwell.sparse.counts import FETCHED  # noqa: E402
from stepwell.sparse.places import LAST_PASS, Places, Read  # noqa: E402
from stepwell.sparse.resolve import LAST, Fetch, Plan, Resolve, Wanted, score_bins  # noqa: E402
from unit.sparse.far import PAGES, WHICH, spread  # noqa: E402
from unit.sparse.scene import R, Scene, live, random_pass, tables_of  # noqa: E402

Both = tuple[Resolve, Fetch]
SIZES = [(8, 2), (7, 2), (8, 3), (8, 1), (8, 0), (3, 4)]
NAMES = ["H=K", "H=K+1", "H>K", "H<K", "H=0", "H>>K"]


def interpreted() -> Both:
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted where there is CUDA: see tests/gpu/test_sparse_on_cuda.py")
    from stepwell.sparse import triton_fetch, triton_resolve

    return triton_resolve.resolve, partial(triton_fetch.fetch, programs=2, units=16)


@pytest.fixture(params=["torch", "triton"])
def both(request: pytest.FixtureRequest) -> Both:
    return (plain.resolve, plain.fetch) if request.param == "torch" else interpreted()


@pytest.mark.parametrize("most_rows", [1, 3])
@pytest.mark.parametrize(("count", "hot"), SIZES, ids=NAMES)
@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_right_and_slots_go_to_whom_the_rules_say(seed: int, count: int, hot: int, most_rows: int) -> None:
    scene = Scene(seed, resolve=plain.resolve, fetch=plain.fetch)
    live(scene, count=count, hot=hot, passes=15, most_rows=most_rows)


@pytest.mark.parametrize(("count", "hot"), SIZES, ids=NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_with_scores_every_row_is_right_and_slots_of_the_lowest_score_are_replaced(seed: int, count: int, hot: int) -> None:
    scene = Scene(seed, resolve=plain.resolve, fetch=plain.fetch, scored=True)
    live(scene, count=count, hot=hot, passes=15, most_rows=3)


@pytest.mark.parametrize("block", [4, 4096])
@pytest.mark.parametrize(("count", "hot"), SIZES[2:], ids=NAMES[2:])
def test_so_they_are_by_kernels(count: int, hot: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, fetch = interpreted()
    from stepwell.sparse import triton_resolve
    from stepwell.sparse.triton_read import read

    monkeypatch.setattr(triton_resolve, "ASSIGN_BLOCK", block)
    scene = Scene(300 + count, resolve=resolve, fetch=fetch, read=read, scored=True)
    live(scene, count=count, hot=hot, passes=8, most_rows=2)


@pytest.mark.parametrize("block", [4, 4096])
@pytest.mark.parametrize(("count", "hot"), SIZES, ids=NAMES)
def test_kernels_do_the_same(count: int, hot: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all slots of a request are looked at together, or a few at a time."""
    resolve, fetch = interpreted()
    from stepwell.sparse import triton_resolve
    from stepwell.sparse.triton_read import read

    monkeypatch.setattr(triton_resolve, "ASSIGN_BLOCK", block)
    row_bytes = {7: 20, 3: 48}.get(count, 24)  # words of four bytes, of eight, and two at a time
    scene = Scene(100 + count, resolve=resolve, fetch=fetch, read=read, row_bytes=row_bytes)
    live(scene, count=count, hot=hot, passes=6, most_rows=2)


def test_reading_where_nothing_is_gives_no_number() -> None:
    interpreted()
    from stepwell.sparse.triton_read import read

    places, _ = small(pages=6, hot=2)
    places.header_P3[3, 1:] = ABSENT
    places.slot_PGR[3] = torch.tensor([0, 7, 10**9, -(2**31)], dtype=torch.int32)  # slots that are another's, and none
    row = torch.arange(R, dtype=torch.int32)
    assert (read(places, 0, torch.full_like(row, 3), row, 0) == 0xFF).all()
    page = torch.tensor([[0, 1], [2, 5]])
    assert torch.equal(read(places, 0, page, page % R, 0), places.read(0, page, page % R, 0))
    assert read(places, 0, page[:0], page[:0], 0).shape == (0, 2, 48)


@pytest.mark.parametrize("scored", [False, True], ids=["without scores", "by score"])
@pytest.mark.parametrize("seed", range(3))
def test_kernels_leave_the_same_tables_hints_and_plan(seed: int, scored: bool) -> None:
    resolve, _ = interpreted()
    mine, theirs = (random_pass(seed, scored=scored, count=8) for _ in range(2))  # so few that many slots are not in use
    for _ in range(6):
        for places, steps, plan, how in ((*mine, resolve), (*theirs, plain.resolve)):
            places.now_1 += 1
            how(places, 1, next(steps), plan)
        assert tables_of(*mine) == tables_of(*theirs)
        assert tables_of(*mine)["fetched"], "nothing to compare"


def test_scores_are_put_into_bins_with_one_rounding_as_the_kernels_do() -> None:
    rng = np.random.default_rng(5)
    for low, high in rng.uniform(-40, 40, (400, 2)).astype(np.float32):
        score_H = np.linspace(low, high, 9, dtype=np.float32)
        span = score_H.max() - score_H.min()
        step = np.float32(LAST - 1) / span
        expected = 1 + np.minimum((score_H.max() - score_H) * step, np.float32(LAST - 1)).astype(np.int32)
        key_H, stamp_H, now_1 = torch.arange(9), torch.zeros(9, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        assert score_bins(key_H, stamp_H, now_1, torch.from_numpy(score_H)).tolist() == expected.tolist(), (low, high)


def test_passes_may_be_numbered_anew(both: Both) -> None:
    places, plan = small(pages=6, hot=2)
    none = np.empty(0, np.int32)
    nothing = Changes(new=none, pages=none, header_N3=none.reshape(0, 3), numbers=none, hot_pages=none)
    places._passes = LAST_PASS - 2
    places.now_1.fill_(LAST_PASS - 2)
    fetched = []
    for _ in range(5):
        places.apply(nothing)
        both[0](places, 0, one(range(8), hot=[0, 1], pages=6), plan)
        fetched.append(int(plan.count_1))
        assert set(places.key_GS[0, : 2 * R].tolist()) == set(range(8))
    assert fetched == [8, 0, 8, 0, 0] and int(places.now_1) == 3, "once more, when the numbers are used up"


def test_the_lowest_scores_go_first(both: Both) -> None:
    places, plan = small(pages=6, hot=2)
    for asked in (range(8), (8, 9, 10)):
        score_XT = torch.tensor([[5.0, 1, 7, 2, 9, 8, 6, 3] + [0.0] * 16])
        both[0](places, 0, one(asked, hot=[0, 1], pages=6, score_XT=score_XT), plan)
        places.now_1 += 1
    held = set(places.key_GS[0, : 2 * R].tolist())
    assert held == {0, 2, 4, 5, 6, 8, 9, 10}, "1, 3 and 7 had the lowest"


def test_by_score_fewer_rows_of_a_trace_are_fetched_than_by_age() -> None:
    """Scores are in 253 bins, which costs next to nothing compared with the order of the scores themselves."""
    pages, hot, trace = 180, 24, make_trace(replace(STEADY, last=8), context=640, steps=80, count=48, scores=True)
    assert trace.score_NT is not None
    score_NT = torch.from_numpy(trace.score_NT)
    places, plan = small(pages=pages, hot=hot)
    for step, selected in enumerate(trace.position_NK):
        places.now_1 += 1
        score_XT = score_NT[step : step + 1]
        plain.resolve(places, 0, one(selected, hot=list(range(hot)), pages=pages, score_XT=score_XT), plan)
    fetched = int(places.counts.tally_GBC[0, 0, FETCHED])
    by_score, by_age = (int(count_misses(trace, hot_rows=hot * R, policy=policy).sum()) for policy in ("score", "lru"))
    assert fetched == pytest.approx(by_score, rel=0.02) and fetched < 0.95 * by_age


def test_slots_that_are_used_now_are_never_given_away(both: Both) -> None:
    places, plan = small(pages=6, hot=2)
    both[0](places, 0, one(range(8), hot=[0, 1], pages=6), plan)
    places.now_1 += 1
    both[0](places, 0, one((0, 1, 2, 3, 4, 5, 6, 20, 21, 22), hot=[0, 1], pages=6), plan)
    assert int(plan.count_1) == 1 and set(places.key_GS[0, : 2 * R].tolist()) == {0, 1, 2, 3, 4, 5, 6, 20}
    assert places.slot_PGR[5, 0].tolist()[:3] == [places.key_GS[0].tolist().index(20), ABSENT, ABSENT]
    assert places.counts.tally_GBC[0, 0].tolist() == [0, 7, 9, 2]


def test_a_row_that_two_requests_miss_is_fetched_once_by_the_first(both: Both) -> None:
    places, plan = small(pages=4, hot=2)
    wanted = Wanted.of(
        torch.tensor([[3, 5], [5, 3], [5, 9]]), last_X=torch.full((3,), 15), table_BP=torch.arange(4).repeat(3, 1),
        hot_BQ=torch.tensor([[ABSENT], [1], [0]]),
    )  # fmt: skip
    both[0](places, 0, wanted, plan)
    assert sorted(key for key in places.key_GS[0].tolist() if key >= 0) == [3, 5, 9]
    assert places.key_GS[0, R:].tolist()[:2] == [5, 3] and places.key_GS[0, 0] == 9
    assert places.counts.tally_GBC[0, :3].tolist() == [[0, 0, 0, 2], [0, 0, 2, 0], [0, 0, 1, 0]]


def test_garbage_in_hints_is_never_served(both: Both) -> None:
    places, plan = small(pages=6, hot=3)
    generator = torch.Generator().manual_seed(5)
    for _ in range(6):
        any_P = torch.randint(-(2**31), 2**31 - 1, places.slot_PGR.shape, dtype=torch.int32, generator=generator)
        near_P = torch.randint(-3, 3 * R + 3, places.slot_PGR.shape, dtype=torch.int32, generator=generator)
        claims_P = -(2**30) + torch.randint(0, 12, places.slot_PGR.shape, dtype=torch.int32, generator=generator)
        which = torch.randint(0, 4, places.slot_PGR.shape, generator=generator)
        for number, junk in enumerate((any_P, near_P, claims_P)):
            places.slot_PGR.copy_(torch.where(which == number, junk, places.slot_PGR))
        places.now_1 += 1
        asked = torch.randperm(24, generator=generator)[:9].tolist()
        both[0](places, 0, one(asked, hot=[0, 1, 2], pages=6), plan)
        both[1](places, 0, plan)
        number = torch.tensor(asked)
        found = places.read(0, number // R, number % R, 0)
        assert torch.equal(found, places.host_PLRE[number // R, 0, number % R])


@pytest.mark.parametrize("which", WHICH)
def test_offsets_beyond_32_bits(both: Both, which: str) -> None:
    """In rows of an odd number of bytes, which are read byte by byte: where they lie on the host, and from their slots."""
    places, plan = small(pages=PAGES, hot=PAGES, far=which, row_bytes=45)
    number = torch.tensor(range(0, R * PAGES, 2))
    right = places.host_PLRE[number // R, 0, number % R]
    assert torch.equal(reader_of(both)(places, 0, number // R, number % R, 0), right)
    both[0](places, 0, one(number.tolist(), hot=[*range(PAGES)], pages=PAGES), plan)
    both[1](places, 0, plan)
    assert (places.where(number // R, number % R, 0).device >= 0).all()
    assert torch.equal(reader_of(both)(places, 0, number // R, number % R, 0), right)


def reader_of(both: Both) -> Read:
    if both[0] is plain.resolve:
        return Places.read
    from stepwell.sparse.triton_read import read

    return read


def test_a_pass_without_queries_or_hot_pages_leaves_an_empty_plan(both: Both) -> None:
    places, plan = small(pages=2, hot=1)
    plan.count_1.fill_(3)
    none = Wanted.of(
        torch.empty(0, 4, dtype=torch.int32), last_X=torch.empty(0), table_BP=torch.empty(0, 2, dtype=torch.int32),
        hot_BQ=torch.empty(0, 0, dtype=torch.int32),
    )  # fmt: skip
    both[0](places, 0, none, plan)
    assert int(plan.count_1) == 0
    plan.count_1.fill_(3)
    both[0](places, 0, one((1, 2), hot=[], pages=2), plan)
    assert int(plan.count_1) == 0 and (places.key_GS == ABSENT).all()
    both[1](places, 0, plan)


def small(*, pages: int, hot: int, far: str | None = None, row_bytes: int = 48) -> tuple[Places, Plan]:
    """Pages that are all on the host, each in the host page of its own id; some of them `far` apart."""
    host_PLRE = spread((pages, 1, R, row_bytes), far=far == "host")
    host_PLRE[:] = torch.randint(0, 255, host_PLRE.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    places = Places(
        rows_PLRE=spread((hot, 1, R, row_bytes), far=far == "rows"), host_PLRE=host_PLRE, numbers=hot, requests=4,
        slot_PGR=spread((pages, 1, R), torch.int32, far=far == "hints"),
        header_P3=spread((pages, 3), torch.int32, far=far == "headers"),
    )  # fmt: skip
    ids, numbers = np.arange(pages, dtype=np.int32), np.arange(hot, dtype=np.int32)
    header_N3 = np.stack([ids, np.full(pages, ABSENT, np.int32), ids], axis=1)
    places.apply(Changes(new=ids, pages=ids, header_N3=header_N3, numbers=numbers, hot_pages=numbers[::-1].copy()))
    return places, Plan(64, torch.device("cpu"))


def one(asked, *, hot: list[int], pages: int, score_XT: torch.Tensor | None = None) -> Wanted:
    """One request that selects these positions."""
    return Wanted.of(
        torch.tensor([list(asked)], dtype=torch.int32), last_X=torch.tensor([10**6]), table_BP=torch.arange(pages)[None],
        hot_BQ=torch.tensor([hot], dtype=torch.int32).view(1, -1), score_XT=score_XT,
    )  # fmt: skip
