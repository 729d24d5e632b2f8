"""What checkpoints in eight bits do to logits: prompts that resume from a store, beside the same resumed exactly.

Several prompts go on from one beginning. All memory is emptied before each, so that each resumes at the checkpoint behind the
beginning, and computes the rest and an answer on it. Answers are compared up to the first token that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import torch

from checkpoints.random_models import NAMES, checkpoint_of
from stepwell.base.config import PlacementConfig, PrefetchPolicy, StoreConfig
from stepwell.engine import Ask, EngineConfig, Limits, Sampling, build_engine
from stepwell.engine.engine import Engine
from stepwell.engine.requests.request import Chunk
from stepwell.engine.scheduling.footprint import footprint_of

WAIT = StoreConfig(prefetch=PrefetchPolicy.WAIT_COMPLETE, recompute_tokens_per_s=1.0, checkpoint_delay_s=0)
PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Answer:
    tokens: list[int]
    logits: list[torch.Tensor]  # behind each of them
    resumed: int


@dataclass(frozen=True, kw_only=True)
class Moved:
    """How far logits are off, against their standard deviation, and what becomes of what is chosen from them."""

    rms: float
    worst: float
    divergence: float  # Kullback-Leibler, of what a token is drawn from, in nats
    same_choice: float  # share of greedy choices that are the same
    compared: int  # rows of logits


def answers_of(model: str, checkpoint_dtype: str | None, prompts: Sequence[list[int]], answer: int) -> tuple[int, list[Answer]]:
    """Bytes of a checkpoint in the store, and an answer to each prompt but the first, which only fills the store."""
    config = EngineConfig(
        device="cpu", page_tokens=64, device_memory="256MiB", host_memory="256MiB", store="memory:",
        store_options={"budget": "512MiB"}, store_config=WAIT, checkpoint_dtype=checkpoint_dtype,
        limits=Limits(chunk_tokens=512, max_running=1), placement=PlacementConfig(decode_interval_tokens=0),
    )  # fmt: skip
    with build_engine(checkpoint_of(model), config) as engine:
        _ask(engine, prompts[0], answer)
        answers = []
        for prompt in prompts[1:]:
            _settle(engine)
            engine.cache.flush()
            answers.append(_ask(engine, prompt, answer))
        return footprint_of(engine.cache.spec).checkpoint_bytes, answers


def prompts_of(model: str, *, beginning: int, rest: int, count: int) -> list[list[int]]:
    """One that is the beginning and a token, and others that go on from there, each in its own way.

    Of random tokens for random weights, else of this project's documents.
    """
    checkpoint = checkpoint_of(model)
    if model in NAMES or checkpoint.text is None:
        random, vocab_size = Random(7), int(checkpoint.config["vocab_size"])
        first = [random.randrange(vocab_size) for _ in range(beginning)]
        return [[*first, 0], *([*first, *(random.randrange(vocab_size) for _ in range(rest))] for _ in range(count))]
    tokens = checkpoint.text.encode((ROOT / "docs" / "architecture.md").read_text())
    assert len(tokens) > beginning + count * rest, f"the text has {len(tokens)} tokens"
    first, others = tokens[:beginning], tokens[beginning + 1 :]
    return [tokens[: beginning + 1], *([*first, *others[at * rest : (at + 1) * rest]] for at in range(count))]


def moved(exact: Sequence[Answer], narrow: Sequence[Answer]) -> Moved:
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for right, mine in zip(exact, narrow, strict=True):
        assert right.resumed == mine.resumed > 0, f"resumed at {right.resumed} and at {mine.resumed}"
        alike = next((at for at, (a, b) in enumerate(zip(right.tokens, mine.tokens, strict=True)) if a != b), len(mine.tokens))
        pairs += list(zip(right.logits, mine.logits, strict=True))[: alike + 1]
    right_RV, mine_RV = (torch.stack(rows).double() for rows in zip(*pairs, strict=True))
    spread, error_RV = float(right_RV.std(-1).square().mean().sqrt()), mine_RV - right_RV
    chosen, logs_RV = right_RV.softmax(-1), right_RV.log_softmax(-1) - mine_RV.log_softmax(-1)
    return Moved(
        rms=float(error_RV.square().mean().sqrt()) / spread,
        worst=float(error_RV.abs().max()) / spread,
        divergence=float((chosen * logs_RV).sum(-1).mean()),
        same_choice=float((right_RV.argmax(-1) == mine_RV.argmax(-1)).double().mean()),
        compared=len(pairs),
    )


def _ask(engine: Engine, prompt: list[int], answer: int) -> Answer:
    rows: list[torch.Tensor] = []
    resumed: list[int] = []
    runner = engine._runner
    plain = runner.run

    def noting(chunks: Sequence[Chunk], **more: Any) -> Any:
        resumed.extend(chunk.request.lease.resume for chunk in chunks if chunk.request.lease is not None)
        logits = plain(chunks, **more)
        rows.extend(row.clone() for row in logits)
        return logits

    runner.run = noting  # type: ignore[method-assign]
    try:
        number, tokens = engine.submit(Ask(tokens=prompt, sampling=Sampling(max_tokens=answer, ignore_eos=True))), []
        while engine.num_open:
            for delta in engine.step():
                assert delta.request == number and delta.error is None, delta.error
                tokens += delta.tokens
    finally:
        runner.run = plain  # type: ignore[method-assign]
    return Answer(tokens=tokens, logits=rows, resumed=resumed[0])


def _settle(engine: Engine) -> None:
    """Until everything is in the store."""
    deadline = monotonic() + PATIENCE_S
    while (report := engine.cache.step()).running or report.storing:
        assert monotonic() < deadline, "backups do not end"
        sleep(0.001)
