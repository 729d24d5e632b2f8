"""Index scores and the best of them by Triton, compared with plain torch: on the CPU in Triton's interpreter."""

from __future__ import annotations

from random import Random

import pytest
import torch

from engine.paged import Scene, Shape
from stepwell.engine.ops import selection
from stepwell.engine.ops.selection import Selection, select
from stepwell.engine.passes.paging import Singles
from stepwell.engine.passes.rows import Rows, Tiled
from stepwell.engine.running.graphs import FixedPaging

pytest.importorskip("triton")
from stepwell.engine.ops.on_triton import selection as fast
from stepwell.engine.ops.on_triton.selection import TritonSelect

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scene_of(seed: int) -> Scene:
    draw = Random(seed)
    singles = draw.randrange(3)
    lengths = [1] * singles + [draw.randrange(2, 20) for _ in range(draw.randrange(3) or not singles)]
    shape = Shape(
        kv_heads=1, width=draw.choice([8, 64]), page=draw.choice([4, 16]), contexts=[draw.randrange(220) for _ in lengths],
        lengths=lengths,
    )  # fmt: skip
    scene = Scene(shape, seed, device=DEVICE)
    scene.clear_unwritten()
    return scene


def in_eight_bits(scene: Scene) -> Rows:
    stored, kept = scene.rows.stored_PRE, Tiled(width=scene.rows.stored_PRE.shape[2])
    return Rows(kept.encode(stored.flatten(0, 1)).unflatten(0, stored.shape[:2]), kept, scene.dtype)


def same(one: Selection, other: Selection) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a.position_XK.long(), b.position_XK.long()))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("kind", ["plain", "eight bits"])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_rows_are_picked(seed: int, kind: str) -> None:
    scene, heads = scene_of(seed), Random(seed).choice([3, 16, 20])
    rows = scene.rows if kind == "plain" else in_eight_bits(scene)
    query_NHD = scene.made(scene.num_tokens, heads, rows.stored_PRE.shape[2] if kind == "plain" else rows.format.width)
    weight_NH = scene.made(scene.num_tokens, heads)
    expected = select(query_NHD, weight_NH, rows, scene.paging, count=24)
    assert same(TritonSelect()(query_NHD, weight_NH, rows, scene.paging, count=24), expected)


def test_scores_are_those_of_plain_torch_and_nobody_sees_ahead() -> None:
    scene = Scene(Shape(kv_heads=1, width=64, page=16, contexts=(150,), lengths=(19,)), device=DEVICE)
    scene.clear_unwritten()
    query_XHD, weight_XH, run = scene.made(19, 16, 128), scene.made(19, 16), scene.paging.runs[0]
    made = fast.scores(query_XHD, weight_XH, scene.rows, run.pages_P[None], run.position_N)
    key_TD = scene.rows.whole(run.pages_P).flatten(0, 1)
    expected = (weight_XH[:, :, None] * (query_XHD @ key_TD.T).relu()).sum(1) + run.mask_NT
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("width", [16, 128, 160])
@pytest.mark.parametrize("programs", [1, 4, 1000])
def test_singles_of_any_length_are_scored_by_programs_of_several_blocks(
    width: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over keys with one scale each, and with two. Some programs have a part of a request, and some nothing of it; pages that it
    does not have are not read, and a key that is no number is the highest."""
    monkeypatch.setattr(fast, "_FULL_PROGRAMS", programs)
    scene = Scene(Shape(kv_heads=1, width=width // 2, page=16, contexts=(700, 3, 130, 63), lengths=(1, 1, 1, 1)), device=DEVICE)
    scene.clear_unwritten()
    rows, part = in_eight_bits(scene), scene.paging.singles[0]
    scale = torch.tensor([torch.nan]).view(torch.uint8).to(DEVICE)
    rows.stored_PRE[part.table_BP[0, 20], 5, width : width + 4] = scale
    query_XHD, weight_XH = scene.made(4, 16, width), scene.made(4, 16)
    key_BTD = rows.whole(part.table_BP).flatten(1, 2)
    product_BHT = torch.einsum("bhd,btd->bht", query_XHD, key_BTD).relu()
    expected = (weight_XH[:, :, None] * product_BHT).sum(1) + part.mask_BT
    table_BP = part.table_BP.clone()
    for row, length in enumerate((701, 4, 131, 64)):
        table_BP[row, -(-length // 16) :] = 1 << 40  # the kernel must not follow these
    made = fast.scores(query_XHD, weight_XH, rows, table_BP, part.position_B)
    assert made[0, 20 * 16 + 5] == torch.inf
    torch.testing.assert_close(made, expected.nan_to_num(nan=torch.inf, neginf=-torch.inf), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_handed_on_for_singles_and_the_last_of_every_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of queries that are scored at a time; and none where no caller requests them."""
    scene = scene_of(seed)
    query_NHD, weight_NH = scene.made(scene.num_tokens, 3, scene.rows.stored_PRE.shape[2]), scene.made(scene.num_tokens, 3)
    given = query_NHD, weight_NH, scene.rows, scene.paging
    monkeypatch.setattr(fast, "SCORE_BYTES", 4 * 200 * 3)
    selections = [select(*given, count=5, scored=4), select(*given, count=5, scored=4, block_bytes=1)]
    selections.append(TritonSelect()(*given, count=5, scored=4))
    for picked in (each for made in selections for each in zip(scene.paging.parts, made, strict=True)):
        part, chosen = picked
        if chosen is None:
            continue
        count = part.stop - part.start if isinstance(part, Singles) else min(part.stop - part.start, 4)
        mask_XT = part.mask_BT if isinstance(part, Singles) else part.mask_NT
        assert chosen.score_YT is not None and len(chosen.score_YT) == count
        assert torch.equal(chosen.score_YT == -torch.inf, mask_XT[-count:] == -torch.inf)
        assert torch.equal(selection.best(chosen.score_YT, 5), chosen.position_XK[-count:].long())
    assert all(each is None or each.score_YT is None for each in (*select(*given, count=5), *TritonSelect()(*given, count=5)))


def test_scores_in_blocks_pick_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(4)
    width = scene.rows.stored_PRE.shape[2]
    query_NHD, weight_NH = scene.made(scene.num_tokens, 3, width), scene.made(scene.num_tokens, 3)
    whole = TritonSelect()(query_NHD, weight_NH, scene.rows, scene.paging, count=5)
    monkeypatch.setattr(fast, "SCORE_BYTES", 4 * 200 * 3)
    assert same(TritonSelect()(query_NHD, weight_NH, scene.rows, scene.paging, count=5), whole)


@pytest.mark.parametrize("seed", range(8))
def test_of_equal_scores_the_earliest_are_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of values, so that most are level with others; infinities, zeros of both signs and what is no number."""
    monkeypatch.setattr(fast, "_BLOCK", 16)
    draw = Random(seed)
    values = [0.0, -0.0, 1.0, 2.5, -torch.inf, -1.0, torch.inf, torch.nan][: draw.randrange(2, 9)]
    length, count = draw.randrange(3, 90), 0
    count = draw.randrange(1, length)
    score_XT = torch.tensor([[draw.choice(values) for _ in range(length)] for _ in range(4)], device=DEVICE)
    expected = selection.best(score_XT, count)
    assert torch.equal(fast.best(score_XT, count).long(), expected)


def test_a_recorded_step_picks_among_what_its_requests_have_now() -> None:
    def singles(contexts: tuple[int, ...], seed: int) -> Scene:
        made = Scene(Shape(kv_heads=1, width=8, contexts=contexts, lengths=(1, 1)), seed, device=DEVICE)
        made.clear_unwritten()
        return made

    scene = singles((30, 41), 0)
    fixed, query_NHD, weight_NH = FixedPaging(scene.paging, 16), scene.made(2, 16, 16), scene.made(2, 16)
    for other in (scene, singles((31, 42), 0), singles((3, 60), 2)):
        fixed.load(other.paging)
        made = TritonSelect()(query_NHD, weight_NH, other.rows, fixed, count=10)[0]
        expected = select(query_NHD, weight_NH, other.rows, other.paging, count=10)[0]
        assert made is not None and expected is not None
        for row in range(2):
            seen = min(int(other.shape.contexts[row]) + 1, 10)
            assert made.position_XK[row, :seen].tolist() == expected.position_XK[row, :seen].tolist()


@pytest.mark.parametrize("power", [-100, -20, 0, 20, 100])
def test_queries_of_any_size_are_multiplied_in_sixteen_bits_without_loss(power: int) -> None:
    """Heads of one query may differ by far; each has a power of its own. As in fp64, both for singles and for runs."""
    scene = Scene(Shape(kv_heads=1, width=64, page=16, contexts=(90, 70), lengths=(1, 5)), device=DEVICE)
    scene.clear_unwritten()
    eight = in_eight_bits(scene)
    rows = Rows(eight.stored_PRE, eight.format, torch.bfloat16)
    size_H = 2.0 ** torch.tensor([power, 0, -power // 2, 3] * 4, device=DEVICE)
    query_NHD = (scene.made(6, 16, 128) * size_H[:, None]).bfloat16()
    weight_NH = scene.made(6, 16) / size_H
    run = scene.paging.runs[0]
    for pages_P, last_X, at in ((run.pages_P, run.position_N, slice(1, 6)), (run.pages_P, run.position_N[-1:], slice(5, 6))):
        made = fast.scores(query_NHD[at], weight_NH[at], rows, pages_P[None], last_X)
        key_TD = rows.format.decode(rows.stored_PRE[pages_P.long()], torch.float64).flatten(0, 1)
        likeness = torch.einsum("xhd,td->xht", query_NHD[at].double(), key_TD).relu()
        expected = (weight_NH[at].double()[:, :, None] * likeness).sum(1)
        seen = torch.arange(len(key_TD), device=DEVICE)[None] <= last_X[:, None]
        torch.testing.assert_close(made[seen].double(), expected[seen], rtol=1e-5, atol=1e-4)
        assert torch.isneginf(made[~seen]).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_query_that_is_no_number_scores_highest_in_sixteen_bits_too() -> None:
    scene = Scene(Shape(kv_heads=1, width=64, page=16, contexts=(90,), lengths=(1,)), device=DEVICE)
    scene.clear_unwritten()
    eight, part = in_eight_bits(scene), scene.paging.singles[0]
    rows = Rows(eight.stored_PRE, eight.format, torch.bfloat16)
    for wrong in (float("nan"), float("inf")):
        query_XHD = scene.made(1, 16, 128).bfloat16()
        query_XHD[0, 3, 7] = wrong
        made = fast.scores(query_XHD, scene.made(1, 16).abs() + 1, rows, part.table_BP, part.position_B)
        assert not torch.isnan(made).any() and torch.isinf(made[0, :91]).any()
