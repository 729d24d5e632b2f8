"""Passes that begin while their pages are copied to a GPU: the bits are those of resuming from the device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from not_run import NO_CUDA  # noqa: E402
from parity.recorded import Played, Recorded, distance, same_bits, script  # noqa: E402
from stepwell.base.config import PrefetchPolicy, StoreConfig  # noqa: E402
from stepwell.base.ids import Tier  # noqa: E402
from stepwell.policy.store_use import StoreTuning  # noqa: E402
from stepwell.store.memory import MemoryStore  # noqa: E402
from stepwell.transfer import layer_events  # noqa: E402
from stepwell.transfer.layer_events import LayerEvents  # noqa: E402
from stepwell.transfer.page_copier import PageCopier, Routed, StagedIds  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]

FAMILIES = ("llama", "gemma3", "qwen3_next", "mamba2", "deepseek_v4")  # all tokens, windows, two recurrences, groups
SLOW = 2_000_000  # cycles before each piece of a copy: about a millisecond, so that a pass gets ahead of its loads
WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
NO_NUMBER = 0xFF  # in every byte of memory that nothing was loaded to


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Copies are slow and in as many steps as there are layers; of every wait for a layer, whether it had arrived."""
    monkeypatch.setattr(layer_events, "STEP_BYTES", 1)
    queue, wait = PageCopier.queue, LayerEvents.wait
    seen: list[bool] = []

    def slowly(
        copier: PageCopier, routed: Routed, staged: StagedIds | None = None, stream: torch.cuda.Stream | None = None
    ) -> None:  # fmt: skip
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLOW)
        queue(copier, routed, staged, stream)

    def noted(events: LayerEvents, state: str, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        seen.append(events.arrived(state, layer))
        wait(events, state, layer, stream)

    monkeypatch.setattr(PageCopier, "queue", slowly)
    monkeypatch.setattr(LayerEvents, "wait", noted)
    return seen


def recording(family: str, **settings: object) -> Recorded:
    recorded = Recorded(family, device="cuda", **{"layerwise": True, **settings})
    recorded.engine.passing.reads_later = False  # tokens are read at once, so that every row of logits is noted
    return recorded


def poison_device(recorded: Recorded) -> None:
    """What is read before it was loaded is seen in the answer."""
    recorded.evict_to_host()
    recorded.engine.cache._state.copies._executor._ranks[0]._memories[Tier.DEVICE].bytes_B.fill_(NO_NUMBER)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_ahead_of_its_loads_has_the_bits_of_the_device(family: str, kernels: str, waits: list[bool]) -> None:
    dtype = "fp32" if kernels == "torch" else "bf16"
    engine = recording(family, dtype=dtype, kernels=kernels)
    resident: list[Played] = script(engine, seed=5)
    engine.close()
    recorded = recording(family, dtype=dtype, kernels=kernels)
    waits.clear()
    for then in resident:
        poison_device(recorded)
        now = recorded.play(then.prompt)
        assert (now.resumed, now.chunks) == (then.resumed, then.chunks)
        assert same_bits(now, then), f"differs by {distance(now, then)}"
    assert waits.count(False) > 0, "no pass was ahead of its load"
    recorded.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_pages_that_go_on_to_the_device_while_others_are_read_have_its_bits(family: str, waits: list[bool]) -> None:
    engine = recording(family, dtype="fp32")
    resident: list[Played] = script(engine, seed=5)
    engine.close()
    recorded = recording(family, dtype="fp32")
    recorded.engine.cache.store.attach(MemoryStore(), WAIT, tuning=StoreTuning(fetch_chunk_bytes=1))  # a page at a time
    for then in resident:
        recorded.forget_memory()
        poison_device(recorded)
        now = recorded.play(then.prompt)
        assert (now.resumed, now.chunks) == (then.resumed, then.chunks)
        assert same_bits(now, then), f"differs by {distance(now, then)}"
    assert recorded.engine.cache.counters["loaded_ahead_pages"] > 0
    recorded.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_without_layers_the_bits_are_the_same(family: str) -> None:
    answers = []
    for layerwise in (True, False):
        recorded = recording(family, dtype="fp32", layerwise=layerwise)
        played = script(recorded, seed=9)
        recorded.evict_to_host()
        answers.append([*played, recorded.play(played[-1].prompt)])
        recorded.close()
    for one, other in zip(*answers, strict=True):
        assert same_bits(one, other), f"differs by {distance(one, other)}"
