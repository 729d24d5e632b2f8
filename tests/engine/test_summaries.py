"""What Quest and ClusterKV keep of keys, and how they score: against plain loops, on random numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepwell.engine.approximate.clusterkv import ClusterKV  # noqa: E402
from stepwell.engine.approximate.quest import Quest  # noqa: E402
from stepwell.engine.approximate.summaries import Summary  # noqa: E402

SHAPES = [(1, 1, 8), (2, 1, 16), (3, 3, 64), (2, 4, 32)]  # key heads, query heads of each, width


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def summaries(kv_heads: int) -> list[Summary]:
    return [Quest(kv_heads=kv_heads), ClusterKV(kv_heads=kv_heads, unit=32, groups=3)]


@pytest.mark.parametrize(("kv_heads", "group", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quests_bound_is_never_below_the_true_maximum(kv_heads: int, group: int, width: int, dtype: torch.dtype) -> None:
    quest = Quest(kv_heads=kv_heads)
    key_URKD = (numbers(9, quest.unit, kv_heads, width) * 3).to(dtype)
    query_XHD = numbers(7, kv_heads * group, width, seed=1)
    row_UC = quest.make(key_URKD).to(dtype)  # as it is kept
    bound_XHU = quest.bounds(query_XHD, row_UC[None]).double()
    key_UHRD = key_URKD.double().transpose(1, 2).repeat_interleave(group, dim=1)
    true_XHU = torch.einsum("xhd,uhrd->xhur", query_XHD.double(), key_UHRD).amax(dim=-1)
    assert (bound_XHU >= true_XHU - 1e-5 * true_XHU.abs().max()).all()


def test_quests_bound_of_a_unit_of_equal_keys_is_their_product() -> None:
    quest = Quest(kv_heads=2)
    key_UKD, query_XHD = numbers(4, 2, 16), numbers(3, 4, 16, seed=1)
    bound_XHU = quest.bounds(query_XHD, quest.make(key_UKD[:, None].expand(-1, quest.unit, -1, -1))[None])
    expected = torch.einsum("xkgd,ukd->xkgu", query_XHD.unflatten(1, (2, 2)), key_UKD).flatten(1, 2)
    torch.testing.assert_close(bound_XHU, expected)


@pytest.mark.parametrize("which", [0, 1])
def test_a_summary_is_the_same_whatever_is_made_beside_it(which: int) -> None:
    """Bit for bit: it may be made with a whole prompt, alone, or with those of other layers."""
    summary = summaries(3)[which]
    key_URKD = numbers(11, summary.unit, 3, 64)
    together = summary.make(key_URKD)
    assert torch.equal(together, torch.cat([summary.make(key_URKD[at : at + 1]) for at in range(11)]))
    assert torch.equal(together, torch.cat([summary.make(part) for part in key_URKD.split((2, 8, 1))]))
    assert torch.equal(together.flip(0), summary.make(key_URKD.flip(0)))
    assert summary.make(key_URKD[:0]).shape == (0, together.shape[1])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_units_that_are_not_there_score_nothing_and_change_nothing(which: int, shared: bool) -> None:
    summary = summaries(2)[which]
    rows_SUC = summary.make(numbers(12, summary.unit, 2, 16)).view(3, 4, -1)[: 1 if shared else 3]
    query_XHD, whole_X = numbers(3, 4, 16, seed=1), torch.tensor([0, 2, 4])
    score_XT = summary.score(query_XHD, rows_SUC, whole_X, scale=0.25)
    assert score_XT.shape == (3, 4 * summary.unit)
    for at, whole in enumerate(whole_X.tolist()):
        seen = whole * summary.unit
        assert score_XT[at, :seen].isfinite().all() and (score_XT[at, seen:] == -torch.inf).all()
        row_1UC = rows_SUC[0 if shared else at, None].clone()
        row_1UC[:, whole:] = torch.nan  # bytes of anything
        alone = summary.score(query_XHD[at, None], row_1UC, whole_X[at, None], scale=0.25)
        torch.testing.assert_close(alone, score_XT[at, None])


def test_clusters_are_the_means_of_their_tokens_and_every_token_is_in_the_likeliest() -> None:
    heads, width, unit, groups = 2, 16, 64, 4
    cluster = ClusterKV(kv_heads=heads, unit=unit, groups=groups)
    centre = numbers(groups, width, seed=5) * 4
    at_R = torch.arange(unit)
    kind_UR = ((at_R // 16 + at_R % 5 * (at_R % 16 != 8)) % groups).expand(3, -1)  # mixed, and each kind is begun with
    key_URKD = centre[kind_UR][:, :, None] + 0.1 * numbers(3, unit, heads, width)
    row_UKC = cluster.make(key_URKD).unflatten(1, (heads, -1))
    mean_UKMD, group_UKR = row_UKC[..., :-unit].unflatten(2, (groups, width)), row_UKC[..., -unit:].long()
    for page in range(3):
        for head in range(heads):
            label, key = group_UKR[page, head], key_URKD[page, :, head]
            for group in range(groups):
                assert len(kind_UR[page][label == group].unique()) == 1, "a group has tokens of one kind"
                torch.testing.assert_close(mean_UKMD[page, head, group], key[label == group].mean(dim=0))


def test_a_tokens_score_is_the_share_of_its_cluster_in_the_head_that_wants_it_most() -> None:
    heads, group, width, unit, groups = 2, 2, 8, 16, 3
    cluster = ClusterKV(kv_heads=heads, unit=unit, groups=groups)
    row_UC, query_HD = cluster.make(numbers(2, unit, heads, width)), numbers(heads * group, width, seed=1)
    score_T = cluster.score(query_HD[None], row_UC[None], torch.tensor([2]), scale=0.5)[0]
    row_UKC = row_UC.unflatten(1, (heads, -1))
    expected_HT = torch.empty(heads * group, 2 * unit)
    for head in range(heads * group):
        for token in range(2 * unit):
            row = row_UKC[token // unit, head // group]
            label = int(row[groups * width + token % unit])
            expected_HT[head, token] = 0.5 * (query_HD[head] @ row[label * width : (label + 1) * width])
    torch.testing.assert_close(score_T, expected_HT.softmax(dim=-1).amax(dim=0).log())


def test_keys_that_are_all_alike_or_all_zero_are_summarised() -> None:
    for key_URKD in (torch.zeros(1, 32, 2, 8), torch.ones(1, 32, 2, 8)):
        for summary in summaries(2):
            made = summary.make(key_URKD[:, : summary.unit])
            assert made.isfinite().all()
