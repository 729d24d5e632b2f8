"""Rows that are fetched on a stream beside the pass: in recorded steps too, nobody reads one before it is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.families import SMALL, checkpoint_of  # noqa: E402
from engine.side_by_side import draw  # noqa: E402
from gpu.test_spilling_on_cuda import (  # noqa: E402
    ALWAYS,
    FORMATS,
    ROOM,
    check_real,
    mixed,
    wide,
)
from not_run import NO_CUDA  # noqa: E402
from parity.recorded import PAGE, Recorded, distance  # noqa: E402
from parity.spilling import SPARSE, prompts, recorded, report, spilled  # noqa: E402
from parity.test_spilled_keys_and_values import SELECTORS  # noqa: E402
from parity.test_spilled_rows import check_same  # noqa: E402
from stepwell.engine.loading.checkpoint import Checkpoint  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]

BESIDE: list[dict[str, Any]] = [{"fetch_beside": True}, {"prefetch_near": 12}, {"fetch_beside": True, "prefetch_near": 12}]
SLEEP = 400_000  # cycles before a fetch begins: some tenths of a millisecond, in which a pass gets far
HEADS_OF_128 = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
KEYS_AND_VALUES = {"sparse_budget": 112, "dtype": "bf16", "device": "cuda"}


def late(made: Recorded) -> Recorded:
    """Its fetches begin so late that who does not wait for them finds what was in the slots before."""
    spilling = made.engine._runner._pages.spilling
    assert spilling is not None and spilling.beside is not None
    start = spilling.beside.start

    def begin(layer: int, fetch: Callable[[], None]) -> None:
        def slow() -> None:
            torch.cuda._sleep(SLEEP)
            fetch()

        start(layer, slow)

    spilling.beside.start = begin  # type: ignore[method-assign]
    return made


def check_recorded(made: Recorded) -> None:
    graphs = made.engine._runner._forward.__self__
    assert any(shape[2] for shape in graphs._recordings), f"none was recorded: {graphs._refused=} {graphs._met=}"
    assert made.engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0, made.engine.kernels
    assert not made.engine._runner._pages.spilling.beside.any_coming


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("how", FORMATS, ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize(("hot_rows", "beside"), [(PAGE, BESIDE[0]), *((4 * PAGE, each) for each in BESIDE)])
def test_rows_that_come_late_change_no_bit(family: str, how: dict[str, Any], hot_rows: int, beside: dict[str, Any]) -> None:
    one = recorded(family, device="cuda", **how)
    other = late(spilled(family, hot_rows=hot_rows, device="cuda", **beside, **how))
    then, now = (made.play_all(prompts((150, 97, 200, 64)), answer=60) for made in (one, other))
    check_same(now, then)
    if how["dtype"] != "fp32":
        check_recorded(other)
    one.close()
    other.close()


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("how", FORMATS[1:], ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("beside", BESIDE, ids=lambda beside: "-".join(beside))
def test_flashinfer_sees_the_same_in_rows_that_come_late(family: str, how: dict[str, Any], beside: dict[str, Any]) -> None:
    """Gathered behind those that were there."""
    pytest.importorskip("flashinfer")
    model, settings = wide(family, ALWAYS), {**ROOM, **how, "device": "cuda"}
    one = recorded(model, hot_rows=PAGE, **settings)
    other = late(spilled(model, hot_rows=PAGE, **beside, **settings))
    check_same(mixed(other), mixed(one))
    check_real(other, hot_rows=PAGE)
    check_recorded(other)
    one.close()
    other.close()


@pytest.mark.parametrize("family", SPARSE)
def test_near_rows_are_found_and_counted(family: str) -> None:
    made = spilled(family, hot_rows=4 * PAGE, prefetch_near=16, device="cuda", dtype="bf16")
    made.play(prompts((256,))[0], answer=40)
    for _ in range(2):
        torch.cuda.synchronize()
        found = report(made)
    assert found.near > found.near_used > 0, found
    assert made.engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0, made.engine.kernels
    made.close()


@pytest.mark.parametrize("family", SPARSE)
def test_by_age_and_by_score_the_bits_are_the_same(family: str) -> None:
    settings = {"hot_rows": 2 * PAGE, "device": "cuda", "dtype": "bf16", "kv_dtype": "fp8"}
    made = [spilled(family, replace_hot=how, **settings) for how in ("age", "score")]
    first, second = (each.play_all(prompts((150, 97, 200, 64)), answer=40) for each in made)
    check_same(second, first)
    for each in made:
        assert each.engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0, each.engine.kernels
        each.close()


# ---- keys and values in heads as wide as those of real models, which FlashInfer takes ---------------------


@cache
def heads_of_128() -> Checkpoint:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL | HEADS_OF_128))
    draw(model)
    return checkpoint_of("llama-heads-of-128", model.float())


def picking(selector: str, *, hot_rows: int | None, **more: Any) -> Recorded:
    settings = {"memory": "64MiB", "host_memory": "64MiB", "sparse": selector, **KEYS_AND_VALUES, **more}
    made = recorded(heads_of_128(), **settings) if hot_rows is None else spilled(heads_of_128(), hot_rows=hot_rows, **settings)
    assert made.engine.kernels["picked rows"] == "flashinfer", made.engine.kernels
    return made


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize(("hot_rows", "near"), [(0, 0), (2 * PAGE, 0), (12 * PAGE, 0), (12 * PAGE, 24)])
@pytest.mark.parametrize("fetch_beside", [False, True])
def test_answers_see_the_same_keys_and_values_wherever_they_are(
    selector: str, hot_rows: int, fetch_beside: bool, near: int
) -> None:
    """One request at a time, whose prompts are long: then the same kernels run over the same rows."""
    pytest.importorskip("flashinfer")
    one = picking(selector, hot_rows=None)
    other = picking(selector, hot_rows=hot_rows, fetch_beside=fetch_beside, prefetch_near=near)
    other = late(other) if fetch_beside or near else other
    for prompt in prompts((500, 333, 160)):
        check_same([other.play(prompt, answer=40)], [one.play(prompt, answer=40)])
    check_real(other, hot_rows=hot_rows)
    if fetch_beside or near:
        check_recorded(other)
    one.close()
    other.close()


@pytest.mark.parametrize("selector", SELECTORS)
def test_answers_beside_others_are_as_near_as_rounding_is(selector: str) -> None:
    """Several prompts in one pass are attended to one by one where some rows are on the host: last bits may differ."""
    pytest.importorskip("flashinfer")
    one, other = picking(selector, hot_rows=None), late(picking(selector, hot_rows=12 * PAGE, fetch_beside=True))
    then, now = (made.play_all(prompts((500, 333, 260, 410)), answer=1) for made in (one, other))
    assert max(distance(a, b) for a, b in zip(now, then, strict=True)) < 0.2
    one.close()
    other.close()
