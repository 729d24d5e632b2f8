"""A small run of `make bench-checkpoints`: exact checkpoints move no logits, eight bits move them, and planes come back whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from checkpoints.logits import answers_of, moved, prompts_of  # noqa: E402
from checkpoints.packing import packed, states_of  # noqa: E402

MODEL = "random-hybrid"


def test_exact_checkpoints_move_nothing_and_eight_bits_something() -> None:
    prompts = prompts_of(MODEL, beginning=128, rest=2, count=2)
    sizes, answers = {}, {}
    for dtype in (None, "int8"):
        sizes[dtype], answers[dtype] = answers_of(MODEL, dtype, prompts, 3)
    again = answers_of(MODEL, None, prompts, 3)[1]
    assert all(each.resumed == 128 for found in answers.values() for each in found)
    same, off = moved(answers[None], again), moved(answers[None], answers["int8"])
    assert (same.rms, same.worst, same.same_choice) == (0, 0, 1)
    assert 0 < off.rms < 0.5 and off.compared >= 2
    assert sizes["int8"] < 0.3 * sizes[None]


def test_states_are_those_of_the_prompt_and_packing_loses_nothing() -> None:
    states = states_of(MODEL, prompts_of(MODEL, beginning=320, rest=0, count=1)[1])
    assert states.keys() == {"swa"} and states["swa"].abs().amax(-1).min() > 0, "rows that nobody wrote are no state"
    found = next(iter(packed("swa", states["swa"], torch.bfloat16)))
    assert 1 < found.ratio < 2 and found.pack_mb_s > 0 and found.unpack_mb_s > 0
