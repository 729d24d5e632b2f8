"""`stepwell build-kernels` over modules that are only pretended."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from stepwell.cli.main import main
from stepwell.engine.ops.on_flashinfer import modules


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found = {"attention-fa2-128-bfloat16"}

    def build(name: str) -> None:
        if name == "top-k":
            raise RuntimeError("no compiler")
        found.add(name)

    monkeypatch.setattr(modules, "is_compiled", found.__contains__)
    monkeypatch.setattr(modules, "build", build)
    return found


def test_only_what_is_not_compiled_is(compiled: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build-kernels", "attention-fa2-128-bfloat16", "attention-fa3-128-bfloat16"]) == 0
    assert "1/1  attention-fa3-128-bfloat16: built" in capsys.readouterr().out
    assert main(["build-kernels", *compiled]) == 0
    assert "already" in capsys.readouterr().out


def test_what_fails_is_said_and_the_rest_is_compiled(compiled: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build-kernels"]) == 1
    assert "top-k: FAILED: no compiler" in capsys.readouterr().out
    assert compiled == {*modules.USUAL} - {"top-k"}
