"""Kernels of a test's own in place of those that engines choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepwell.engine.building import build
from stepwell.engine.models import registry
from stepwell.engine.ops.kernels import Kernels


def use_kernels(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Kernels]) -> None:
    """Every model that is built from now on gets what `make` returns."""
    for module in (build, registry):
        monkeypatch.setattr(module, "choose_kernels", lambda *args, **more: make())
