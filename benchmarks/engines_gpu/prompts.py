"""What engines are asked: prompts of given lengths, a branch of one of them, and conversations that grow and branch."""

from __future__ import annotations

import random
from collections.abc import Sequence

WORDS = range(3, 31000)


def text(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(WORDS, k=tokens)


def prompts(lengths: Sequence[int], each: int) -> dict[str, list[int]]:
    """Some tokens short of the lengths, so that prompts do not end with a block; and one that leaves a known one half way."""
    found = {f"{length}-{number}": text(100 * length + number, length - 17) for length in lengths for number in range(each)}
    whole = found[f"{max(lengths)}-0"]
    found["branch"] = whole[: len(whole) // 2] + text(5, 500)
    return found


def talks(seed: int, tokens: int, *, count: int = 6, rounds: int = 3) -> list[list[list[int]]]:
    """Prompts of each round: some beginnings are shared, all of them grow, and one goes on from the middle of another."""
    choose = random.Random(seed)
    roots = [choose.choices(WORDS, k=tokens // 2) for _ in range(2)]
    growing = [choose.choice(roots) + choose.choices(WORDS, k=choose.randrange(tokens // 4, tokens // 2)) for _ in range(count)]
    asked = []
    for number in range(rounds):
        asked.append([list(each) for each in growing])
        for each in growing:
            each += choose.choices(WORDS, k=choose.randrange(tokens // 16, tokens // 8))
        if number == 0:
            growing[0] = growing[1][: tokens // 2 + tokens // 8] + choose.choices(WORDS, k=tokens // 8)
    return asked
