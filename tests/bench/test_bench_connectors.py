"""The rows of `make bench-connectors`: what is left out, what is compared, and what happens when a peer fails."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "connectors")]

from engine_lives import settled, size_of  # noqa: E402

import bench_connectors as bench  # noqa: E402
from stepwell.store.registry import open_store  # noqa: E402
from stepwell.testing.store_contract import offer, space  # noqa: E402

LIFE = """
import json, sys
order = json.loads(sys.argv[1])
if order["cache"] == "peer" and {peer_fails}:
    sys.exit("no GPU here")
found = {{"seconds": [2.0, 1.0], "cpu_s": [4.0, 3.0], "cached": [0, 0], "bytes": 1 << 20}}
found["answers"] = [[[7], -1.0], [[8], {second}]]
print("a warning", file=sys.stderr)
print(json.dumps(found))
"""


@pytest.fixture
def engine(tmp_path: Path) -> bench.Engine:
    """An engine that is installed: this interpreter, with a program that only reports."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    made = bench.ENGINES["vllm"]
    return made._replace(venv=str(tmp_path), script=str(tmp_path / "life.py"), families=("llama",))


def write(engine: bench.Engine, *, peer_fails: bool = False, second: str = "-1.0") -> None:
    Path(engine.script).write_text(LIFE.format(peer_fails=peer_fails, second=second))


def shown(engine: bench.Engine, row: dict[str, Any]) -> str:
    console = Console(width=200, record=True)
    console.print(bench.table(engine, row))
    return console.export_text()


def test_a_row_has_the_best_of_every_life(engine: bench.Engine) -> None:
    write(engine)
    row = bench.row(engine, "llama", 8192)
    assert row["alone"]["seconds"] == [2.0, 1.0]
    assert row["saving"].keys() == row["resumed"].keys() == engine.caches.keys()
    for name in engine.caches.values():
        (line,) = [line for line in shown(engine, row).splitlines() if name in line]
        assert "1.00" in line and "3.00" in line and "the same" in line


def test_a_peer_that_does_not_run_is_a_row_all_the_same(engine: bench.Engine) -> None:
    write(engine, peer_fails=True)
    row = bench.row(engine, "llama", 8192)
    assert "no GPU here" in row["saving"]["peer"]["error"] and "does not run" in shown(engine, row)


def test_answers_that_differ_are_said_to(engine: bench.Engine) -> None:
    write(engine, second='-1.0 if order["cache"] == "none" else -1.1')
    said = shown(engine, bench.row(engine, "llama", 8192))
    assert said.count("OTHERS") == 2 and "the same" not in said


def test_an_engine_that_is_not_installed_is_left_out_and_named(engine: bench.Engine, capsys: Any) -> None:
    missing = engine._replace(venv=f"{engine.venv}/none")
    assert bench.measure(missing, Console(width=200), ["llama"], [64]) == []
    assert engine.install in capsys.readouterr().out


def test_bytes_are_those_of_values_once_nothing_is_written_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr("engine_lives.time", clock)
    files, here = iter(range(3)), space("here")

    def work() -> None:
        for number in files:
            (tmp_path / "files").mkdir(exist_ok=True)
            (tmp_path / "files" / str(number)).write_bytes(bytes(1000))
            return

    assert settled(tmp_path, work) == 3000
    store = open_store(f"log:{tmp_path}/log", options={"budget": "64MiB"})
    store.write_from(here, [offer(here, "a", 5000)])
    store.close()
    assert size_of(tmp_path / "log") == 5000
