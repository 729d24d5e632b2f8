"""Rows on the host alone on a GPU: the bits of an engine with the same settings whose rows are all on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.families import INDEX, LATENT, checkpoint_of, draw_choices  # noqa: E402
from engine.side_by_side import draw  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from parity.recorded import PAGE, Played, Recorded  # noqa: E402
from parity.spilling import SPARSE, prompts, recorded, report, spilled  # noqa: E402
from parity.test_spilled_rows import check_same, two_turns  # noqa: E402
from stepwell.engine.loading.checkpoint import Checkpoint  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]

FORMATS: list[dict[str, Any]] = [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "kv_dtype": "fp8"}]


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("how", FORMATS, ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("hot_rows", [0, 2 * PAGE, 8 * PAGE])
def test_rows_on_the_host_change_no_bit(family: str, how: dict[str, Any], hot_rows: int) -> None:
    one = recorded(family, hot_rows=hot_rows, device="cuda", **how)
    other = spilled(family, hot_rows=hot_rows, device="cuda", **how)
    check_same(two_turns(other), two_turns(one))
    torch.cuda.synchronize()
    report(other)  # asks for figures,
    torch.cuda.synchronize()
    found = report(other)  # which are there now
    assert found.misses and found.staged_bytes and (found.fetched_bytes > 0) == (hot_rows > 0)
    assert other.engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0
    one.close()
    other.close()


@pytest.mark.parametrize("family", SPARSE)
def test_a_device_too_small_for_one_request(family: str) -> None:
    (prompt,) = prompts((700,))
    one = recorded(family, hot_rows=2 * PAGE, device="cuda", dtype="fp32")
    other = recorded(family, hot_rows=2 * PAGE, memory="720KiB", device="cuda", dtype="fp32")
    check_same([other.play(prompt, answer=60)], [one.play(prompt, answer=60)])
    assert other.engine.cache.stats().counters["spilled_pages"] > 20
    one.close()
    other.close()


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("how", FORMATS[1:], ids=lambda how: "-".join(how.values()))
def test_steps_over_rows_on_the_host_are_recorded_and_go_ahead(family: str, how: dict[str, Any]) -> None:
    """Rows leave the device between a recording and its replays, and freed pages hold no numbers."""
    one, other = recorded(family, device="cuda", **how), spilled(family, hot_rows=4 * PAGE, device="cuda", **how)
    then, now = (made.play_all(prompts((150, 97, 200, 64)), answer=60) for made in (one, other))
    assert [each.tokens for each in now] == [each.tokens for each in then]
    check_same(now, then)
    runner = other.engine._runner
    assert runner.goes_ahead and other.engine.kernels["hot rows"] == "triton", other.engine.kernels
    graphs = runner._forward.__self__
    assert any(shape[2] for shape in graphs._recordings), f"none was recorded: {graphs._refused=} {graphs._met=}"
    assert other.engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0
    one.close()
    other.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
@pytest.mark.parametrize("family", SPARSE)
def test_decoding_over_rows_on_the_host_never_waits_for_the_device(family: str) -> None:
    """Steps that are computed, before any is recorded: nothing in them asks the device."""
    made = spilled(family, hot_rows=4 * PAGE, device="cuda", dtype="bf16")
    model = made.engine._runner.model
    compute, watched_steps = type(model).compute, 0

    def watched(self: Any, batch: Any, *more: Any) -> Any:
        nonlocal watched_steps
        if batch.spilled is None or batch.num_singles < len(batch.segments) or torch.cuda.is_current_stream_capturing():
            return compute(self, batch, *more)
        watched_steps += 1
        with no_waiting():
            return compute(self, batch, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "compute", watched)
        made.play(prompts((300,))[0], answer=20)
    assert watched_steps
    assert made.engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0, made.engine.kernels
    made.close()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Torch raises where it would wait for the device. Whatever happens, it does not go on doing so."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")  # inside: a warning that is an error is raised when it is set already
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# ---- latents as wide as those of real models, which FlashInfer takes -----------------------------------

REAL = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 256}
ROOM = {"memory": "16MiB", "host_memory": "16MiB"}
ALWAYS, SELDOM = 8, 64  # rows that are picked: fewer than a page has, so that everybody picks; more than the first passes see


@cache
def wide(family: str, picked: int) -> Checkpoint:
    hf = pytest.importorskip("transformers")
    sizes = {**LATENT, **REAL, **INDEX, "index_head_dim": 128, "index_topk": picked, "num_hidden_layers": 3}
    if family == "glm_moe_dsa":
        sizes["indexer_types"] = ["full", "shared", "full"]
    name = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[family]
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**sizes))
    draw(model)
    draw_choices(model)
    return checkpoint_of(f"{family}-{picked}", model.float())


def mixed(made: Recorded) -> list[Played]:
    """Prompts next to answers; then each once more with a few tokens behind it, which are computed over what is on the host."""
    first = made.play_all(prompts((150, 97, 200, 64)), answer=20)
    again = [[*each.prompt, *each.tokens, *more] for each, more in zip(first, prompts((5, 3, 40, 70), seed=2), strict=True)]
    return first + made.play_all(again, answer=12)


def check_real(made: Recorded, *, hot_rows: int) -> None:
    torch.cuda.synchronize()
    report(made)
    torch.cuda.synchronize()
    found = report(made)
    assert found.misses and found.staged_bytes and (found.fetched_bytes > 0) == (hot_rows > 0), found
    assert made.engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0, made.engine.kernels
    assert made.engine.kernels["picked rows"] == made.engine.kernels["latents"] == "flashinfer", made.engine.kernels


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("how", FORMATS[1:], ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("hot_rows", [0, PAGE])
def test_flashinfer_sees_the_same_in_rows_on_the_host(family: str, how: dict[str, Any], hot_rows: int) -> None:
    """Hot rows, rows that are read through, rows in the scratch of a prompt, and pieces of one pass that have some of each."""
    pytest.importorskip("flashinfer")
    model, settings = wide(family, ALWAYS), {**ROOM, **how, "device": "cuda", "hot_rows": hot_rows}
    one, other = (make(model, **settings) for make in (recorded, spilled))
    check_same(mixed(other), mixed(one))
    check_real(other, hot_rows=hot_rows)
    one.close()
    other.close()


@pytest.mark.parametrize("how", FORMATS[1:], ids=lambda how: "-".join(how.values()))
def test_flashinfer_over_contexts_of_which_all_is_picked(how: dict[str, Any]) -> None:
    """Plain rows on the device are then read where they lie, those on the host are copied first: sums may differ in last bits."""
    pytest.importorskip("flashinfer")
    model, settings = wide("deepseek_v32", SELDOM), {**ROOM, **how, "device": "cuda", "hot_rows": 6 * PAGE}
    one, other = (make(model, **settings) for make in (recorded, spilled))
    played = [pair for pair in zip(mixed(other), mixed(one), strict=True) if pair[0].prompt == pair[1].prompt]
    apart = [(now.logits[0] - then.logits[0]).abs().mean() / then.logits[0].std() for now, then in played]
    assert len(played) >= 4 and sum(apart) / len(apart) < 0.05, apart
    check_real(other, hot_rows=6 * PAGE)
    one.close()
    other.close()
