"""Numbers that a pass brings to the device: all of them, as they were, however large."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from stepwell.engine.passes import numbers  # noqa: E402
from stepwell.engine.passes.numbers import SMALL_BYTES, on_device, put  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = SMALL_BYTES // 8
SIZES = (0, 1, SMALL, SMALL + 1, 3 * SMALL + 5)


@pytest.mark.parametrize("size", SIZES)
def test_numbers_arrive_as_they_were(size: int) -> None:
    values = np.arange(size, dtype=np.int64) * 3
    assert on_device(values, DEVICE).tolist() == values.tolist()
    target = torch.full((size,), -1, dtype=torch.int64, device=DEVICE)
    put(target, values)
    assert target.tolist() == values.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_larger_ones_go_by_the_given_copy(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    sent: list[int] = []
    values, target = torch.arange(size), torch.full((size,), -1)
    numbers._send(target, values, lambda target, pinned: (sent.append(len(pinned)), target.copy_(pinned)))
    assert torch.equal(target, values) and sent == ([size] if size > SMALL else [])


def test_choosing_kernels_changes_nothing_for_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in one process: each sends by its own kernel, and the first one's report gets no failures of the second's."""
    pytest.importorskip("triton")
    from stepwell.engine.ops import kernels

    before = dict(vars(numbers))
    monkeypatch.setattr(kernels, "_has_flashinfer", lambda: False)
    one, other = (kernels.choose_kernels("auto", "cuda", torch.bfloat16) for _ in range(2))
    assert dict(vars(numbers)) == before
    assert one.send is not other.send and one.send is not numbers.copy
    made = numbers.on_device(np.arange(3 * SMALL), "cpu", other.send)
    assert len(made) == 3 * SMALL and not one.report.failed and not other.report.failed


def test_shapes_kinds_and_lists_stay() -> None:
    for values in (np.ones((5, 7), np.float64), np.zeros((3, 2), np.bool_), np.arange(12, dtype=np.int32).reshape(3, 4).T):
        made = on_device(values, DEVICE)
        assert made.shape == values.shape and np.array_equal(made.cpu().numpy(), values)
    assert on_device([4, 2], DEVICE).tolist() == [4, 2]
