"""Checkpoints in eight bits on the host and in stores: how far logits move, what is still exact, how many bytes it saves.

What never left the device is exact whatever the format below. Errors are compared where passes cut the prompt alike, up to the
first token that differs: behind it another text is computed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.families import FAMILIES as EVERY_FAMILY
from parity.recorded import PAGE, Played, Recorded, replay, same_bits, script, store_at
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.ids import Kind, Tier
from stepwell.store.log.store import LogStore
from stepwell.transfer.copy_engine import PageMemory
from stepwell.transfer.narrow_rows import NotFinite, RowCode

pytest.importorskip("transformers")

log = logging.getLogger(__name__)

WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
FAMILIES = ("qwen3_next", "qwen3_5", "gemma3")
EXACT_ONLY = ("llama", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")  # that have no checkpoints
FORMATS = ("int8", "fp8")
# What logits may be off by, against their standard deviation: root mean square, and most. Two to four times what was measured.
# Random experts amplify: one that is chosen otherwise moves logits by as much as their spread.
MOST = {
    ("qwen3_next", "int8"): (0.25, 4.0), ("qwen3_next", "fp8"): (0.3, 4.0),
    ("qwen3_5", "int8"): (0.04, 0.3), ("qwen3_5", "fp8"): (0.15, 1.2),
    ("gemma3", "int8"): (0.01, 0.1), ("gemma3", "fp8"): (0.04, 0.3),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def resident(family: str) -> list[Played]:
    """What the device alone remembers, exactly."""
    recorded = Recorded(family)
    played = script(recorded, seed=5)
    recorded.close()
    assert any(each.resumed for each in played)
    return played


def evict(recorded: Recorded) -> Recorded:
    recorded.evict_to_host()
    return recorded


def forget(recorded: Recorded) -> Recorded:
    recorded.forget_memory()
    return recorded


def stay(recorded: Recorded) -> Recorded:
    return recorded


def errors(again: list[Played], exact: list[Played]) -> tuple[float, float]:
    """The root mean square and the largest of what logits differ by, against their spread, over all that is comparable."""
    squares, count, worst, spread = 0.0, 0, 0.0, 0.0
    for now, then in zip(again, exact, strict=True):
        assert (now.resumed, now.chunks) == (then.resumed, then.chunks)
        alike = next((at for at, (a, b) in enumerate(zip(now.tokens, then.tokens, strict=True)) if a != b), len(now.tokens) - 1)
        for a, b in zip(now.logits[: alike + 1], then.logits[: alike + 1], strict=True):
            error = (a - b).double()
            squares += float(error.square().sum())
            count += error.numel()
            worst = max(worst, float(error.abs().max()))
            spread += float(b.double().var(correction=0)) * b.numel()
    scale = (spread / count) ** 0.5
    return (squares / count) ** 0.5 / scale, worst / scale


@pytest.mark.parametrize("dtype", FORMATS)
def test_from_the_host_and_from_the_store_after_a_restart(
    family: str, dtype: str, resident: list[Played], tmp_path: Path
) -> None:  # fmt: skip
    settings = {**store_at(tmp_path / "log"), "store_config": WAIT}

    def restart(recorded: Recorded) -> Recorded:
        recorded.close()
        return Recorded(family, checkpoint_dtype=dtype, **settings)

    from_host = replay(Recorded(family, checkpoint_dtype=dtype), resident, evict)
    restarted = replay(Recorded(family, checkpoint_dtype=dtype, **settings), resident, restart)
    assert sum(each.host for each in from_host) > 0
    assert sum(each.stored for each in restarted) == sum(each.resumed for each in restarted) > 0
    for label, again in (("host", from_host), ("store", restarted)):
        rms, worst = errors(again, resident)
        log.info("%s, %s from the %s: logits off by %.4f of their spread (rms), %.4f at most", family, dtype, label, rms, worst)
        most_rms, most = MOST[family, dtype]
        assert 0 < rms <= most_rms and worst <= most, f"{label}: {rms} and {worst}"
    assert all(map(same_bits, from_host, restarted)), "host and store hold the same bytes"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # said once by CPUs that have no bf16
@pytest.mark.parametrize("windowed", ["qwen3_5", "gemma3"])
def test_state_of_sixteen_bits(windowed: str) -> None:
    """As on a GPU: windows and convolutions in bf16, recurrences in fp32."""
    recorded = Recorded(windowed, dtype="bf16")
    exact = script(recorded, seed=5)
    recorded.close()
    narrow = Recorded(windowed, dtype="bf16", checkpoint_dtype="int8")
    spec = narrow.engine.cache.spec
    assert spec.checkpoint_bytes() < 0.56 * spec.with_checkpoint_dtype(None).checkpoint_bytes()
    rms, worst = errors(replay(narrow, exact, evict), exact)
    log.info("%s in bf16, int8 from the host: logits off by %.4f of their spread (rms), %.4f at most", windowed, rms, worst)
    assert 0 < rms <= 0.1 and worst <= 1.0, f"{rms} and {worst}"


def test_on_the_device_nothing_is_lost(family: str, resident: list[Played]) -> None:
    again = replay(Recorded(family, checkpoint_dtype="int8"), resident, stay)
    assert all(map(same_bits, again, resident))


def test_a_second_way_down_and_up_changes_nothing(family: str, resident: list[Played]) -> None:
    """What was restored and is saved again is the same bytes: the second resumption has the same bits as the first."""
    recorded = Recorded(family, checkpoint_dtype="int8")
    prompt = max((each.prompt for each in resident), key=len)
    recorded.play(prompt)
    recorded.evict_to_host()
    first = recorded.play(prompt)
    recorded.evict_to_host()
    second = recorded.play(prompt)
    recorded.close()
    assert first.resumed == second.resumed > 0 and same_bits(first, second)


def test_state_that_is_not_finite_is_not_saved_and_answers_stay_right(
    family: str, resident: list[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has it. Once it has left there is no checkpoint, and the prompt is computed anew: a miss, not other numbers."""

    def refuse(*_: object) -> None:
        raise NotFinite("on purpose")

    monkeypatch.setattr(RowCode, "encode", refuse)
    recorded = Recorded(family, checkpoint_dtype="int8")
    prompt = max((each.prompt for each in resident), key=len)
    first = recorded.play(prompt)
    assert recorded.play(prompt).resumed > 0
    recorded.evict_to_host()
    assert recorded.engine.cache.stats().counters["save_failures"] > 0
    again = recorded.play(prompt)
    recorded.close()
    assert again.resumed == 0 and same_bits(again, first)


@pytest.mark.parametrize("page_tokens", [1, PAGE])
@pytest.mark.parametrize("every", [each for each in EVERY_FAMILY if each not in EXACT_ONLY])
def test_what_was_in_memory_before_keeps_no_checkpoint_from_being_saved(
    every: str, page_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of an unwritten page may be no numbers: no such state is turned into eight bits."""
    make = PageMemory.__init__

    def make_full(self: PageMemory, *args: Any, **more: Any) -> None:
        make(self, *args, **more)
        np.frombuffer(self.block, np.uint8)[:] = 0xFF  # NaN in every format

    monkeypatch.setattr(PageMemory, "__init__", make_full)
    recorded = Recorded(every, checkpoint_dtype="int8", page_tokens=page_tokens, device_memory="4MiB", host_memory="32MiB")
    for length in (3, PAGE + 2):  # the first ends before a compressor has closed a group
        prompt = [token * 7 % recorded.engine.vocab_size for token in range(length)]
        recorded.play(prompt, answer=2)
        recorded.evict_to_host()
        assert recorded.play(prompt, answer=2).resumed == (length - 1) // page_tokens * page_tokens
        recorded.evict_to_host()
    assert not recorded.engine.cache.stats().counters.get("save_failures")
    recorded.close()


def test_what_compressors_keep_is_exact_in_every_format_of_the_model() -> None:
    for dtype in ("fp32", "bf16"):
        recorded = Recorded("deepseek_v4", dtype=dtype, checkpoint_dtype="int8")
        spec = recorded.engine.cache.spec
        recorded.close()
        assert spec.narrow is not None and [each.name for each in spec.states if spec.narrow.takes(each)] == ["swa"]


def test_a_store_of_one_format_is_a_miss_for_every_other(resident: list[Played], family: str, tmp_path: Path) -> None:
    settings = {**store_at(tmp_path / "log"), "store_config": WAIT}
    longest = max(resident, key=lambda each: len(each.prompt))
    cold = Recorded(family)
    fresh = cold.play(longest.prompt)
    cold.close()
    for dtype in ("int8", None, "fp8"):
        first = Recorded(family, checkpoint_dtype=dtype, **settings)
        found = first.play(longest.prompt)
        first.close()
        assert (found.resumed, found.stored) == (0, 0), f"{dtype} used what was written in another format"
        assert same_bits(found, fresh)
    for dtype in ("fp8", "int8", None):
        again = Recorded(family, checkpoint_dtype=dtype, **settings)
        found = again.play(longest.prompt)
        again.close()
        assert found.stored == found.resumed > 0, f"{dtype} did not find its own again"


def test_checkpoints_have_a_quarter_of_the_bytes(family: str, resident: list[Played], tmp_path: Path) -> None:
    """A quarter of fp32, on the host and in the store; the device's pages stay as they are."""
    sizes, written = {}, {}
    for dtype in (None, "int8"):
        recorded = Recorded(family, checkpoint_dtype=dtype, **store_at(tmp_path / str(dtype)), store_config=WAIT)
        spec = recorded.engine.cache.spec
        for each in resident:
            recorded.play(each.prompt)
        recorded.settle()
        sizes[dtype] = {tier: [spec.device_bytes(kind) if tier is Tier.DEVICE else spec.object_bytes(kind) for kind in Kind]
                        for tier in (Tier.DEVICE, Tier.HOST)}  # fmt: skip
        store = recorded.engine.stores[0]
        assert isinstance(store, LogStore)
        written[dtype] = (spec.checkpoint_bytes(), store.stat().value_bytes)
        recorded.close()
    assert sizes[None][Tier.DEVICE] == sizes["int8"][Tier.DEVICE] == sizes[None][Tier.HOST]
    assert sizes[None][Tier.HOST][Kind.PREFIX] == sizes["int8"][Tier.HOST][Kind.PREFIX]
    (exact_bytes, exact_log), (narrow_bytes, narrow_log) = written[None], written["int8"]
    assert narrow_bytes / exact_bytes <= 0.30, "small rows have large scales: 0.266 where rows are whole groups of fp32"
    assert narrow_log < exact_log, f"the store has {narrow_log} bytes of values, exactly {exact_log}"
    log.info("%s: %d bytes a checkpoint, %d in int8; the log %d and %d", family, exact_bytes, narrow_bytes, exact_log, narrow_log)
