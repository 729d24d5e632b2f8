"""The lines of docs/transformers.md, as they are written there: run twice, the second time the prompt comes from the log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from connectors.tiny_models import prompt, tiny  # noqa: E402
from stepwell.connectors.transformers import prompt_cache  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
SIZES = {"8GiB": "16MiB", "50GiB": "64MiB"}  # what is written there, and what a test has


def recipe(store: Path) -> str:
    """The lines, with a store of their own and in the size of a test."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if "PromptCache" in block]
    assert all(found.count(size) == 1 for size in SIZES), "the recipe's sizes are others"
    for size, ours in SIZES.items():
        found = found.replace(size, ours)
    return found.replace("/var/cache/prompts", str(store))


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_the_documented_lines_resume_a_prompt_from_the_log(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, found = tiny(family), prompt(1, 300), []
    inner = prompt_cache.Prefill.run

    def run(self: Any, *args: Any) -> Any:
        prefilled = inner(self, *args)
        found.append(prefilled.cached)
        return prefilled

    monkeypatch.setattr(prompt_cache.Prefill, "run", run)
    monkeypatch.setattr(prompt_cache.ModelPass, "seconds_for", lambda *_: 10.0)  # tiny models are computed sooner than fetched
    answers = []
    for _ in range(2):
        names: dict[str, Any] = {"model": model, "input_ids": ids}
        exec(recipe(tmp_path), names)
        answers.append(names["answer"])
    assert found == [0, 256], "the second run had to find what the first one stored"
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64)
    assert torch.equal(answers[0], alone) and torch.equal(answers[1], alone)
