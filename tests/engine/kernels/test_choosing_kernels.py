"""Which kernels run, and what happens when one of them does not."""

from __future__ import annotations

import logging

import pytest
import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.ops.guarded import Guarded, NoKernel, Report, by_library
from stepwell.engine.ops.kernels import choose_kernels


def test_a_cpu_runs_plain_torch_and_says_so() -> None:
    chosen = choose_kernels("auto", "cpu", torch.float32)
    assert set(chosen.report.lines().values()) == {"torch"}


def test_what_was_asked_for_and_cannot_be_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="need CUDA"):
        choose_kernels("flashinfer", "cpu", torch.float32)
    with pytest.raises(ConfigError, match="auto, torch, flashinfer"):
        choose_kernels("fast", "cpu", torch.float32)


def test_a_kernel_that_fails_is_warned_of_once_and_never_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    tries, report = [], Report(chosen={"gates": "triton"})

    def broken(x: int) -> int:
        tries.append(x)
        raise RuntimeError("no such instruction\non this machine")

    guarded = Guarded("gates", broken, lambda x: x + 1, report)
    with caplog.at_level(logging.WARNING):
        assert [guarded(1), guarded(2), guarded(3)] == [2, 3, 4]
    assert tries == [1] and len(caplog.records) == 1
    assert report.lines() == {"gates": "torch (triton failed: RuntimeError: no such instruction)"}


def test_a_lack_of_memory_is_not_a_broken_kernel() -> None:
    def full(x: int) -> int:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    report = Report(chosen={"gates": "triton"})
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Guarded("gates", full, lambda x: x, report)(1)
    assert not report.failed


def test_what_a_library_has_no_kernel_for_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def lacking(what: str) -> str:
        raise NoKernel(what)

    report = Report(chosen={"attention": "flashinfer", "index": "triton"})
    with caplog.at_level(logging.WARNING):
        for what in ("heads of 80 channels", "heads of 80 channels", "rows in float32"):
            assert Guarded("attention", lacking, lambda what: f"{what}, plainly", report)(what) == f"{what}, plainly"
    assert len(caplog.records) == 2 and not report.failed
    assert report.lines() == {"attention": "flashinfer (torch for heads of 80 channels, rows in float32)", "index": "triton"}


def test_what_runs_is_told_in_short() -> None:
    assert by_library({"attention": "torch", "index": "torch"}) == "torch"
    assert (
        by_library({"attention": "flashinfer", "index": "triton", "rows": "triton"})
        == "flashinfer: attention; triton: index, rows"
    )
