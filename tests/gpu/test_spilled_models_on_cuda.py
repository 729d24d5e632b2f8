"""Models with their rows on the host alone, on a GPU: with drafts, with Quest and ClusterKV, and compared with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.drafted import target, with_own_layer  # noqa: E402
from engine.families import SMALL, checkpoint_of, reference  # noqa: E402
from engine.side_by_side import draw  # noqa: E402
from engine.small import DEFAULTS, prompt, run, tokens_of  # noqa: E402
from gpu.test_spilling_on_cuda import ALWAYS, ROOM, check_real, wide  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from parity.recorded import PAGE, Played, Recorded, distance  # noqa: E402
from parity.spilling import SPARSE, press, prompts, recorded, report, short, spilled  # noqa: E402
from parity.test_spilled_keys_and_values import SELECTORS, picking  # noqa: E402
from parity.test_spilled_keys_and_values import two_turns as two_turns_picking  # noqa: E402
from parity.test_spilled_rows import LENGTHS, check_same  # noqa: E402
from stepwell.engine import Delta, Engine, EngineConfig, GenerateRequest, Limits, Sampling, build_engine  # noqa: E402
from stepwell.engine.loading.checkpoint import Checkpoint  # noqa: E402
from stepwell.engine.passes.spilling import SpillReport  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
TOLERANCE = 1e-3
HEADS_OF_128 = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}


def figures(engine: Engine) -> SpillReport:
    """Those of now: a report asks for them, and the next has them."""
    for _ in range(2):
        torch.cuda.synchronize()
        found = report(engine)
    assert engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0, engine.kernels
    return found


# ---- drafts -----------------------------------------------------------------------------------------


def drafting(*, wide_rows: bool, **settings: Any) -> Engine:
    """DeepSeek-V3.2 with a layer that drafts; with rows as wide as real ones, which FlashInfer takes."""
    made = with_own_layer(wide("deepseek_v32", ALWAYS)) if wide_rows else target("deepseek_v32", own_layer=True)
    room = {"device_memory": ROOM["memory"], "host_memory": ROOM["host_memory"]} if wide_rows else {}
    more = {"draft": "mtp", "sparse": "dsa", "device": "cuda", "limits": Limits(chunk_tokens=64, max_running=6)}
    return build_engine(short(made), EngineConfig(**(DEFAULTS | more | room | settings)))


def logprobs_of(deltas: Sequence[Delta]) -> list[float]:
    return [each.logprob for delta in deltas for each in delta.logprobs]


@pytest.mark.parametrize("hot_rows", [0, 2 * PAGE, 6 * PAGE])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16, wide rows"])
def test_drafts_are_verified_over_rows_on_the_host(dtype: str, hot_rows: int) -> None:
    """Several query rows of a request select together: the answers, bits and right guesses of an engine where nothing spills."""
    wide_rows = dtype.endswith("wide rows")
    if wide_rows:
        pytest.importorskip("flashinfer")
    asks = [
        GenerateRequest(tokens=prompt(length, seed=length), sampling=Sampling(max_tokens=24, logprobs=1))
        for length in (40, 180, 97)
    ]
    settings = {"wide_rows": wide_rows, "dtype": dtype[:4], "hot_rows": hot_rows}
    with drafting(**settings) as engine:
        expected = run(engine, asks)
        assert figures(engine).misses == 0
    with drafting(**settings) as engine:
        press(engine)
        played = run(engine, asks)
        found = figures(engine)
    assert found.misses and (found.read_through == found.misses) == (hot_rows == 0)
    assert found.staged_bytes or hot_rows > 2 * PAGE, "prompts were computed over rows on the host"
    guesses = []
    for one, other in zip(played, expected, strict=True):
        assert tokens_of(one) == tokens_of(other) and len(tokens_of(one)) == 24
        assert logprobs_of(one) == logprobs_of(other)
        usages = one[-1].usage, other[-1].usage
        assert usages[0] is not None and usages[1] is not None
        guesses.append([(usage.proposed_tokens, usage.accepted_tokens) for usage in usages if usage is not None])
    assert all(now == then and now[0] > 0 for now, then in guesses)
    assert wide_rows or sum(now[1] for now, _ in guesses) > 0


# ---- keys and values --------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("hot_rows", [0, 8 * PAGE])
def test_keys_and_values_on_the_host_change_no_bit_in_fp32(selector: str, hot_rows: int) -> None:
    """Prompts side by side, answers that pick, and short and long prompts behind what is cached."""
    settings = picking(selector, device="cuda", dtype="fp32")
    one, other = recorded("llama", **settings), spilled("llama", hot_rows=hot_rows, **settings)
    check_same(two_turns_picking(other), two_turns_picking(one))
    found = figures(other.engine)
    assert found.misses and found.staged_bytes and (found.fetched_bytes > 0) == (hot_rows > 0)
    one.close()
    other.close()


# ---- keys and values in heads as wide as those of real models, which FlashInfer takes ---------------------


@cache
def heads_of_128() -> Checkpoint:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL | HEADS_OF_128))
    draw(model)
    return checkpoint_of("llama-heads-of-128", model.float())


def picking_wide(selector: str, *, hot_rows: int | None) -> Recorded:
    settings = {"memory": "64MiB", "host_memory": "64MiB", "sparse": selector, "sparse_budget": 112}
    settings |= {"dtype": "bf16", "device": "cuda"}
    made = recorded(heads_of_128(), **settings) if hot_rows is None else spilled(heads_of_128(), hot_rows=hot_rows, **settings)
    assert made.engine.kernels["picked rows"] == "flashinfer", made.engine.kernels
    return made


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("hot_rows", [0, 2 * PAGE, 12 * PAGE])
def test_answers_see_the_same_keys_and_values_wherever_they_are(selector: str, hot_rows: int) -> None:
    """One request at a time, whose prompts are long: then the same kernels run over the same rows."""
    pytest.importorskip("flashinfer")
    one, other = picking_wide(selector, hot_rows=None), picking_wide(selector, hot_rows=hot_rows)
    for each in prompts((500, 333, 160)):
        check_same([other.play(each, answer=40)], [one.play(each, answer=40)])
    check_real(other, hot_rows=hot_rows)
    graphs = other.engine._runner._forward.__self__
    assert any(shape[2] for shape in graphs._recordings), f"none was recorded: {graphs._refused=} {graphs._met=}"
    one.close()
    other.close()


@pytest.mark.parametrize("selector", SELECTORS)
def test_answers_beside_others_are_as_near_as_rounding_is(selector: str) -> None:
    """Several prompts in one pass are attended to one by one where some rows are on the host: last bits may differ."""
    pytest.importorskip("flashinfer")
    one, other = picking_wide(selector, hot_rows=None), picking_wide(selector, hot_rows=12 * PAGE)
    then, now = (made.play_all(prompts((500, 333, 260, 410)), answer=1) for made in (one, other))
    assert max(distance(a, b) for a, b in zip(now, then, strict=True)) < 0.2
    one.close()
    other.close()


# ---- an oracle that is not the engine -----------------------------------------------------------------


class Oracle:
    """The model of transformers on the CPU, over a whole text at once: it knows neither pages nor hosts."""

    def __init__(self, family: str) -> None:
        self._models = [reference(family) for _ in range(4)]
        random = torch.Generator().manual_seed(1)
        for other in self._models[1:]:  # weights that differ in their last bits
            for weight in other.parameters():
                weight.data *= 1 + 1e-6 * torch.randn(weight.shape, generator=random)

    def check(self, played: Sequence[Played]) -> None:
        """Where scores nearly tie, last bits decide what is picked. Texts in which they do for these models are left out."""
        left = 0
        for each in played:
            text = torch.tensor([[*each.prompt, *each.tokens]])
            with torch.no_grad():
                expected, *others = (model(text, use_cache=False).logits[0] for model in self._models)
            if all((other - expected).abs().max() <= TOLERANCE for other in others):
                expected, left = expected[len(each.prompt) - 1 : -1], left + 1
                assert expected.std() > 0.3, "a dead model proves nothing"
                apart = (torch.stack(each.logits).float().cpu() - expected).abs().amax(1)
                assert apart.max() <= TOLERANCE, apart
        assert left >= len(played) / 2


@pytest.mark.parametrize("family", SPARSE)
def test_logits_are_those_of_transformers_before_and_after_rows_leave_the_device(family: str) -> None:
    oracle, made = Oracle(family), recorded(family, hot_rows=2 * PAGE, device="cuda", dtype="fp32")
    first = made.play_all(prompts(LENGTHS), answer=20)
    found = figures(made.engine)
    assert found.host_pages == found.misses == 0
    oracle.check(first)
    press(made.engine)
    more = prompts((5, 8, 9, 40, 70, 3), seed=2)
    oracle.check(made.play_all([[*each.prompt, *each.tokens, *tail] for each, tail in zip(first, more, strict=True)], answer=12))
    found = figures(made.engine)
    assert found.misses and found.staged_bytes and found.fetched_bytes
    made.close()
