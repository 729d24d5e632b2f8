"""Kernels that break in the middle of answers: the same tokens as without them, one warning for each, and a count."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from engine.families import checkpoint
from engine.kernels.chosen import use_kernels
from engine.small import DEFAULTS, alone, greedy, prompt, run, small, tokens_of
from parity.recorded import same_bits
from parity.spilling import prompts, recorded, spilled
from stepwell.engine import EngineConfig, build_engine
from stepwell.engine.building import build
from stepwell.engine.ops.guarded import Guarded, Report
from stepwell.engine.ops.kernels import TORCH, Kernels

ALL = {"pick", "to_host"}
DENSE = ALL | {"attend", "write_keys_values", "angles", "add_norm", "gate"}
USED = {
    "llama": DENSE,
    "gpt_oss": (DENSE | {"experts"}) - {"gate"},
    "qwen3_next": ALL | {"attend", "experts", "convolve", "recur", "gated_norm"},
    "mamba2": ALL | {"convolve", "recur", "gated_norm"},
    "deepseek_v3": ALL | {"attend_latent", "write_rows", "experts", "angles"},
    "deepseek_v32": ALL | {"attend_selected", "select", "write_rows", "experts", "angles"},
    "deepseek_v4": ALL | {"attend_shared", "write_rows", "experts"},
}


class Breaks:
    """Computes once as the plain operation does, and raises from then on."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain, self.calls = plain, 0

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("an illegal instruction")
        return self._plain(*args, **more)


def breaking(monkeypatch: pytest.MonkeyPatch) -> Report:
    """Every operation of the next engine breaks at its second call."""
    names = [each.name for each in fields(Kernels) if callable(getattr(TORCH, each.name))]
    report = Report(chosen=dict.fromkeys(names, "a library"))
    made = {name: Guarded(name, Breaks(getattr(TORCH, name)), getattr(TORCH, name), report) for name in names}
    use_kernels(monkeypatch, lambda: Kernels(report=report, **made))
    return report


@pytest.mark.parametrize("family", USED)
def test_answers_are_the_same_when_every_kernel_breaks(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asks = [greedy(prompt(150 + at, seed=at), 8) for at in range(3)]
    expected = alone(family, asks)
    report = breaking(monkeypatch)
    with caplog.at_level(logging.WARNING), small(family) as engine:
        assert [tokens_of(deltas) for deltas in run(engine, asks)] == expected
        assert engine.cache.stats().counters["kernel_fallbacks"] == len(report.failed)
        assert engine.kernels["attend"].startswith("torch (a library failed: ") or "attend" not in USED[family]
    assert report.failed.keys() >= USED[family], USED[family] - report.failed.keys()
    warned = [each.getMessage().split(" by ")[0] for each in caplog.records if "in plain torch from now on" in each.getMessage()]
    assert sorted(warned) == sorted(report.failed), "one warning for each"


def test_kernels_of_a_draft_that_break_are_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [greedy(prompt(60 + at, seed=at), 12) for at in range(2)]
    expected = alone("llama", asks)
    report = breaking(monkeypatch)
    broken = build.choose_kernels
    plain = Kernels(report=Report(chosen=dict.fromkeys(report.chosen, "torch")))
    made = [plain, broken("auto", "cpu", torch.float32)]  # the model's first, then its draft's
    use_kernels(monkeypatch, lambda: made.pop(0))
    with build_engine(checkpoint("llama"), EngineConfig(**DEFAULTS, draft_tokens=3), draft=checkpoint("llama")) as engine:
        played = run(engine, asks)
        assert [tokens_of(deltas) for deltas in played] == expected
        assert sum(deltas[-1].usage.accepted_tokens for deltas in played if deltas[-1].usage is not None) > 0
        assert engine.cache.stats().counters["kernel_fallbacks"] == len(report.failed) >= 5
        assert engine.kernels["draft attend"].startswith("torch (a library failed: ") and engine.kernels["attend"] == "torch"
        assert not plain.report.failed


def test_rows_on_the_host_are_found_when_their_kernels_break(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts((150, 97, 200))
    plain = recorded("deepseek_v32")
    expected = plain.play_all(asked, answer=12)
    plain.close()
    report = breaking(monkeypatch)
    made = spilled("deepseek_v32", hot_rows=32)
    for now, then in zip(made.play_all(asked, answer=12), expected, strict=True):
        assert same_bits(now, then)
    made.close()
    assert report.failed.keys() >= {"resolve", "fetch", "read_spilled"}, report.failed
