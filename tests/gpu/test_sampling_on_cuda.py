"""Tokens drawn on a GPU: the host never waits, a row draws the same in every batch, and requests go ahead to the same answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engine.small import prompt, run, small, tokens_of  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.engine import GenerateRequest, Sampling  # noqa: E402
from stepwell.engine.ops.drawing import NAN_LOGITS, Draw, Pick, pick  # noqa: E402
from stepwell.engine.requests.request import Chunk  # noqa: E402
from stepwell.engine.sampling.choices import number_for  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # it says that it is a prototype
]
VOCABS = [1000, 32_000, 50_257, 128_256, 262_208]


@pytest.fixture(params=["torch", "triton"])
def choose(request: pytest.FixtureRequest) -> Pick:
    """Plain torch, and the kernels."""
    if request.param == "torch":
        return pick
    pytest.importorskip("triton")
    from stepwell.engine.ops.on_triton import drawing as triton_drawing

    return triton_drawing.pick


@contextmanager
def never_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows(count: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, list[Draw | None]]:
    random, made = Random(seed), torch.Generator().manual_seed(seed)
    logits_BV = (torch.randn(count, vocab, generator=made) * 3).bfloat16().float()  # with many ties
    draws = [
        None if random.random() < 0.2 else Draw(
            temperature=random.choice([0.2, 1.0, 5.0]), top_k=random.choice([None, None, 3, 50, 2000]),
            top_p=random.choice([1.0, 0.9, 0.3]), number=number_for(seed, row),
        )
        for row in range(count)
    ]  # fmt: skip
    return logits_BV, draws


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_draws_the_same_in_every_batch_and_what_the_cpu_draws(vocab: int, choose: Pick) -> None:
    logits_BV, draws = rows(48, vocab)
    on_cuda = logits_BV.cuda()
    together = choose(on_cuda, draws).tolist()
    assert choose(on_cuda, draws).tolist() == together
    assert [choose(on_cuda[row : row + 1], draws[row : row + 1]).item() for row in range(48)] == together
    order = Random(1).sample(range(48), 48)
    assert choose(on_cuda[order], [draws[row] for row in order]).tolist() == [together[row] for row in order]
    assert pick(logits_BV, draws).tolist() == together


@pytest.mark.parametrize("spread", [1e-3, 1.0, 10.0, 1e30])
@pytest.mark.parametrize("vocab", [1, 4096, 4097, 151_936])
def test_kernels_draw_what_plain_torch_draws(vocab: int, spread: float) -> None:
    """Flat rows have long lists; rows of bf16 many ties; one is all ties, one has tokens that are far from all others."""
    pytest.importorskip("triton")
    from stepwell.engine.ops.on_triton import drawing as triton_drawing

    random, logits_BV = Random(vocab), torch.randn(64, vocab, device="cuda") * spread
    logits_BV[::3], logits_BV[1], logits_BV[2, : vocab // 2] = logits_BV[::3].bfloat16().float(), 0.5, -1e4 * spread
    for _ in range(4):
        draws = [
            None if random.random() < 0.1 else Draw(
                temperature=random.choice([1e-6, 0.3, 1.0, 100.0]), top_k=random.choice([None, None, 1, 50, vocab]),
                top_p=random.choice([1.0, 0.99, 0.9, 0.2, 1e-300]), number=random.choice([0.0, 1 - 2.0**-53, random.random()]),
            )
            for _ in range(64)
        ]  # fmt: skip
        found, expected = triton_drawing.pick(logits_BV, draws).tolist(), pick(logits_BV, draws).tolist()
        assert not [each for each in zip(found, expected, draws, strict=True) if each[0] != each[1]]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_the_host_never_waits(settings: dict[str, Any], choose: Pick) -> None:
    logits_BV = torch.randn(8, 32_000, device="cuda")
    plain = Draw(temperature=0.8, top_k=None, top_p=1.0, number=0.4)
    draws = [None if row == 3 else plain._replace(**settings) for row in range(8)]
    expected = choose(logits_BV, draws)
    with never_waiting():
        token_B = choose(logits_BV, draws)
    assert torch.equal(token_B, expected) and token_B[3] == logits_BV[3].argmax()


def test_rows_that_are_no_numbers_are_marked_and_leave_the_device_sound(choose: Pick) -> None:
    nan, inf = torch.nan, torch.inf
    logits_BV = torch.zeros(5, 1000, device="cuda")
    logits_BV[0], logits_BV[1, 7], logits_BV[2, 7], logits_BV[3, 7] = nan, nan, inf, -inf
    for top_k, top_p in ((None, 1.0), (None, 0.9), (5, 1.0), (5, 0.9)):
        draw = Draw(temperature=0.5, top_k=top_k, top_p=top_p, number=0.999)
        tokens = choose(logits_BV, [draw] * 5).tolist()
        assert tokens[:4] == [NAN_LOGITS] * 4 and tokens[4] > 0
    torch.cuda.synchronize()


def answers(family: str, *, ahead: bool) -> tuple[list[list[int]], int]:
    """Answers of four requests, three of them sampled; and how many tokens were computed before their predecessors were read."""
    warm, followed = Sampling(max_tokens=60, temperature=0.9, seed=1), []
    many = [warm, replace(warm, top_p=0.9), replace(warm, top_k=20, top_p=0.95), Sampling(max_tokens=60)]
    asks = [GenerateRequest(tokens=prompt(20 + at, seed=at), sampling=sampling) for at, sampling in enumerate(many)]
    with small(family, device="cuda", dtype="fp32", device_memory="16MiB", host_memory="16MiB") as engine:
        assert engine.passing.reads_later, "decode steps of this family ask the host"
        engine.passing.reads_later = ahead
        run_pass = engine._runner.run

        def noted(chunks: Sequence[Chunk], **more: Any) -> torch.Tensor:
            followed.append(sum(chunk.follows for chunk in chunks))
            return run_pass(chunks, **more)

        engine._runner.run = noted
        return [tokens_of(deltas) for deltas in run(engine, asks)], sum(followed)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_drawn_requests_go_ahead_and_answer_as_without(family: str) -> None:
    pytest.importorskip("transformers")
    expected, none = answers(family, ahead=False)
    found, followed = answers(family, ahead=True)
    assert found == expected
    assert none == 0 and followed > 4 * 60 * 0.7
