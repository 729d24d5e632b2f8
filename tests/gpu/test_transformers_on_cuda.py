"""The prompt cache for Transformers on a GPU: pinned host memory, the bits that were saved, the logits of the model alone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from connectors.tiny_models import PAGE, generated, opened, prompt, tiny, uncached  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.connectors.transformers import PromptCache  # noqa: E402
from stepwell.store.memory import MemoryStore  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
FAMILIES = ("llama", "qwen3", "gemma3", "falcon_h1", "qwen3_next", "mamba2", "deepseek_v3")
TOLERANCE = 1e-3


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on_cuda(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return deepcopy(tiny(family)).to("cuda", dtype)


def kept(prompts: PromptCache, past: Any) -> list[torch.Tensor]:
    return [each.read(past).clone() for each in prompts._layout.tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_host_and_disk_give_back_the_bits_that_were_saved(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = on_cuda(family, dtype), prompt(1, 150, rows=2).cuda()
    log = {"store": f"log:{tmp_path}", "store_options": {"budget": "64MiB"}}
    with opened(model, **log) as prompts:
        cold = kept(prompts, prompts.prefill(ids).past)
        past, cached = prompts.prefill(ids)
        assert cached == 144 and all(torch.equal(*pair) for pair in zip(cold, kept(prompts, past), strict=True))
        assert all(each.device.type == "cuda" for each in cold)
        assert prompts._prefill._copies._host.bytes_B.is_pinned()
    with opened(model, **log) as prompts:
        past, cached = prompts.prefill(ids)
        assert cached == 144 and all(torch.equal(*pair) for pair in zip(cold, kept(prompts, past), strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "falcon_h1", "mamba2"])
def test_resumed_prompts_have_the_logits_of_the_model_alone(family: str) -> None:
    model, ids = on_cuda(family), prompt(2, 131).cuda()
    with opened(model, self_test=True) as prompts:
        prompts.prefill(ids[:, :81])
        past, cached = prompts.prefill(ids)
        rest = prompts._passes.run(ids[:, 128:], past, keep=3)
    assert cached == 80 and float((rest - uncached(model, ids, 3)).abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_answers_are_those_of_the_model_alone(family: str) -> None:
    model, ids = on_cuda(family), prompt(3, 70, rows=2).cuda()
    with opened(model) as prompts:
        for _ in range(2):
            assert torch.equal(prompts.generate(ids, max_new_tokens=6, do_sample=False), generated(model, ids))


def test_weights_on_a_gpu_and_on_the_cpu_are_not_the_same_model() -> None:
    """Devices round differently: what one has computed is not what the other would have."""
    store, ids = MemoryStore(), prompt(4, 4 * PAGE + 1)
    for model in (tiny("llama"), on_cuda("llama")):
        with opened(model, store=store) as prompts:
            assert prompts.prefill(ids).cached == 0
