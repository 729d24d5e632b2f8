"""Engines whose logits are kept, and conversations to play on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from engine.families import checkpoint
from stepwell.cache.build import CacheTuning
from stepwell.engine import Engine, EngineConfig, GenerateRequest, Limits, Sampling, build_engine
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.requests.request import Chunk
from stepwell.policy.placement import PlacementRules
from waiting import empty_device, run_to_the_end, settle

PAGE = 16
ANSWER = 6
NO_BRANCHES = PlacementRules(interval_tokens=4 * PAGE, most_added=None, decode_interval_tokens=2 * PAGE, at_branch=False)


@dataclass(frozen=True, kw_only=True)
class Played:
    """One answer, with the logits behind each of its tokens and where its prompt resumed."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: tuple[torch.Tensor, ...]
    resumed: int
    chunks: tuple[int, ...]  # where the passes over its prompt ended
    stored: int  # tokens of the prompt that came from the store
    host: int


class Recorded:
    """An engine whose every row of logits is noted under its request."""

    def __init__(
        self, family: str | Checkpoint, *, chunk_tokens: int = 64, max_running: int = 8, placement: PlacementRules = NO_BRANCHES,
        **settings: Any,
    ) -> None:  # fmt: skip
        defaults = {
            "device": "cpu", "page_tokens": PAGE, "device_memory": "1MiB", "host_memory": "16MiB",
            "limits": Limits(chunk_tokens=chunk_tokens, max_running=max_running),
        }  # fmt: skip
        self.engine: Engine = build_engine(
            checkpoint(family) if isinstance(family, str) else family, EngineConfig(**(defaults | settings)),
            tuning=CacheTuning(placement=placement),
        )  # fmt: skip
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.resumed: dict[int, int] = {}
        self.chunks: dict[int, list[int]] = {}
        runner = self.engine._runner
        run = runner.run

        def recording(chunks: Sequence[Chunk], **more: Any) -> torch.Tensor:
            for chunk in chunks:
                assert chunk.request.lease is not None
                self.resumed.setdefault(chunk.request.id, chunk.request.lease.resume)
                self.chunks.setdefault(chunk.request.id, []).append(chunk.end)
            logits = run(chunks, **more)
            for chunk, row in zip([each for each in chunks if each.completes], logits, strict=True):
                self.logits.setdefault(chunk.request.id, []).append(row.clone())
            return logits

        runner.run = recording  # type: ignore[method-assign]

    def play(self, prompt: Sequence[int], *, use_cache: bool = True, answer: int = ANSWER) -> Played:
        return self.play_all([prompt], use_cache=use_cache, answer=answer)[0]

    def play_all(self, prompts: Sequence[Sequence[int]], *, use_cache: bool = True, answer: int = ANSWER) -> list[Played]:
        """All prompts at once, to their ends."""
        engine, asks = (
            self.engine,
            [GenerateRequest(tokens=list(p), sampling=Sampling(max_tokens=answer), use_cache=use_cache) for p in prompts],
        )
        numbers = [engine.submit(ask) for ask in asks]
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        usage = {}
        for delta in run_to_the_end(engine):
            assert delta.error is None, delta.error
            tokens[delta.request] += delta.tokens
            if delta.usage is not None:
                usage[delta.request] = delta.usage
                assert delta.usage.sources.total == delta.usage.prompt_tokens
        engine.cache.audit()
        return [
            Played(
                prompt=tuple(prompt), tokens=tuple(tokens[n]), logits=tuple(self.logits[n]), resumed=self.resumed[n],
                chunks=tuple(self.chunks[n]), stored=usage[n].sources.store, host=usage[n].sources.host,
            )
            for n, prompt in zip(numbers, prompts, strict=True)
        ]  # fmt: skip

    def settle(self) -> None:
        """Until nothing is copied and nothing is on its way to the store."""
        settle(self.engine.cache)

    def evict_to_host(self) -> None:
        """The device keeps nothing."""
        empty_device(self.engine.cache)

    def forget_memory(self) -> None:
        """Only the store keeps anything."""
        self.settle()
        self.engine.cache.flush()

    def close(self) -> None:
        self.settle()
        self.engine.close()


def conversations(vocab_size: int, *, seed: int, turns: int = 3, users: int = 2) -> list[list[list[int]]]:
    """For each user the new tokens of each turn. All share a beginning; some turns are asked again differently."""
    random = Random(seed)
    system = _tokens(random, vocab_size, random.randrange(2 * PAGE, 6 * PAGE))
    made = []
    for _ in range(users):
        news = [_tokens(random, vocab_size, random.randrange(5, 4 * PAGE)) for _ in range(turns)]
        made.append([system + news[0], *news[1:]])
    return made


def script(recorded: Recorded, *, seed: int) -> list[Played]:
    """Plays conversations turn by turn, users in turns; then branches off earlier turns. What was played, in order."""
    vocab = recorded.engine.vocab_size
    users = conversations(vocab, seed=seed)
    histories: list[list[int]] = [[] for _ in users]
    played: list[Played] = []
    for turn in range(len(users[0])):
        for history, news in zip(histories, users, strict=True):
            history += news[turn]
            played.append(recorded.play(history))
            history += played[-1].tokens
    random = Random(seed + 1)
    branches = [[*each.prompt[: -random.randrange(1, 4)], *_tokens(random, vocab, PAGE)] for each in played[:2]]
    return played + [recorded.play(branch) for branch in branches]


def replay(recorded: Recorded, played: list[Played], before_each: Callable[[Recorded], Recorded]) -> list[Played]:
    """Asks the same once more; `before_each` says over what."""
    again = []
    for each in played:
        recorded = before_each(recorded)
        again.append(recorded.play(each.prompt))
    recorded.close()
    return again


def same_bits(one: Played, other: Played) -> bool:
    return one.tokens == other.tokens and all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))


def distance(one: Played, other: Played) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one.logits, other.logits, strict=True))


def store_at(directory: Path, budget: str = "256MiB") -> dict[str, Any]:
    return {"store": f"log:{directory}", "store_options": {"budget": budget}}


def _tokens(random: Random, vocab_size: int, count: int) -> list[int]:
    return [random.randrange(vocab_size) for _ in range(count)]
