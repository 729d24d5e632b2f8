"""DeepSeek-V4 compared with transformers, and every piece of its state shown to be read.

The reference runs eagerly, and every prompt alone: it has no other implementation, and cannot pad.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import small as engines
from engine.families import COMPRESSED, draw_choices
from engine.side_by_side import TOLERANCE, Held, Memory, Pair, check_pair, check_ragged
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind
from stepwell.engine import Limits
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models.registry import build_model
from stepwell.engine.ops import compression
from stepwell.engine.ops.compression import Index, attend_shared
from stepwell.engine.passes import batch as batch_module
from stepwell.engine.passes.groups import Seen
from stepwell.engine.passes.open_groups import FEWEST_SLOTS, OpenGroups
from stepwell.engine.passes.paging import Run, Sight
from stepwell.engine.passes.rows import PLAIN, Rows
from stepwell.engine.running.runner import Slots
from stepwell.tiers.lease import LeaseState

transformers = pytest.importorskip("transformers")

YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64,
}  # fmt: skip
COUNT = 104  # tokens: three groups of 32 and a part of one, and more groups of 4 than are picked
CHANGED = 100 * TOLERANCE


class Streams(Pair):
    """A pair whose layers are compared lane by lane: before them stands the spreading of lanes, behind them their gathering."""

    def layer_outputs(self, tokens: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        ours, theirs = super().layer_outputs(tokens)
        return ours[1:-1], theirs


def deepseek_v4(**more: object) -> Any:
    made = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**COMPRESSED | more, attn_implementation="eager"))
    draw_choices(made)
    return made


def of(pair: Pair, **settings: Any) -> Pair:
    """The same weights in another setting."""
    other = Pair.__new__(Pair)
    other.reference = pair.reference
    config, tensors = (
        settings.pop("config", pair.reference.config.to_dict()),
        settings.pop("tensors", pair.reference.state_dict()),
    )
    other.model = build_model(config, HeldTensors(dict(tensors)), **{"page_tokens": 16} | settings)
    return other


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Streams(deepseek_v4())


@pytest.fixture(scope="module")
def tokens(pair: Pair) -> list[int]:
    return pair.tokens(COUNT)


@pytest.fixture(scope="module")
def expected(pair: Pair, tokens: list[int]) -> torch.Tensor:
    return pair.expected(tokens)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


# ---- compared with the reference ------------------------------------------------------------------


def test_deepseek_v4(pair: Pair) -> None:
    check_pair(pair, 78)


@pytest.mark.parametrize("page_tokens", [2, 8, 64])
def test_pages_shorter_than_groups_and_longer(
    pair: Pair, tokens: list[int], expected: torch.Tensor, page_tokens: int
) -> None:  # fmt: skip
    other = of(pair, page_tokens=page_tokens)
    for sizes in ([COUNT], [page_tokens, 3 * page_tokens, 1, 1, 21], [COUNT - 9, 1]):
        assert distance(other.in_chunks(tokens, sizes), expected) <= TOLERANCE, f"chunks of {sizes}"
    check_ragged(other)


def test_singles_and_runs_in_one_pass(pair: Pair) -> None:
    prompts = [pair.tokens(length, seed=length) for length in (3, 31, 64, 100, 67)]
    memory = Memory(pair.spec)
    held = [Held(memory, len(prompt) + 1) for prompt in prompts]
    before = [len(prompt) - 1 for prompt in prompts[:3]] + [41, 0]
    for one, prompt, count in zip(held, prompts, before, strict=True):
        if count:
            pair.forward(memory, [one.segment(prompt[:count])])
    logits = pair.forward(memory, [h.segment(p[count:]) for h, p, count in zip(held, prompts, before, strict=True)])
    for prompt, row in zip(prompts, logits, strict=True):
        assert distance(row, pair.expected(prompt)[-1]) <= TOLERANCE


def test_singles_of_very_different_lengths_are_looked_at_apart(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "PADDING_PAGES", 0)
    small, prompts = of(pair, page_tokens=2), [pair.tokens(length, seed=length) for length in (3, 4, 5, 75)]
    memory = Memory(small.spec)
    held = [Held(memory, len(prompt) + 1) for prompt in prompts]
    for one, prompt in zip(held, prompts, strict=True):
        small.forward(memory, [one.segment(prompt[:-1])])
    batch = memory.batch([one.segment(prompt[-1:]) for one, prompt in zip(held, prompts, strict=True)])
    paging = batch.paging(24)
    assert [each.stop for each in paging.singles] == [each.stop for each in batch.groups(4, paging).seen] == [3, 4]
    for prompt, row in zip(prompts, small.model.forward(batch), strict=True):
        assert distance(row, pair.expected(prompt)[-1]) <= TOLERANCE


def test_a_few_tokens_at_a_time(
    pair: Pair, tokens: list[int], expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(compression, "BLOCK_NUMBERS", 2000)
    assert distance(pair.in_chunks(tokens, [70, 40]), expected) <= TOLERANCE


def test_both_ways_of_writing_rotations() -> None:
    pair = Streams(deepseek_v4(rope_parameters=YARN))
    tokens = pair.tokens(90)
    expected = pair.expected(tokens)
    assert distance(pair.one_shot(tokens), expected) <= TOLERANCE
    config = pair.reference.config.to_dict()
    older = config | {"rope_parameters": None, "rope_scaling": {**YARN, "type": "yarn"}}
    assert distance(of(pair, config=older).one_shot(tokens), expected) <= TOLERANCE
    plain = config | {"rope_parameters": None}
    assert distance(of(pair, config=plain).one_shot(tokens), expected) > CHANGED


def test_all_ways_of_writing_sizes(pair: Pair, tokens: list[int], expected: torch.Tensor) -> None:
    config = pair.reference.config.to_dict()
    older = config | {"compress_rates": None, "compress_rate_csa": 4, "compress_rate_hca": 32, "partial_rotary_factor": None}
    share = {name: value for name, value in config.items() if name != "qk_rope_head_dim"}
    for each in (older, share):
        assert distance(of(pair, config=each).one_shot(tokens), expected) <= TOLERANCE


def test_groups_of_another_size_than_the_config_says_are_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="position_bias"):
        of(pair, config=pair.reference.config.to_dict() | {"compress_rates": None})


def test_an_expert_with_biases_that_all_tokens_visit() -> None:
    pair = Streams(deepseek_v4(mlp_bias=True))
    tokens = pair.tokens(20)
    assert distance(pair.one_shot(tokens), pair.expected(tokens)) <= TOLERANCE


def test_one_kind_of_layer_alone() -> None:
    for kind in ("sliding", "compressed_sparse", "heavily_compressed"):
        alone = Streams(deepseek_v4(num_hidden_layers=2, layer_types=[f"{kind}_attention"] * 2, mlp_layer_types=["moe"] * 2))
        tokens = alone.tokens(80)
        assert distance(alone.in_chunks(tokens, [37, 32, 1]), alone.expected(tokens)) <= TOLERANCE, kind


def test_the_rates_and_pages_of_the_real_model() -> None:
    more = {"compress_rates": None, "sliding_window": 128, "index_topk": 40, "hc_mult": 4, "hc_sinkhorn_iters": 20}
    real = Streams(deepseek_v4(**more), page_tokens=128)
    longer = of(real, page_tokens=None)
    assert (real.spec.page_tokens, longer.spec.page_tokens) == (128, 256)
    assert not {"c4_buffer", "c128_buffer"} & {part.state for part in longer.spec.parts(Kind.POINT)}
    tokens = real.tokens(300, seed=18)  # no near ties: what is picked last and what is not differ by 4e-4, not by rounding
    expected = real.expected(tokens)
    for each in (real, longer):
        assert distance(each.in_chunks(tokens, [256, 40, 1]), expected) <= TOLERANCE
    assert distance(Resumed(longer, tokens, 256).go_on(), expected[256:]) <= TOLERANCE


def test_all_names_a_checkpoint_may_have(pair: Pair, tokens: list[int], expected: torch.Tensor, tmp_path: Path) -> None:
    pair.reference.save_pretrained(tmp_path)
    written = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert "model.layers.0.attn.wq_a.weight" in written
    published = {name.removeprefix("model."): tensor for name, tensor in written.items()}
    for theirs, ours in (("embed", "embed_tokens"), ("hc_head_fn", "hc_head.hc_fn"), ("hc_head_base", "hc_head.hc_base")):
        published |= {name.replace(ours, theirs, 1): published.pop(name) for name in list(published) if name.startswith(ours)}
    published |= {"hc_head_scale": published.pop("hc_head.hc_scale"), "mtp.0.attn.wq_a.weight": torch.zeros(1)}
    for tensors in (written, published):
        assert distance(of(pair, tensors=tensors).one_shot(tokens), expected) <= TOLERANCE


def test_scores_that_are_not_known_are_refused(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="scoring_func"):
        of(pair, config=pair.reference.config.to_dict() | {"scoring_func": "hardmax"})


def test_groups_of_a_pass(pair: Pair) -> None:
    memory = Memory(pair.spec)
    held = Held(memory, 32)
    held.position = 6
    batch = memory.batch([held.segment([0] * 4)])
    groups = batch.groups(4, batch.paging(24))
    assert (len(groups), groups.position_G.tolist(), groups.token_GR[0, 2:].tolist()) == (1, [4], [0, 1])
    assert (groups.page_G.tolist(), groups.row_G.tolist()) == ([held.prefix[0]], [1])
    assert (groups.older.row.tolist(), groups.left.row.tolist(), groups.left.of.tolist()) == ([0, 1], [0, 1], [2, 3])
    assert (groups.before_G.tolist(), groups.last_Z.tolist(), groups.first_Z.tolist()) == ([1], [0], [False])
    assert groups.seen[0].count_ST.tolist() == [[1, 2, 2, 2]]


def test_equal_scores_go_to_the_first_entries() -> None:
    stored_PRE = torch.ones(3, 4, 8)
    index = Index(
        query_NID=torch.ones(2, 16, 8), weight_NI=torch.ones(2, 16), keys=Rows(stored_PRE, PLAIN, torch.float32), count=3
    )
    seen = Seen(start=0, stop=2, table_SP=torch.tensor([[2, 0]]), rows=4, count_ST=torch.tensor([[2, 7]]))
    entry_STK, hidden_STK = index.pick(seen, index.keys.whole(seen.table_SP).flatten(1, 2), slice(0, 2))
    assert entry_STK[0].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert hidden_STK[0].tolist() == [[False, False, True], [False, False, False]]
    assert [each.tolist() for each in seen.place(torch.tensor([[[1, 6]]]))] == [[[[2, 0]]], [[[1, 2]]]]


def test_sinks_are_not_rounded_to_what_the_model_computes_in() -> None:
    rows = Rows(torch.ones(1, 4, 2, dtype=torch.bfloat16), PLAIN, torch.bfloat16)
    sight = Sight(page_tokens=4, window=None, first_seen=0, device="cpu", dtype=torch.bfloat16)
    run = Run(start=0, stop=2, pages_P=torch.tensor([0]), position=3, first=0, sight=sight)  # both see all
    paging = SimpleNamespace(singles=(), runs=(run,))
    query_NHD, sink = torch.zeros(2, 1, 2, dtype=torch.bfloat16), 5.015  # in bf16 it would be 5.0
    seen_NHD = attend_shared(query_NHD, rows, paging, None, scale=1.0, sinks_H=torch.tensor([sink]))
    exact = 4 / (4 + math.exp(sink))
    assert (seen_NHD.float() / exact - 1).abs().max() < 2**-8


# ---- every piece of state is read -----------------------------------------------------------------


class Resumed:
    """A prompt computed up to a boundary; then another request, with an unwritten slot, continues from its pages alone."""

    def __init__(self, pair: Pair, tokens: Sequence[int], boundary: int) -> None:
        self.pair, self.tokens, self.boundary = pair, tokens, boundary
        self.memory = Memory(pair.spec)
        self.held = Held(self.memory, len(tokens))
        pair.forward(self.memory, [self.held.segment(tokens[: boundary - 5])])
        pair.forward(self.memory, [self.held.segment(tokens[boundary - 5 : boundary])])

    def spoil(self, state: str, value: float) -> None:
        self.memory.pages.state_PLRE(state).fill_(value)

    def go_on(self) -> torch.Tensor:
        groups = self.memory.open_groups
        self.held.slot, self.held.resume = groups.take(), self.boundary
        for rows in groups._rows.values():
            rows.fill_(torch.nan)
        segment = self.held.segment(self.tokens[self.boundary :])
        return self.pair.forward(self.memory, [segment], every_token=True)


@pytest.mark.parametrize(
    ("page_tokens", "boundary", "states"),
    [
        (2, 94, ["swa", "c4", "c4_index", "c4_overlap", "c4_buffer", "c32", "c32_buffer"]),
        (16, 80, ["swa", "c4", "c4_index", "c4_overlap", "c32", "c32_buffer"]),
        (16, 96, ["swa", "c4", "c4_index", "c4_overlap", "c32"]),
        (32, 96, ["swa", "c4", "c4_index", "c4_overlap", "c32"]),
    ],
)
def test_resuming_needs_all_that_the_spec_names_and_nothing_else(
    pair: Pair, tokens: list[int], expected: torch.Tensor, page_tokens: int, boundary: int, states: list[str]
) -> None:
    other = of(pair, page_tokens=page_tokens)
    assert [state.name for state in other.spec.needed_at(boundary)] == states
    assert distance(Resumed(other, tokens, boundary).go_on(), expected[boundary:]) <= TOLERANCE
    for state in states:
        resumed = Resumed(other, tokens, boundary)
        resumed.spoil(state, 0.0)
        change = distance(resumed.go_on(), expected[boundary:])
        assert change > CHANGED, f"without {state} logits differ by {change} only"
    resumed = Resumed(other, tokens, boundary)
    for state in {part.state for part in other.spec.parts(Kind.POINT)} - set(states):
        resumed.spoil(state, torch.nan)
    assert distance(resumed.go_on(), expected[boundary:]) <= TOLERANCE


def test_slots_grow_and_are_used_again(pair: Pair) -> None:
    groups = OpenGroups(Memory(pair.spec, count=4).pages, device="cpu")
    taken = [groups.take() for _ in range(FEWEST_SLOTS)]
    groups.layer("c32_buffer", 0)[taken[1]] = 7.0
    more = groups.take()
    assert len({*taken, more}) == FEWEST_SLOTS + 1 == groups.num_taken
    assert (groups.layer("c32_buffer", 0)[taken[1]] == 7.0).all(), "growing keeps what is there"
    groups.give_back(taken[2])
    assert groups.take() == taken[2] and groups.num_taken == FEWEST_SLOTS + 1


def test_a_slot_is_held_until_its_lease_is_closed(pair: Pair) -> None:
    slots = Slots(OpenGroups(Memory(pair.spec, count=4).pages, device="cpu"))
    leases: list[Any] = [SimpleNamespace(id=number, state=LeaseState.READY) for number in range(3)]
    first = [slots.of(lease) for lease in leases]
    assert len(set(first)) == 3 and [slots.of(lease) for lease in leases] == first
    leases[1].state = LeaseState.CLOSED
    slots.sweep()
    assert slots.open_groups.num_taken == 2
    assert slots.of(SimpleNamespace(id=9, state=LeaseState.LOADING)) == first[1]  # type: ignore[arg-type]


def test_put_back_in_the_middle_of_groups() -> None:
    """Requests go on from boundaries before the tokens they were at, in slots where others left theirs."""
    asks = [engines.greedy(engines.prompt(25 + 13 * number, number % 2), 16 + number) for number in range(5)]
    expected = engines.alone("deepseek_v4", asks)
    resumed, passes = [], 0
    with engines.small("deepseek_v4", page_tokens=8, limits=Limits(chunk_tokens=37, max_running=4)) as engine:
        answers: dict[int, list[int]] = {engine.submit(ask): [] for ask in asks}
        while engine.num_open:
            inside = [each for each in engine.scheduler.active.values() if each.runs and each.position % 4]
            if engine.passes >= passes + 5 and inside:
                passes = engine.passes
                resumed.append(inside[0])
                engine.scheduler.put_back(inside[0])
            for delta in engine.step():
                answers[delta.request] += delta.tokens
        slots = engine._runner._slots
        slots.sweep()
    assert len({each.id for each in resumed}) > 1 and len(resumed) > 2
    assert list(answers.values()) == expected
    assert slots.open_groups.num_taken == 0


# ---- other number formats -------------------------------------------------------------------------


def test_rows_in_eight_bits(tokens: list[int]) -> None:
    exact = Streams(deepseek_v4(n_routed_experts=3, index_topk=512))  # nothing to choose: rounding only rounds
    eight = of(exact, kv_dtype="fp8")
    assert eight.spec.state("c4").row_bytes == eight.spec.state("swa").row_bytes == 16 + 2 * 8 + 8
    assert eight.spec.state("c4_index").row_bytes == 16 + 4
    rounded = eight.one_shot(tokens)
    error = (rounded - exact.one_shot(tokens)).abs()
    assert error.mean() < 0.1 and error.max() < 0.6, f"{error.mean()=} {error.max()=}"
    assert distance(Resumed(eight, tokens, 80).go_on(), rounded[80:]) <= TOLERANCE


def test_rows_in_eight_bits_where_rounding_changes_choices(pair: Pair, tokens: list[int], expected: torch.Tensor) -> None:
    error = (of(pair, kv_dtype="fp8").in_chunks(tokens, [37, 16]) - expected).abs()
    assert error.mean() < 0.2, f"{error.mean()=} {error.max()=}"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bf16
def test_in_sixteen_bits_the_overlap_keeps_gates_in_fp32(pair: Pair, tokens: list[int], expected: torch.Tensor) -> None:
    half, tokens = of(pair, dtype="bf16"), tokens[:70]
    assert half.spec.state("c4_overlap").dtype == "bf16+fp32"
    live = half.in_chunks(tokens, [43, 5, 22])
    assert (live - expected[:70]).abs().mean() < 0.1
    assert torch.equal(Resumed(half, tokens, 48).go_on(), live[48:]), "a request that resumes goes on with the same bits"
