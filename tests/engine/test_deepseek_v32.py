"""DeepSeek-V3.2 and GLM-5 compared with transformers: what an index picks, and attention over nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.families import INDEX, LATENT, draw_choices
from engine.side_by_side import PAGE, TOLERANCE, Held, Memory, Pair, check_pair
from engine.test_deepseek_v3 import YARN, logits_in
from stepwell.base.errors import ConfigError
from stepwell.base.spec.families import from_config
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models.indexer import Indexer
from stepwell.engine.models.registry import build_model
from stepwell.engine.ops.selection import Selection, attend_selected, best, select
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.paging import RequestRows
from stepwell.engine.passes.rows import PLAIN, Rows

transformers = pytest.importorskip("transformers")

SHARING = ["full", "full", "shared", "full", "shared"]


def pair(family: str = "deepseek_v32", **more: Any) -> Pair:
    sizes = {**LATENT, **INDEX, **more}
    if family == "glm_moe_dsa":
        sizes = {"num_hidden_layers": 5, "indexer_types": SHARING, **sizes}
        model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**sizes))
    else:
        model = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**{"num_hidden_layers": 3, **sizes}))
    draw_choices(model)
    return Pair(model)


# ---- whole models -----------------------------------------------------------------------------------


def test_deepseek_v32_picks_in_every_layer() -> None:
    check_pair(pair(), 64)


def test_glm_picks_in_some_layers_and_shares_in_others() -> None:
    ours = pair("glm_moe_dsa")
    assert ours.spec.state("index").layers == 3
    check_pair(ours, 64)


def test_with_yarn() -> None:
    check_pair(pair(rope_parameters=YARN, max_position_embeddings=512, num_hidden_layers=2), 50)


def test_where_nobody_sees_more_than_it_may_pick() -> None:
    check_pair(pair(index_topk=128, num_hidden_layers=2), 40)


def test_a_first_layer_has_nobody_to_share_with() -> None:
    ours = pair("glm_moe_dsa")
    config = ours.reference.config.to_dict() | {"indexer_types": ["shared", *SHARING[1:]]}
    with pytest.raises(ConfigError, match="first layer has no index"):
        build_model(config, HeldTensors(dict(ours.reference.state_dict())))


@pytest.mark.parametrize("name", ["wk.weight", "wq_b.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_index_tensor_too_large_is_refused_and_not_cut(family: str, name: str) -> None:
    ours = pair(family)
    tensors = dict(ours.reference.state_dict())
    longer = f"model.layers.1.self_attn.indexer.{name}"
    tensors[longer] = torch.cat([tensors[longer], tensors[longer][:2]])
    with pytest.raises(ConfigError, match=rf"{longer}.*but its config says"):
        build_model(ours.reference.config.to_dict(), HeldTensors(tensors))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_rows_in_eight_bits_cost_a_few_percent_of_the_spread_of_logits(family: str) -> None:
    """Measured, in parts of the spread, where all is picked and no expert chosen: 0.035 and 0.039 on average, 0.31 at most."""
    ours = pair(family, first_k_dense_replace=5, index_topk=128)
    tokens = ours.tokens(120)
    exact = ours.one_shot(tokens)
    error = (logits_in("fp8", ours, tokens, [120]) - exact).abs() / exact.std()
    assert 0.01 < error.mean() < 0.06 and error.max() < 0.5, (error.mean(), error.max())


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_index_keys_in_eight_bits_pick_nearly_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in the first layer, before other errors: 0.98 of what is picked. Random scores have no clear winners.

    So logits differ by 0.26 and 0.41 of their spread on average: other rows are read, not the same ones less exactly.
    """
    ours = pair(family)
    tokens = ours.tokens(120)
    made: list[Selection] = []
    pick = Indexer.__call__
    monkeypatch.setattr(Indexer, "__call__", lambda *args: made.append(pick(*args)) or made[-1])
    ours.one_shot(tokens)
    exact = made[0][0]
    made.clear()
    assert logits_in("fp8", ours, tokens, [120]).isfinite().all()
    assert exact is not None and made[0][0] is not None
    both = [
        len({*one} & {*other}) for one, other in zip(exact.position_XK.tolist(), made[0][0].position_XK.tolist(), strict=True)
    ]
    assert 0.95 < sum(both[INDEX["index_topk"] :]) / (96 * INDEX["index_topk"]) < 1


@pytest.mark.parametrize("state", ["index", "kv"])
def test_what_earlier_pages_keep_is_read(state: str) -> None:
    ours = pair(num_hidden_layers=2)
    tokens = ours.tokens(6 * PAGE + 3)

    def continued(*, erase: bool) -> torch.Tensor:
        memory = Memory(ours.spec)
        held = Held(memory, len(tokens))
        ours.forward(memory, [held.segment(tokens[: 6 * PAGE])])
        if erase:
            memory.pages.state_PLRE(state)[held.prefix[:5].astype(np.int64)] = 0
        return torch.cat([ours.forward(memory, [held.segment([token])]) for token in tokens[6 * PAGE :]])

    assert (continued(erase=False) - ours.expected(tokens)[-3:]).abs().max() <= TOLERANCE
    assert (continued(erase=True) - continued(erase=False)).abs().max() > 0.1


def test_equal_scores_pick_the_earliest_however_a_prompt_is_cut() -> None:
    ours = pair(num_hidden_layers=1)
    for name, tensor in ours.reference.named_parameters():
        if name.endswith("indexer.weights_proj.weight"):
            tensor.data.zero_()
    ours.model = build_model(ours.reference.config.to_dict(), HeldTensors(dict(ours.reference.state_dict())), page_tokens=PAGE)
    tokens = ours.tokens(70)
    whole = ours.one_shot(tokens)
    for sizes in ([PAGE], [7, 30, 1, 1, 13], [1]):
        assert (ours.in_chunks(tokens, sizes) - whole).abs().max() <= TOLERANCE
    picked = INDEX["index_topk"]
    late, early = list(tokens), list(tokens)
    late[picked:60] = ours.tokens(60 - picked, seed=8)
    early[picked - 1] = (tokens[picked - 1] + 1) % ours.model.vocab_size
    assert torch.equal(ours.one_shot(late)[60:], whole[60:]), "later tokens are not looked at"
    assert (ours.one_shot(early)[60:] - whole[60:]).abs().max() > 1e-3, "the last of the earliest is"


def test_index_keys_of_real_sizes_take_132_bytes() -> None:
    spec = from_config(transformers.DeepseekV32Config().to_dict(), kv_dtype="fp8", model_dtype="bf16")
    assert (spec.state("kv").row_bytes, spec.state("index").row_bytes) == (656, 132)


# ---- the operation ----------------------------------------------------------------------------------


def test_of_equal_scores_the_earliest_are_best() -> None:
    score_XT = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 3.0], [0.0, -0.0, 0.0, 0.0, -1.0, 0.0], [5.0, 1.0, *[-torch.inf] * 4]])
    assert best(score_XT, 4).tolist() == [[1, 2, 3, 5], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_score_that_is_no_number_is_picked_so_that_it_is_seen() -> None:
    score_XT = torch.tensor([[0.5, torch.nan, 3.0, 2.0, 1.0], [torch.nan, 1.0, *[torch.nan] * 3]])
    assert best(score_XT, 3).tolist() == [[1, 2, 3], [0, 2, 3]]


class Counting(Rows):
    """Rows that note how many are gathered at once."""

    gathered: list[int] = []  # noqa: RUF012

    def some(self, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        self.gathered.append(page.numel())
        return Rows.some(self, page, row)


class Scene:
    """Three singles and two runs over random index keys and rows."""

    HEADS, WIDTH, CHANNELS, COUNT = 16, 32, 40, 24

    def __init__(self) -> None:
        memory = Memory(pair(num_hidden_layers=1).spec)
        segments = [self._segment(memory, *each) for each in ((90, 1), (5, 1), (40, 1), (30, 50), (0, 9))]
        self.paging = Batch(segments, memory.pages, device="cpu").paging(None)
        self.segments, num_tokens = segments, sum(len(each.tokens) for each in segments)
        generator = torch.Generator().manual_seed(4)
        self.keys = torch.randn((256, PAGE, self.WIDTH), generator=generator)
        self.kept = torch.randn((256, PAGE, self.CHANNELS), generator=generator)
        self.query_NHD = torch.randn((num_tokens, self.HEADS, self.WIDTH), generator=generator)
        self.weight_NH = torch.randn((num_tokens, self.HEADS), generator=generator)
        self.asked_NHC = torch.randn((num_tokens, 4, self.CHANNELS), generator=generator)

    @staticmethod
    def _segment(memory: Memory, position: int, length: int) -> RequestRows:
        held = Held(memory, position + length)
        held.position = position
        return held.segment([1] * length)

    def select(self, **more: Any) -> Selection:
        rows = Rows(self.keys, PLAIN, torch.float32)
        return select(self.query_NHD, self.weight_NH, rows, self.paging, count=self.COUNT, **more)

    def attend(self, kept: torch.Tensor, kind: type[Rows] = Rows, **more: Any) -> torch.Tensor:
        rows = kind(kept, PLAIN, torch.float32)
        return attend_selected(self.asked_NHC, rows, self.paging, self.select(), rank=self.CHANNELS, scale=0.3, **more)

    def picked_one_by_one(self) -> list[tuple[RequestRows, list[int]]]:
        """Where each token looks, by sorting everything it may look at."""
        made, at = [], 0
        for segment in self.segments:
            for here in range(segment.position, segment.end):
                key_TD = self.keys[segment.prefix_pages.astype(np.int64)].flatten(0, 1)[: here + 1]
                score_T = (self.weight_NH[at] @ (self.query_NHD[at] @ key_TD.T).relu()).tolist()
                order = sorted(range(here + 1), key=lambda position, score=score_T: (-score[position], position))
                made.append((segment, sorted(order[: self.COUNT])))
                at += 1
        return made


def test_gathered_attention_is_attention_over_what_was_picked() -> None:
    scene = Scene()
    seen_NHC = scene.attend(scene.kept)
    for at, (segment, positions) in enumerate(scene.picked_one_by_one()):
        row_KC = scene.kept[segment.prefix_pages.astype(np.int64)].flatten(0, 1)[positions]
        expected_HC = (scene.asked_NHC[at] @ row_KC.T * 0.3).softmax(-1) @ row_KC
        assert (seen_NHC[at] - expected_HC).abs().max() <= 1e-5, f"token {at} of the batch"


def test_gathering_in_blocks_changes_nothing_and_bounds_what_is_gathered() -> None:
    scene = Scene()
    whole = scene.attend(scene.kept)
    for queries in (1, 7):
        bound = queries * scene.COUNT * scene.CHANNELS * 4
        Counting.gathered.clear()
        assert (scene.attend(scene.kept, Counting, block_bytes=bound) - whole).abs().max() <= 1e-6
        assert max(Counting.gathered) == min(queries, 50) * scene.COUNT
    for one, other in zip(scene.select(block_bytes=1), scene.select(), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one.position_XK, other.position_XK)


def test_rows_that_nobody_picked_are_not_read() -> None:
    scene = Scene()
    singles = scene.paging.singles[0]
    scene.paging.__dict__.update(singles=(singles,), runs=())
    whole = scene.attend(scene.kept)
    picked = scene.select()[0]
    assert picked is not None
    read = torch.full_like(scene.kept, torch.nan)
    page_XK = singles.table_BP.gather(1, picked.position_XK // PAGE)
    read[page_XK, picked.position_XK % PAGE] = scene.kept[page_XK, picked.position_XK % PAGE]
    assert torch.equal(scene.attend(read), whole)
