"""Prompts whose answers are known: conversations that grow, and what an engine without any cache says to each of their turns.

    session   | instructions that many share | turn | answer | turn | answer | turn |       every turn is a prompt

Where the two likeliest tokens of an answer are nearly as likely, rounding could choose between them, and an answer could be right
in two ways: such a turn is drawn again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from stepwell.engine import Engine, GenerateRequest, Sampling, load_engine

CLEAR = 0.01  # by how much the chosen token's logprob is above the next one's
SAME = 1e-4  # how far a logprob may be from the known one: rounding is five times less
_LETTERS = range(97, 123)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A prompt, and the one right answer to it."""

    number: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    words: tuple[str, ...]  # the answer's tokens as a server writes them
    logprobs: tuple[float, ...]

    def wrong(self, words: Sequence[str], logprobs: Sequence[float], *, whole: bool) -> str | None:
        """What is wrong with an answer, or with the beginning of one where it is not `whole`; None for nothing."""
        if whole and len(words) != len(self.words):
            return f"{len(words)} tokens came, of {len(self.words)}"
        if tuple(words) != self.words[: len(words)]:
            return f"came {list(words)!r}, right is {list(self.words[: len(words)])!r}"
        off = [abs(came - right) for came, right in zip(logprobs, self.logprobs, strict=False)]
        if max(off, default=0.0) <= SAME:
            return None
        each = " ".join(f"{one:.1g}" for one in off)  # where it begins and whether it grows helps to find the cause
        return f"the tokens are right, a logprob is off by {max(off):.2g}: {each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many prompts, and how long they are, in tokens."""

    instructions: int = 3
    sessions: int = 12
    turns: int = 6
    instruction_tokens: tuple[int, int] = (100, 400)
    turn_tokens: tuple[int, int] = (20, 200)
    answer_tokens: int = 12

    @property
    def count(self) -> int:
        return self.sessions * self.turns


def known_answers(model: str, shape: Shape, seed: int, device: str) -> list[Known]:
    """The same ones for the same seed. In fp32: other requests in a batch move its logprobs by rounding alone."""
    random = Random(f"{seed} prompts")
    shared = [_text(random, shape.instruction_tokens) for _ in range(shape.instructions)]
    sessions = [random.choice(shared) for _ in range(shape.sessions)]
    found: list[Known] = []
    sizes = {"device_memory": "1GiB", "host_memory": "0"}  # of a GPU that the servers of this soak, and of others, share
    with load_engine(model, device=device, dtype="fp32", **sizes) as engine:
        for _ in range(shape.turns):
            asked = _turn(engine, sessions, shape, random, first=len(found))
            found += asked
            sessions = [known.prompt + known.tokens for known in asked]
    return found


def _turn(engine: Engine, sessions: Sequence[tuple[int, ...]], shape: Shape, random: Random, first: int) -> list[Known]:
    """One more turn of every session."""
    made: dict[int, Known] = {}
    while missing := [at for at in range(len(sessions)) if at not in made]:
        prompts = {at: sessions[at] + _text(random, shape.turn_tokens) for at in missing}
        for at, (known, clear) in _answers(engine, prompts, shape.answer_tokens, first).items():
            if clear > CLEAR:
                made[at] = known
    return [made[at] for at in range(len(sessions))]


def _answers(
    engine: Engine, prompts: dict[int, tuple[int, ...]], answer_tokens: int, first: int
) -> dict[int, tuple[Known, float]]:  # fmt: skip
    """By index, with how clear the least clear choice was."""
    sampling = Sampling(max_tokens=answer_tokens, ignore_eos=True, logprobs=2)
    numbers = {
        engine.submit(GenerateRequest(tokens=prompt, sampling=sampling, use_cache=False)): at for at, prompt in prompts.items()
    }
    chosen = {at: [] for at in prompts}
    while engine.num_open:
        for delta in engine.step():
            assert delta.error is None, delta.error
            chosen[numbers[delta.request]] += delta.logprobs
        time.sleep(engine.pause_s)
    for delta in engine.step():
        chosen[numbers[delta.request]] += delta.logprobs
    assert engine.text is not None
    return {
        at: (
            Known(
                number=first + at, prompt=prompts[at], tokens=tuple(each.token for each in choices),
                words=tuple(engine.text.decode([each.token]) for each in choices),
                logprobs=tuple(each.logprob for each in choices),
            ),
            min(each.top[0][1] - each.top[1][1] for each in choices),
        )
        for at, choices in chosen.items()
    }  # fmt: skip


def _text(random: Random, tokens: tuple[int, int]) -> tuple[int, ...]:
    return tuple(random.choice(_LETTERS) for _ in range(random.randint(*tokens)))
