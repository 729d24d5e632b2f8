"""Hot rows on CUDA: the tables of plain torch, right bytes from pinned memory, the same every time, and in a recorded graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np  # noqa: E402

from not_run import NO_CUDA  # noqa: E402
from stepwell.memory.row_pages import ABSENT, Changes  # noqa: E402
from stepwell.sparse import resolve as plain  # noqa: E402
from stepwell.sparse.places import Places  # noqa: E402
from stepwell.sparse.resolve import Plan, Wanted  # noqa: E402
from stepwell.sparse.triton_read import read as read_by_triton  # noqa: E402
from stepwell.transfer.torch_memory import pinned_bytes  # noqa: E402
from unit.sparse.far import spread  # noqa: E402
from unit.sparse.scene import Scene, live, random_pass, tables_of  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
LARGE = {"requests": 5, "pages": 96, "count": 2048, "hot": 64, "rows": 64, "queries": 2}


@pytest.fixture(scope="module")
def kernels():
    from stepwell.sparse import triton_fetch, triton_resolve

    return triton_resolve.resolve, triton_fetch.fetch


@pytest.mark.parametrize("most_rows", [1, 3])
@pytest.mark.parametrize(("count", "hot"), [(8, 2), (7, 2), (8, 3), (8, 1), (8, 0), (3, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_right_and_slots_go_to_whom_the_rules_say(kernels, seed: int, count: int, hot: int, most_rows: int) -> None:
    scene = Scene(seed, resolve=kernels[0], fetch=kernels[1], read=read_by_triton, device="cuda")
    live(scene, count=count, hot=hot, passes=15, most_rows=most_rows)


@pytest.mark.parametrize(("count", "hot"), [(8, 2), (8, 3), (8, 1), (8, 0), (3, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_with_scores_slots_of_the_lowest_score_are_replaced(kernels, seed: int, count: int, hot: int) -> None:
    scene = Scene(seed, resolve=kernels[0], fetch=kernels[1], read=read_by_triton, device="cuda", scored=True)
    live(scene, count=count, hot=hot, passes=15, most_rows=3)


@pytest.mark.parametrize("scored", [False, True], ids=["without scores", "by score"])
def test_tables_of_large_batches_are_those_of_plain_torch(kernels, scored: bool) -> None:
    mine, theirs = random_pass(1, device="cuda", scored=scored, **LARGE), random_pass(1, scored=scored, **LARGE)
    for _ in range(4):
        for (places, steps, plan), how in ((mine, kernels[0]), (theirs, plain.resolve)):
            places.now_1 += 1
            how(places, 1, next(steps), plan)
        assert tables_of(*mine) == tables_of(*theirs)
        assert len(tables_of(*mine)["fetched"]) > 500  # fewer from pass to pass: more of what is selected is there already


def test_the_same_passes_leave_the_same_every_time(kernels) -> None:
    left = []
    for _ in range(3):
        places, steps, plan = random_pass(2, device="cuda", **LARGE)
        for _ in range(5):
            places.now_1 += 1
            kernels[0](places, 0, next(steps), plan)
            kernels[1](places, 1, plan)
        left.append((tables_of(places, None, plan), places.rows_PLRE.clone()))
    assert all(tables == left[0][0] and torch.equal(rows, left[0][1]) for tables, rows in left[1:])


def test_a_recorded_pass_resolves_what_is_selected_when_it_is_replayed(kernels) -> None:
    recorded, plainly = random_pass(3, device="cuda", **LARGE), random_pass(3, **LARGE)
    places, steps, plan = recorded
    fixed = next(steps)
    next(plainly[1])
    hot_BQ = fixed.hot_BQ.clone()
    fixed.hot_BQ.fill_(ABSENT)  # so that building and recording change nothing
    fixed.position_XK.fill_(-1)
    kernels[0](places, 1, fixed, plan)
    kernels[1](places, 1, plan)
    fixed.hot_BQ.copy_(hot_BQ)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels[0](places, 1, fixed, plan)
        kernels[1](places, 1, plan)
    for number in range(5):
        wanted, same = next(steps), next(plainly[1])
        for name in ("position_XK", "last_X"):
            getattr(fixed, name).copy_(getattr(wanted, name))
        changes = shed(recorded, number)
        recorded[0].apply(changes)
        plainly[0].apply(changes)
        graph.replay()
        plain.resolve(plainly[0], 1, same, plainly[2])
        plain.fetch(plainly[0], 1, plainly[2])
        assert tables_of(*recorded) == tables_of(*plainly)
        assert torch.equal(places.rows_PLRE.cpu(), plainly[0].rows_PLRE)


def shed(state: tuple, number: int) -> Changes:
    """Some of the pages that have rows on the device lose them between two replays; and a hot page comes back empty."""
    header = state[0].header_P3.cpu().numpy()
    pages = np.flatnonzero(header[:, 1] >= 0)[:7].astype(np.int32)
    changed = header[pages].copy()
    changed[:, 1], changed[:, 2] = ABSENT, pages
    hot = np.array([number], np.int32)
    return Changes(
        new=np.empty(0, np.int32), pages=pages, header_N3=changed, numbers=hot,
        hot_pages=state[0].hot_N[number : number + 1].cpu().numpy(),
    )  # fmt: skip


@pytest.mark.parametrize("row_bytes", [656, 584, 132, 1152])
def test_rows_lie_where_the_pages_of_a_model_have_them(kernels, row_bytes: int) -> None:
    """Page-first, several layers, 64 rows, in memory that was registered as a cache's is."""
    pages, layers, rows, hot = 40, 5, 64, 32
    page_bytes = -(-layers * rows * (row_bytes + 132) // 4096) * 4096
    flat = pinned_bytes(pages * page_bytes)
    flat.copy_(torch.randint(0, 255, flat.shape, dtype=torch.uint8))
    used = flat.view(pages, page_bytes)[:, : layers * rows * row_bytes]
    device_rows = torch.zeros(hot, layers, rows, row_bytes, dtype=torch.uint8, device="cuda")
    places, plan, wanted = whole(used.unflatten(1, (layers, rows, row_bytes)), device_rows, count=1900)
    kernels[0](places, 0, wanted, plan)
    for layer in range(layers):
        kernels[1](places, layer, plan)
    check(places, wanted, layers)


def whole(host_PLRE: torch.Tensor, rows_PLRE: torch.Tensor, *, count: int, far: str | None = None) -> tuple[Places, Plan, Wanted]:
    """One request, all its pages on the host, and `count` random rows of it. Hints or headers may lie `far` apart."""
    pages, hot, rows = len(host_PLRE), len(rows_PLRE), host_PLRE.shape[2]
    places = Places(
        rows_PLRE=rows_PLRE, host_PLRE=host_PLRE, numbers=hot, requests=1,
        slot_PGR=spread((pages, 1, rows), torch.int32, far=far == "hints", device="cuda"),
        header_P3=spread((pages, 3), torch.int32, far=far == "headers", device="cuda"),
    )  # fmt: skip
    ids, numbers = np.arange(pages, dtype=np.int32), np.arange(hot, dtype=np.int32)
    header_N3 = np.stack([ids, np.full(pages, ABSENT, np.int32), ids[::-1]], axis=1)
    places.apply(Changes(new=ids, pages=ids, header_N3=header_N3, numbers=numbers, hot_pages=numbers[::-1].copy()))
    position = torch.randperm(pages * rows)[:count].int().cuda()[None]
    wanted = Wanted.of(
        position, last_X=torch.tensor([pages * rows], device="cuda"), table_BP=torch.arange(pages, device="cuda")[None],
        hot_BQ=torch.arange(hot, device="cuda")[None],
    )  # fmt: skip
    return places, Plan(count, torch.device("cuda")), wanted


def check(places: Places, wanted: Wanted, layers: int) -> None:
    """Every row is on the device, and is what the host has."""
    at = wanted.position_XK[0].long()
    page, row = at // places.page_rows, at % places.page_rows
    where = places.where(page, row, 0)
    assert bool((where.device >= 0).all())
    for layer in range(layers):
        assert torch.equal(places.read(layer, page, row, 0).cpu(), right_rows(places, wanted, layer))


def right_rows(places: Places, wanted: Wanted, layer: int) -> torch.Tensor:
    """What is wanted, as the host has it."""
    at = wanted.position_XK[0].long().cpu()
    return places.host_PLRE[len(places.host_PLRE) - 1 - at // places.page_rows, layer, at % places.page_rows]


def test_counts_are_read_without_waiting(kernels) -> None:
    places, steps, plan = random_pass(4, device="cuda", **LARGE)
    kernels[0](places, 0, next(steps), plan)
    places.counts.start_reading()
    torch.cuda.synchronize()
    found = places.counts.read([10, 1000])
    assert found is not None and found.fetched == int(plan.count_1) and found.fetched_bytes == 10 * found.fetched
