"""Which kernels run, and what happens when one of them does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from subprocess import CalledProcessError

import pytest
import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.ops.drawing import pick
from stepwell.engine.ops.guarded import Guarded, NoKernel, Report, by_library
from stepwell.engine.ops.kernels import check_kernels, choose_kernels


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


def test_errors_of_our_own_fail_the_pass_and_leave_the_kernel_in_use() -> None:
    """A fallback would hide a bug behind slow answers, for as long as the process lives."""
    report = Report(chosen={"rows": "triton"})
    calls: tuple[tuple[type[Exception], Callable[[], object]], ...] = (
        (AssertionError, lambda: pick(torch.zeros(2, 3), [None])),
        (TypeError, lambda: pick(torch.zeros(2, 3), None)),  # type: ignore[arg-type]
        (ConfigError, lambda: check_kernels("fast", "cpu", torch.float32)),
    )
    for kind, call in calls:
        with pytest.raises(kind):
            Guarded("rows", call, lambda: "plainly", report)()
    assert not report.failed and report.lines() == {"rows": "triton"}


def test_what_a_library_raises_while_it_builds_leads_to_the_fallback() -> None:
    def builds(error: Exception) -> None:  # raised here, outside of this package
        raise error

    errors = (
        CalledProcessError(1, "nvcc"),
        FileNotFoundError("no C compiler"),
        ImportError("libcuda"),
        ValueError("head_dim 80"),
    )
    for error in errors:
        report = Report(chosen={"gates": "triton"})
        assert Guarded("gates", partial(builds, error), lambda: "plainly", report)() == "plainly"
        assert type(error).__name__ in report.lines()["gates"]


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
