"""Quest and ClusterKV in a pass: what is picked, what is seen of it, and that nothing depends on how passes cut the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch

from engine.families import checkpoint
from engine.paged import Scene, Shape
from engine.side_by_side import Held, Memory
from stepwell.base.errors import ConfigError, SpecError
from stepwell.base.spec.families import from_config
from stepwell.engine.approximate.clusterkv import ClusterKV
from stepwell.engine.approximate.quest import Quest
from stepwell.engine.approximate.selector import Selector
from stepwell.engine.approximate.selectors import RECENT, SINKS, Sparse
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.registry import build_model
from stepwell.engine.ops.attention import attend
from stepwell.engine.ops.picked import attend_picked
from stepwell.engine.ops.selection import Picked, Selection
from stepwell.engine.passes.paging import Singles
from stepwell.engine.passes.rows import PLAIN, Rows

PAGE, COUNT, TOLERANCE = 16, 112, 1e-4
SELECTORS = ("quest", "clusterkv")


def selector_of(name: str, shape: Shape, count: int) -> Selector:
    summary = Quest(kv_heads=shape.kv_heads) if name == "quest" else ClusterKV(kv_heads=shape.kv_heads, unit=shape.page, groups=3)
    return Selector(
        state="summaries", keys="kv", summary=summary, count=count, kv_heads=shape.kv_heads, key_dim=shape.width, sinks=4,
        recent=20,
    )  # fmt: skip


def summarised(scene: Scene, selector: Selector) -> Rows:
    """The summaries of all whole units, and garbage elsewhere."""
    stored, unit = scene.rows.stored_PRE, selector.summary.unit
    key_PRKD = stored.unflatten(2, (selector.kv_heads, -1))[..., : selector.key_dim]
    made = selector.summary.make(key_PRKD.reshape(-1, unit, *key_PRKD.shape[2:]))
    rows = Rows(torch.full((len(stored), stored.shape[1] // unit, made.shape[1]), torch.nan), PLAIN, torch.float32)
    rows.stored_PRE[:] = made.view_as(rows.stored_PRE)
    for look in scene.paging.looks:
        for at in range(look.end // unit, len(look.pages) * stored.shape[1] // unit):
            rows.stored_PRE[look.pages[at * unit // stored.shape[1]], at % rows.stored_PRE.shape[1]] = torch.nan
    return rows


def scene_of(seed: int, page: int = 32) -> Scene:
    draw = Random(seed)
    lengths = [1] * draw.randrange(1, 4) + [draw.randrange(2, 60) for _ in range(draw.randrange(3))]
    scene = Scene(
        Shape(heads=6, kv_heads=2, width=8, page=page, contexts=[draw.randrange(30, 400) for _ in lengths], lengths=lengths), seed
    )
    scene.clear_unwritten()
    return scene


# ---- what is picked ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("seed", range(6))
def test_exactly_the_budget_is_picked_with_sinks_and_recent_tokens(name: str, seed: int) -> None:
    scene, count = scene_of(seed), 80 + 7 * seed
    selector = selector_of(name, scene.shape, count)
    picked = selector.select(scene.made(scene.num_tokens, 6, 8), summarised(scene, selector), scene.paging, scale=0.3)
    assert any(each is not None for each in picked)
    for part, each in zip(scene.paging.parts, picked, strict=True):
        if each is None:
            continue
        position_X = part.position_B if isinstance(part, Singles) else part.position_N
        for here, chosen in zip(position_X.tolist(), each.position_XK.tolist(), strict=True):
            assert len(chosen) == count and chosen == sorted(set(chosen))
            seen = [at for at in chosen if at <= here]
            if here < count:
                assert seen == list(range(here + 1)), "all of them where there are no more"
            else:
                assert len(seen) == count, "nothing that is not there"
                whole = here // selector.summary.unit * selector.summary.unit
                assert {*range(4), *range(min(here - 19, whole), here + 1)} <= set(seen)


@pytest.mark.parametrize("seed", range(4))
def test_quest_picks_the_units_with_the_best_scores_and_cuts_the_last(seed: int) -> None:
    scene = scene_of(seed)
    selector = selector_of("quest", scene.shape, 90)
    query_NHD, rows = scene.made(scene.num_tokens, 6, 8), summarised(scene, selector)
    picked = selector.select(query_NHD, rows, scene.paging, scale=0.3)
    for part, each in zip(scene.paging.parts, picked, strict=True):
        for at in range(0 if each is None else part.stop - part.start):
            single = isinstance(part, Singles)
            here = int((part.position_B if single else part.position_N)[at])
            if here < selector.count:
                continue
            whole = here // 16
            row_UC = rows.whole(part.table_BP[at] if single else part.pages_P).flatten(0, 1)[:whole]
            bound_HU = selector.summary.bounds(query_NHD[part.start + at, None], row_UC[None])[0] * 0.3  # type: ignore[attr-defined]
            best = bound_HU.log_softmax(-1).amax(0).argsort(descending=True, stable=True).tolist()
            chosen = {*range(4), *range(min(here - 19, whole * 16), here + 1)}
            for unit in best:
                for token in range(unit * 16, unit * 16 + 16):
                    if len(chosen) < selector.count:
                        chosen.add(token)
            assert each is not None and sorted(chosen) == each.position_XK[at].tolist()


def test_tokens_of_a_prompt_look_at_everything() -> None:
    scene = scene_of(1)
    selector, query_NHD = selector_of("quest", scene.shape, 80), scene.made(scene.num_tokens, 6, 8)
    rows = summarised(scene, selector)
    for look in scene.paging.looks:
        object.__setattr__(look, "picks_from", look.end)
    assert selector.select(query_NHD, rows, scene.paging, scale=0.3) == (None,) * len(scene.paging.parts)


# ---- what is seen -----------------------------------------------------------------------------------


def naive(scene: Scene, query_NHD: torch.Tensor, selection: Selection, *, cap: float | None) -> torch.Tensor:
    """Token by token and head by head, over the rows that were picked, in float64."""
    shape, out_NHV = scene.shape, torch.zeros(scene.num_tokens, scene.shape.heads, scene.shape.width)
    parts = list(zip(scene.paging.parts, selection, strict=True))
    for look in scene.paging.looks:
        part, picked = next(each for each in parts if each[0].start <= look.start < each[0].stop)
        for at in range(look.start, look.stop):
            here, number = look.position + at - look.start, at - part.start
            tokens = list(range(here + 1))
            if picked is not None and number >= picked.first:
                tokens = [each for each in picked.position_XK[number - picked.first].tolist() if each <= here]
            row_TKE = torch.stack(
                [scene.rows.stored_PRE[look.pages[each // shape.page], each % shape.page] for each in tokens]
            ).double().unflatten(1, (shape.kv_heads, -1))  # fmt: skip
            for head in range(shape.heads):
                row_TE = row_TKE[:, head * shape.kv_heads // shape.heads]
                score_T = row_TE[:, : shape.width] @ query_NHD[at, head].double() * 0.3
                score_T = score_T if cap is None else torch.tanh(score_T / cap) * cap
                out_NHV[at, head] = score_T.softmax(0) @ row_TE[:, shape.width :]
    return out_NHV


def some_picks(scene: Scene, count: int) -> Selection:
    made: list[Picked | None] = []
    for part in scene.paging.parts:
        mask_XT = part.mask_BT if isinstance(part, Singles) else part.mask_NT
        if mask_XT.shape[1] <= count:
            made.append(None)
            continue
        first = 0 if isinstance(part, Singles) else (part.stop - part.start) // 3 * (scene.seed % 2)
        noise = torch.rand(mask_XT.shape, generator=scene.random)
        hidden_behind = (noise + mask_XT - torch.arange(mask_XT.shape[1]) * (mask_XT == -torch.inf)).nan_to_num(neginf=-1.0)
        order = hidden_behind.argsort(dim=1, descending=True, stable=True)[:, :count]
        made.append(Picked(position_XK=order.sort(dim=1).values[first:], first=first))
    return tuple(made)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("block_bytes", [1, 20_000, 64 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_picked_rows_are_attended_to_as_one_by_one(seed: int, block_bytes: int, cap: float | None) -> None:
    scene = scene_of(seed, page=16)
    query_NHD, count = scene.made(scene.num_tokens, 6, 8), (5, 40, 100, 33)[seed]
    selection = some_picks(scene, count)
    seen_NHV = attend_picked(
        query_NHD, scene.rows, scene.paging, selection, heads=2, key_dim=8, scale=0.3, cap=cap, block_bytes=block_bytes
    )
    torch.testing.assert_close(seen_NHV, naive(scene, query_NHD, selection, cap=cap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_budget_of_the_whole_length_sees_what_dense_attention_does(name: str) -> None:
    """Also next to a longer request: the requests that fit pick all they see."""
    scene = scene_of(2)
    query_NHD = scene.made(scene.num_tokens, 6, 8)
    dense_NHV = attend(query_NHD, scene.rows, scene.paging, heads=2, key_dim=8, scale=0.3)
    longest = max(look.end for look in scene.paging.looks)
    for count in (longest, longest + 40):
        selector = selector_of(name, scene.shape, count)
        selection = selector.select(query_NHD, summarised(scene, selector), scene.paging, scale=0.3)
        seen = attend_picked(query_NHD, scene.rows, scene.paging, selection, heads=2, key_dim=8, scale=0.3)
        torch.testing.assert_close(seen, dense_NHV, atol=1e-6, rtol=1e-5)


# ---- models -----------------------------------------------------------------------------------------


def model_of(family: str, sparse: Sparse | None) -> Decoder:
    held = checkpoint(family)
    return build_model(held.config, held.source, page_tokens=PAGE, sparse=sparse)


def tokens_of(count: int, seed: int = 3) -> list[int]:
    return [Random(seed * 1000 + at).randrange(128) for at in range(count)]


def in_chunks(model: Decoder, tokens: Sequence[int], sizes: Sequence[int], picks_from: int = 0) -> tuple[torch.Tensor, Memory]:
    """Logits of every token, in passes of the given sizes; the last size repeats."""
    memory = Memory(model.spec)
    held, parts, at, left = Held(memory, len(tokens)), [], 0, list(sizes)
    while at < len(tokens):
        size = left.pop(0) if len(left) > 1 else left[0]
        segment = held.segment(tokens[at : at + size])._replace(picks_from=picks_from)
        parts.append(model.forward(memory.batch([segment], every_token=True)))
        at += size
    return torch.cat(parts), memory


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", SELECTORS)
def test_how_passes_cut_the_tokens_changes_neither_logits_nor_summaries(family: str, name: str) -> None:
    model, tokens = model_of(family, Sparse(selector=name, budget=COUNT)), tokens_of(230)
    assert model.selector is not None
    expected, whole = in_chunks(model, tokens, [len(tokens)])
    dense, _ = in_chunks(model_of(family, None), tokens, [len(tokens)])
    assert (expected[:COUNT] - dense[:COUNT]).abs().max() <= TOLERANCE
    assert (expected[COUNT + PAGE :] - dense[COUNT + PAGE :]).abs().max() > 10 * TOLERANCE, "picking was to be seen"
    for sizes in ([1], [64], [100, 7], [200, 1], [37, 16]):
        logits, memory = in_chunks(model, tokens, sizes)
        assert (logits - expected).abs().max() <= TOLERANCE, f"in passes of {sizes}"
        kept, other = (each.pages.state_PLRE(model.selector.state) for each in (whole, memory))
        pages = Held(Memory(model.spec), len(tokens)).prefix[: len(tokens) // PAGE]
        torch.testing.assert_close(kept[pages], other[pages], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SELECTORS)
def test_the_prompt_is_dense_and_the_answer_picks_however_it_is_computed(name: str) -> None:
    """A preempted answer is computed again with its prompt, in passes that end anywhere."""
    model, tokens = model_of("llama", Sparse(selector=name, budget=COUNT)), tokens_of(220)
    dense, _ = in_chunks(model_of("llama", None), tokens, [len(tokens)])
    expected, _ = in_chunks(model, tokens, [180, 1], picks_from=180)
    assert (expected[:180] - dense[:180]).abs().max() <= TOLERANCE
    assert (expected[180:] - dense[180:]).abs().max() > 10 * TOLERANCE, "picking was to be seen"
    for sizes in ([len(tokens)], [179, 1], [150, 60, 10], [1], [190, 5]):
        logits, _ = in_chunks(model, tokens, sizes, picks_from=180)
        assert (logits - expected).abs().max() <= TOLERANCE, f"in passes of {sizes}"


@pytest.mark.parametrize("name", SELECTORS)
def test_a_budget_that_nobody_exceeds_gives_the_bits_of_a_dense_model(name: str) -> None:
    tokens = tokens_of(150)
    for sizes in ([len(tokens)], [64], [120, 1]):
        dense, _ = in_chunks(model_of("llama", None), tokens, sizes)
        picking, _ = in_chunks(model_of("llama", Sparse(selector=name, budget=160)), tokens, sizes)
        assert torch.equal(dense, picking)


def test_singles_that_pick_and_singles_of_a_prompt_share_a_pass() -> None:
    model = model_of("llama", Sparse(selector="quest", budget=COUNT))
    prompts = [tokens_of(length, seed=length) for length in (200, 150, 60, 190)]
    memory = Memory(model.spec)
    held = [Held(memory, len(each)) for each in prompts]
    for each, prompt in zip(held, prompts, strict=True):
        model.forward(memory.batch([each.segment(prompt[:-1])._replace(picks_from=10**6)]))
    froms = (0, 10**6, 0, 10**6)
    segments = [
        each.segment(prompt[-1:])._replace(picks_from=start) for each, prompt, start in zip(held, prompts, froms, strict=True)
    ]
    logits = model.forward(memory.batch(segments))
    for row, prompt, start in zip(logits, prompts, froms, strict=True):
        alone, _ = in_chunks(model, prompt, [len(prompt)], picks_from=max(start, len(prompt) - 1))
        assert (row - alone[-1]).abs().max() <= TOLERANCE


# ---- the spec ---------------------------------------------------------------------------------------


def test_summaries_stand_behind_the_rows_and_change_the_fingerprint() -> None:
    config = checkpoint("gemma3").config
    dense, quest, cluster = (from_config(config, kv_dtype="bf16", sparse=each) for each in (None, "quest", "clusterkv"))
    assert len({each.fingerprint for each in (dense, quest, cluster)}) == 3
    assert [state.name for state in quest.states] == [*(state.name for state in dense.states), "bounds"]
    assert quest.state("bounds").row_bytes == quest.state("kv").row_bytes, "smallest and largest are as wide as key and value"
    assert quest.page_tokens == 64 and cluster.page_tokens == 256
    assert cluster.state("clusters").rows_per_page(256) == 1
    for ranks in (1, 2):
        assert quest.for_ranks(ranks).state("bounds").row_bytes * ranks == quest.state("bounds").row_bytes
    own = checkpoint("deepseek_v32").config
    assert from_config(own, sparse="dsa").states == from_config(own).states


@pytest.mark.parametrize(
    ("family", "selector", "why"),
    [
        ("llama", "dsa", "no index"),
        ("deepseek_v32", "quest", "its own index"),
        ("mistral", "quest", "does not"),  # windows throughout
        ("mamba2", "clusterkv", "does not"),
        ("llama", "best", "must be one of"),
    ],
)
def test_a_model_that_cannot_have_a_selector_says_so(family: str, selector: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        from_config(checkpoint(family).config, sparse=selector)


def test_rows_of_a_model_with_an_index_always_spill_others_with_hot_rows() -> None:
    assert Sparse(selector="dsa").spills and Sparse(selector="quest", hot_rows=True).spills
    assert not Sparse(selector="quest").spills and not Sparse(selector="clusterkv", budget=600).spills


def test_settings_that_cannot_work_are_refused() -> None:
    for selector, budget in (("dsa", 100), ("quest", 0), ("other", None)):
        with pytest.raises(ConfigError):
            Sparse(selector=selector, budget=budget)
    with pytest.raises(ConfigError, match=f"at least {SINKS + RECENT + 16}"):
        model_of("llama", Sparse(selector="quest", budget=90))
    with pytest.raises(SpecError, match="multiple of 16"):
        from_config(checkpoint("llama").config, sparse="quest", page_tokens=24)
