"""Trained models say what they should: the one test in which a wrong rotation, norm or tokenizer shows as nonsense."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence

import pytest
import torch

from engine.side_by_side import Held, Memory
from stepwell.base.errors import ConfigError
from stepwell.engine.loading.checkpoint import Checkpoint, open_checkpoint
from stepwell.engine.loading.tokenizer import Tokenizer
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.registry import build_model
from stepwell.engine.passes.batch import Batch

PAGE = 64


class Loaded:
    """A model by name, in fp32 on the CPU."""

    def __init__(self, name: str) -> None:
        try:
            self.checkpoint: Checkpoint = open_checkpoint(name)
        except ConfigError as error:
            pytest.skip(str(error))
        self.model: Decoder = build_model(self.checkpoint.config, self.checkpoint.source, page_tokens=PAGE)

    @property
    def text(self) -> Tokenizer:
        assert self.checkpoint.text is not None
        return self.checkpoint.text

    def greedy(self, tokens: Sequence[int], steps: int) -> str:
        memory = Memory(self.model.spec, count=64)
        sequence, made, stream = Held(memory, len(tokens) + steps), "", self.text.stream(tokens)
        following = list(tokens)
        for _ in range(steps):
            logits = self.model.forward(Batch([sequence.segment(following)], memory.pages, device="cpu"))
            following = [int(logits[0].argmax())]
            if following[0] in self.checkpoint.eos_ids:
                break
            made += stream.push(following[0])
        return made + stream.finish()

    def surprise(self, tokens: Sequence[int]) -> float:
        """Mean negative log likelihood of each token but the first."""
        memory = Memory(self.model.spec, count=64)
        batch = Batch([Held(memory, len(tokens)).segment(tokens)], memory.pages, device="cpu", every_token=True)
        return torch.nn.functional.cross_entropy(self.model.forward(batch)[:-1], torch.tensor(tokens[1:])).item()


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    return Loaded("smollm2-135m")


@pytest.fixture(scope="module")
def gemma() -> Loaded:
    return Loaded("gemma-3-270m")


def test_smollm2_completes(smollm2: Loaded) -> None:
    assert smollm2.greedy(smollm2.text.encode("The capital of France is"), 8).startswith(" Paris")


def test_smollm2_answers_in_its_chat_template(smollm2: Loaded) -> None:
    prompt = smollm2.checkpoint.chat.render([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert smollm2.greedy(smollm2.text.encode(prompt), 30) == "The capital of France is Paris."


def test_gemma_completes(gemma: Loaded) -> None:
    """A base model of 270 M parameters: it needs to be shown what is asked."""
    prompt = "Germany: Berlin\nItaly: Rome\nSpain: Madrid\nFrance:"
    assert gemma.greedy(gemma.text.encode(prompt), 3).startswith(" Paris\n")


def test_gemma_reads_code_past_two_windows(gemma: Loaded) -> None:
    tokens = gemma.text.encode(inspect.getsource(textwrap))[:1100]
    assert len(tokens) == 1100
    assert gemma.surprise(tokens) < 2.7  # over the first 700 both we and transformers measured 2.41; guessing is 12.5


def test_gemma_needs_its_first_token(gemma: Loaded) -> None:
    tokens = gemma.text.encode(inspect.getsource(textwrap))[:80]
    assert tokens[0] == gemma.text.bos_id
    assert gemma.surprise(tokens) < gemma.surprise(tokens[1:]) - 1
