"""What `make test-engines-gpu` unpacks, and what it calls equal. Runs no engine."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_engines_gpu as bench
from engines_gpu.parts import paths_of
from engines_gpu.prompts import prompts, talks


def archive(path: Path, name: str, source: Path) -> None:
    (source / name).mkdir(parents=True, exist_ok=True)
    (source / name / "module.py").write_text(f"NAME = {name!r}")
    with tarfile.open(path, "w:gz") as made:
        made.add(source / name, arcname=name)


def test_parts_are_folders_archives_and_archives_in_pieces(tmp_path: Path) -> None:
    parts, into = tmp_path / "parts", tmp_path / "into"
    (parts / "plain").mkdir(parents=True)
    (parts / "deeper").mkdir()
    archive(parts / "packed.tar.gz", "packed", tmp_path)
    archive(tmp_path / "cut.tar.gz", "cut", tmp_path)
    data = (tmp_path / "cut.tar.gz").read_bytes()
    for number, start in enumerate(range(0, len(data), 50)):
        (parts / "deeper" / f"cut.tar.gz.part_{number:02}").write_bytes(data[start : start + 50])
    found = paths_of(parts, into, ["cut", "plain", "packed"])
    assert found == [into / "cut", parts / "plain", into / "packed"]
    assert "'cut'" in (into / "cut" / "module.py").read_text()
    assert paths_of(parts, into, ["packed"]) == [into / "packed"]
    with pytest.raises(FileNotFoundError, match="has no part other; it has cut, packed"):
        paths_of(parts, into, ["other"])


def fact(round_name: str, answer: list[int], logprobs: list[float], prompt: str = "a") -> dict[str, Any]:
    return {
        "what": "answer", "round": round_name, "prompt": prompt, "answer": answer, "logprobs": logprobs, "tokens": 100,
        "found": 90, "ttft_s": 0.1,
    }  # fmt: skip


def life(label: str, *facts: dict[str, Any]) -> Any:
    plan = bench.Plan(label=label, cache="stepwell", rounds=("host",))
    return bench.Process(plan, None, Path(), list(facts))  # type: ignore[arg-type]


def test_an_answer_passes_within_the_noise_of_the_engine_and_is_exact_if_it_is_the_one_from_its_own_cache() -> None:
    reference = [fact("cold", [1, 2, 3], [-1.0, -2.0, -3.0]), fact("again", [1, 2, 3], [-1.0, -2.0, -3.0])]
    reference.append(fact("device", [1, 2, 3], [-1.0, -2.01, -3.0]))
    (same,) = bench.rows_of(reference, life("a", fact("host", [1, 2, 3], [-1.0, -2.01, -3.0])))
    assert same["passed"] and same["exact"] == same["same_tokens"] == 1 and same["noise"] == pytest.approx(0.01)
    (near,) = bench.rows_of(reference, life("a", fact("host", [1, 2, 4], [-1.0, -2.005, -3.0])))
    assert near["passed"] and near["exact"] == near["same_tokens"] == 0
    (wrong,) = bench.rows_of(reference, life("a", fact("host", [1, 5, 4], [-1.0, -2.5, -3.0])))
    assert not wrong["passed"] and wrong["logprob_difference"] == pytest.approx(0.5)


def test_prompts_are_the_same_in_every_process_and_conversations_share_beginnings() -> None:
    assert prompts([256, 512], 2) == prompts([256, 512], 2) and len(prompts([256, 512], 2)) == 5
    first, second, _ = talks(3, 800)
    assert len(first) == 6 and all(len(each) < 800 for each in first)
    assert all(later[: len(before)] == before for before, later in zip(first[1:], second[1:], strict=True))
    assert second[0][:450] == first[1][:450]
