"""Which kernels run, and what happens when one of them does not."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.paged import Scene, Shape
from stepwell.base.errors import ConfigError
from stepwell.engine.ops.attention import attend
from stepwell.engine.ops.kernels import Guarded, Left, Report, by_library, choose_kernels


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


def test_what_a_library_does_not_take_is_said_once_and_runs_in_plain_torch(caplog: pytest.LogCaptureFixture) -> None:
    report = Report(chosen={"attention": "flashinfer", "index": "triton"})
    scene = Scene(Shape(heads=4, kv_heads=2, width=16, page=16, contexts=(3, 20), lengths=(1, 1)))
    scene.clear_unwritten()
    query_NHD, behind = scene.made(2, 4, 16), Left("attention", attend, report)
    with caplog.at_level(logging.WARNING):
        made = [behind(query_NHD, scene.rows, scene.paging, heads=2, key_dim=16, scale=0.25) for _ in range(2)]
    wanted = attend(query_NHD, scene.rows, scene.paging, heads=2, key_dim=16, scale=0.25)
    assert torch.equal(made[0], wanted) and torch.equal(made[1], wanted) and len(caplog.records) == 1
    assert report.lines() == {"attention": "flashinfer (torch for heads of 16 channels)", "index": "triton"}


def test_what_runs_is_told_in_short() -> None:
    assert by_library({"attention": "torch", "index": "torch"}) == "torch"
    assert (
        by_library({"attention": "flashinfer", "index": "triton", "rows": "triton"})
        == "flashinfer: attention; triton: index, rows"
    )
