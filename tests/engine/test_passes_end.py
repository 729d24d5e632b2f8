"""What a pass made is freed when the pass is over, not when Python's collector next looks: a mask may be many megabytes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.drafted import engine_for
from engine.small import PAGE, greedy, prompt, run, small
from rings import kept_by_rings
from stepwell.engine import Engine

pytest.importorskip("transformers")


def passes_of(engine: Engine) -> None:
    """Prompts in several chunks, computed together, one of them resumed; and their answers."""
    for seeds in ((1, 2), (2, 3)):
        run(engine, [greedy(prompt(100, seed=seed), 4) for seed in seeds])


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3", {}),
        ("qwen3_next", {}),
        ("deepseek_v4", {}),
        ("deepseek_v32", {"sparse": "dsa", "hot_rows": 2 * PAGE}),
        ("llama", {"sparse": "quest", "sparse_budget": 6 * PAGE}),
    ],
)
def test_tensors_of_a_pass_end_with_it(family: str, settings: dict[str, Any]) -> None:
    with small(family, **settings) as engine:
        passes_of(engine)
        kept = kept_by_rings(lambda: passes_of(engine))
    assert not kept["Tensor"] and not kept["Batch"], f"{kept}"


def test_tensors_of_a_draft_s_passes_end_with_them() -> None:
    with engine_for("llama", "near") as engine:
        passes_of(engine)
        kept = kept_by_rings(lambda: passes_of(engine))
    assert not kept["Tensor"] and not kept["Batch"], f"{kept}"
