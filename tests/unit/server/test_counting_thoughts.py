"""Tokens of reasoning are counted one by one, whatever comes at once and wherever texts are held back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stepwell.server.api.parsing.counting import ThoughtCounter
from stepwell.server.api.parsing.formats import parser_for, thoughts_for

THOUGHT = ["<|channel|>", "analysis", "<|message|>", "so", " it", " is", "<|end|>"]
START, FINAL = ["<|start|>", "assistant"], ["<|channel|>", "final", "<|message|>", "Rome", "<|return|>"]
CALL = ["<|channel|>", "commentary", " to=functions.f", "<|message|>", "{}", "<|call|>"]


class Late:
    """Texts of tokens, where `~` is a part of a character that the next token completes."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._held = ""

    def push(self, token: int) -> str:
        text, self._held = self._held + self._texts[token], ""
        if text.endswith("~"):
            text, self._held = "", text
        return text

    def finish(self) -> str:
        return self._held


def counted(texts: Sequence[str], *, reasoning: str, end: str, at_once: int) -> int:
    make = thoughts_for(None, reasoning, prompt_end=end)
    assert make is not None
    counter = ThoughtCounter(make(), Late(texts))
    for start in range(0, len(texts), at_once):
        counter.read(range(start, min(start + at_once, len(texts))))
    return counter.thoughts


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize(
    ("reasoning", "end", "texts", "expected"),
    [
        ("think", "", ["<think>", "so", " it", " is", "</think>", "\n\n", "Rome", "</think>"], 5),
        ("think", "<think>\n", ["so", " it", " is", "</think>", "\n\n", "Rome"], 4),
        ("think", "", ["\n", "<", "think", ">", "so", "</", "think", ">", "Rome"], 8),
        ("think", "<think>", ["so", "~", "~", "is", "</think>", "Rome"], 5),
        ("think", "", ["~", "<think>", "so"], 0),  # characters before the marker: it is none
        ("think", "", ["<think>", "so", ".</think>Rome", " it is"], 3),  # a token in which both stand
        ("think", "", ["<think>", "so", " it", "</thi"], 4),  # cut off
        ("think", "", ["<thi", "s is Rome"], 0),
        ("think", "", ["<think"], 0),  # undecided
        ("think", "", ["Rome", "<think>", "so", "</think>"], 0),  # content, as the answer has it
        ("mistral", "", ["[THINK]", "so", "[/THINK]", "Rome"], 3),
        ("harmony", "", [*THOUGHT, *START, *FINAL], 7),
        ("harmony", "", [*THOUGHT, *START, *THOUGHT, *START, *CALL], 16),
        ("harmony", "", [*CALL, *START, *THOUGHT[:5]], 7),  # cut off
        ("harmony", "", [*FINAL], 0),
    ],
)
def test_tokens_of_reasoning_are_counted(reasoning: str, end: str, texts: list[str], expected: int, at_once: int) -> None:
    assert counted(texts, reasoning=reasoning, end=end, at_once=at_once) == expected
    reported = parser_for(None, reasoning, prompt_end=end)
    pieces = [reported.push("".join(texts)), reported.finish()]
    assert any(each.reasoning for each in pieces) is bool(expected), "as the answer separates it"


def test_no_text_is_made_of_tokens_behind_the_reasoning() -> None:
    make = thoughts_for(None, "think", prompt_end="")
    assert make is not None
    counter = ThoughtCounter(make(), Late(["<think>", "so", "</think>", "Rome"]))
    counter.read([0, 1, 2, 3, 4711])  # which has no text
    assert counter.thoughts == 3
    assert thoughts_for("hermes", None, prompt_end="<think>") is None, "then reasoning is content"
