"""Families with heads as wide as those of real models, so that the kernels of libraries run them: near the reference, also when
steps are recorded, and the same bits from the host and the store.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.families import WIDE, wide_checkpoint  # noqa: E402
from engine.side_by_side import PAGE, logits_on_cuda  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from parity.recorded import Recorded, distance, same_bits, script, store_at  # noqa: E402
from stepwell.base.config import PrefetchPolicy, StoreConfig  # noqa: E402
from stepwell.engine.models.base import Decoder  # noqa: E402
from stepwell.engine.models.registry import build_model  # noqa: E402
from stepwell.engine.ops.kernels import Report  # noqa: E402
from stepwell.engine.running.graphs import Graphs  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.filterwarnings("ignore:::fla"),  # a warning of the library would count as its failure
]
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)


@pytest.fixture(autouse=True)
def flashinfer() -> None:
    pytest.importorskip("flashinfer")


def check_libraries(report: Report) -> None:
    """Nothing failed, and FlashInfer left nothing to plain torch."""
    assert not report.failed and not report.left, report.lines()
    assert report.chosen["attention"] == report.chosen["latents"] == "flashinfer", report.lines()


@pytest.mark.parametrize("family", WIDE)
def test_libraries_are_as_near_as_plain_torch_in_sixteen_bits(family: str) -> None:
    """Most rows agree: an expert that is chosen by a hair moves a few far away, whatever runs it, and what follows in a short
    context too; where corrections take part in the choice, they are so large that nothing else has a say.
    """
    made = wide_checkpoint(family, corrections=20.0)

    def built(dtype: str, kernels: str) -> Decoder:
        return build_model(made.config, made.source, dtype=dtype, device="cuda", page_tokens=PAGE, kernels=kernels)

    exact, plain, fast = built("fp32", "torch"), built("bf16", "torch"), built("bf16", "auto")
    expected, graphs = logits_on_cuda(exact, exact), Graphs(fast)
    rows = [logits_on_cuda(plain, plain), logits_on_cuda(fast, fast), logits_on_cuda(fast, graphs)]
    assert fast.graph_windows and graphs._recordings and not graphs._refused
    check_libraries(fast.kernels.report)
    errors = [float(((each - expected).norm(dim=1) / expected.norm(dim=1)).median()) for each in rows]
    assert max(errors[1:]) < 1.5 * errors[0] + 0.005, errors


@pytest.mark.parametrize("tier", ["host", "store"])
@pytest.mark.parametrize("family", WIDE)
def test_every_tier_gives_the_bits_of_the_device_with_kernels_of_libraries(family: str, tier: str, tmp_path: Path) -> None:
    settings = {"device": "cuda", "dtype": "bf16", "device_memory": "8MiB", "host_memory": "32MiB"}
    resident = Recorded(wide_checkpoint(family), **settings)
    expected = script(resident, seed=5)
    resident.close()
    store = {**store_at(tmp_path / "log"), "store_config": WAIT} if tier == "store" else {}
    restored = Recorded(wide_checkpoint(family), **settings, **store)
    for then in expected:
        restored.evict_to_host() if tier == "host" else restored.forget_memory()
        now = restored.play(then.prompt)
        assert (now.resumed, now.chunks) == (then.resumed, then.chunks)
        assert same_bits(now, then), f"differs by {distance(now, then)}"
    check_libraries(restored.engine._runner.model.kernels.report)
    restored.close()
