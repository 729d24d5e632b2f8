"""Prompts of real text: this project's own documents, as tokens."""

from __future__ import annotations

from pathlib import Path

from stepwell.engine.loading.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[2]


def prompt_of(model: str, count: int) -> list[int]:
    """The first `count` tokens of the documents, repeated as often as needed."""
    text = open_checkpoint(model).text
    assert text is not None, "the benchmark needs a model with a tokenizer"
    documents = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    tokens = text.encode("\n\n".join(file.read_text() for file in documents))
    while len(tokens) < count:
        tokens += text.encode("\n\n".join(file.read_text() for file in reversed(documents)), special=False)
    return tokens[:count]
