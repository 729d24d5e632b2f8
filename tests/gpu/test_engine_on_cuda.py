"""The engine on a GPU: the same answers as on the CPU, and the same bits from every tier."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.families import FAMILIES  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from parity.recorded import Played, Recorded, distance, same_bits, script, store_at  # noqa: E402
from stepwell.base.config import PrefetchPolicy, StoreConfig  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def resident(family: str) -> list[Played]:
    recorded = Recorded(family, device="cuda", dtype="fp32")
    played = script(recorded, seed=5)
    recorded.close()
    return played


def test_the_gpu_answers_as_the_cpu_does(family: str, resident: list[Played]) -> None:
    recorded = Recorded(family)
    for then in resident:
        now = recorded.play(then.prompt, use_cache=False)
        assert now.tokens == then.tokens
        assert max(float((a - b.cpu()).abs().max()) for a, b in zip(now.logits, then.logits, strict=True)) < 1e-3
    recorded.close()


@pytest.mark.parametrize("tier", ["host", "store"])
def test_every_tier_gives_the_bits_of_the_device(family: str, tier: str, resident: list[Played], tmp_path: Path) -> None:
    store = {**store_at(tmp_path / "log"), "store_config": WAIT} if tier == "store" else {}
    recorded = Recorded(family, device="cuda", dtype="fp32", **store)
    for then in resident:
        recorded.evict_to_host() if tier == "host" else recorded.forget_memory()
        now = recorded.play(then.prompt)
        assert (now.resumed, now.chunks) == (then.resumed, then.chunks)
        assert same_bits(now, then), f"differs by {distance(now, then)}"
    recorded.close()


def test_sixteen_bits_run_and_resume(family: str) -> None:
    recorded = Recorded(family, device="cuda", dtype="bf16")
    played = script(recorded, seed=7)
    recorded.evict_to_host()
    again = recorded.play(played[-1].prompt)
    assert again.resumed >= played[-1].resumed and all(torch.isfinite(row).all() for row in again.logits)
    recorded.close()
