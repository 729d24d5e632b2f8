"""What `make bench-guided` says where a library is missing: its name, and what installs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench_guided


def test_a_library_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_guided.py"])
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(bench_guided, "LIBRARIES", ("json", "xgrammar"))
    with pytest.raises(SystemExit, match=r"^not installed: xgrammar; .*pip install .*xgrammar$"):
        bench_guided.main()


def test_help_needs_neither_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_guided.py", "--help"])
    for name in bench_guided.LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        bench_guided.main()
    assert ended.value.code == 0 and "guided decoding" in capsys.readouterr().out
