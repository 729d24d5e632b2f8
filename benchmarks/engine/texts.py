"""Prompts of real text: this project's own documents, as tokens."""

from __future__ import annotations

from pathlib import Path
from random import Random

from engine.models import checkpoint_of

ROOT = Path(__file__).parents[2]


def prompt_of(model: str, count: int) -> list[int]:
    """The first `count` tokens of the documents, repeated as often as needed; random ones for a model without a tokenizer."""
    text = checkpoint_of(model).text
    if text is None:
        return [Random(at).randrange(100_000) for at in range(count)]
    documents = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    tokens = text.encode("\n\n".join(file.read_text() for file in documents))
    while len(tokens) < count:
        tokens += text.encode("\n\n".join(file.read_text() for file in reversed(documents)), special=False)
    return tokens[:count]
