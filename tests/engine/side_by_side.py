"""A model of ours compared with that of transformers with the same weights, on small random configurations.

Weights are drawn so that logits have a spread of about 1: with the usual small ones, errors hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.registry import build_model
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.open_groups import OpenGroups
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import RequestRows

TOLERANCE = 1e-4
PAGE = 16


def draw(reference: torch.nn.Module, seed: int = 0) -> None:
    """Random weights of a size that keeps every layer's output near 1; norms near their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in reference.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith((".A_log", ".dt_bias")):
                tensor.copy_(noise - 1.5)  # some heads decay within a token, others over hundreds
            elif tensor.ndim > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            else:
                tensor.add_(noise * 0.1)


class Held:
    """One request's memory without a cache: every page it will ever need, in scattered order."""

    def __init__(self, memory: Memory, capacity: int) -> None:
        spec = memory.spec
        self.prefix = memory.take(Kind.PREFIX, -(-capacity // spec.page_tokens))
        self.windows = memory.take(Kind.WINDOW, -(-capacity // spec.window_page_tokens)) if spec.window_tokens else memory.none
        self.point = int(memory.take(Kind.POINT, 1)[0]) if spec.parts(Kind.POINT) else None
        self.slot = memory.open_groups.take() if memory.open_groups.needed else None
        self.position = self.resume = 0

    def segment(self, tokens: Sequence[int]) -> RequestRows:
        made = RequestRows(
            tokens=list(tokens),
            position=self.position,
            prefix_pages=self.prefix,
            window_pages=self.windows,
            point_page=self.point,
            slot=self.slot,
            resumes=self.position == self.resume,
        )
        self.position += len(tokens)
        return made


class Memory:
    """Device pages full of NaN, so that reading an unwritten page shows."""

    none = np.empty(0, np.int32)

    def __init__(self, spec: ModelSpec, count: int = 256, *, device: str = "cpu") -> None:
        self.spec, self._device = spec, device
        kinds = [kind for kind in Kind if spec.parts(kind)]
        rows = {kind: torch.full((count, spec.object_bytes(kind)), 255, dtype=torch.uint8, device=device) for kind in kinds}
        self.pages = DevicePages(spec, rows)
        self.open_groups = OpenGroups(self.pages, device=device)
        order = np.random.default_rng(1).permutation(count).astype(np.int32)
        self._free = {kind: list(order) for kind in kinds}

    def batch(self, segments: Sequence[RequestRows], **more: Any) -> Batch:
        return Batch(segments, self.pages, device=self._device, open_groups=self.open_groups, **more)

    def take(self, kind: Kind, count: int) -> np.ndarray:
        if kind not in self._free:
            return self.none
        taken, self._free[kind] = self._free[kind][:count], self._free[kind][count:]
        assert len(taken) == count, "the test's memory is too small"
        return np.array(taken, np.int32)


class Runs(Protocol):
    """A model, or its recordings."""

    def forward(self, batch: Batch, /) -> torch.Tensor: ...


def logits_on_cuda(model: Decoder, runs: Runs) -> torch.Tensor:
    """Prompts of several lengths in one pass, a longer part of one, then steps of all together; tokens are always the same."""
    drawn = torch.Generator().manual_seed(1)

    def some(count: int) -> list[int]:
        return torch.randint(0, model.vocab_size, (count,), generator=drawn).tolist()

    memory, rows = Memory(model.spec, 512, device="cuda"), []
    held = [Held(memory, 400) for _ in range(3)]
    for lengths in ([1, 65, 130], [1, 1, 100], *[[1, 1, 1]] * 20):
        segments = [each.segment(some(length)) for each, length in zip(held, lengths, strict=True)]
        rows.append(runs.forward(memory.batch(segments, dtype=model.dtype)))
    return torch.cat(rows)


class Ours:
    """A model of ours, and the ways to run it."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def tokens(self, count: int, seed: int = 3) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.model.vocab_size, count).tolist()

    def one_shot(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.in_chunks(tokens, [len(tokens)])

    def in_chunks(self, tokens: Sequence[int], sizes: Sequence[int], memory: Memory | None = None) -> torch.Tensor:
        """Logits of every token by ours, in passes of the given sizes; the last size repeats."""
        memory = memory or Memory(self.spec)
        sequence, parts, at, left = Held(memory, len(tokens)), [], 0, list(sizes)
        while at < len(tokens):
            size = left.pop(0) if len(left) > 1 else left[0]
            parts.append(self.forward(memory, [sequence.segment(tokens[at : at + size])], every_token=True))
            at += size
        return torch.cat(parts)

    def forward(self, memory: Memory, segments: Sequence[RequestRows], *, every_token: bool = False) -> torch.Tensor:
        return self.model.forward(memory.batch(segments, every_token=every_token, dtype=self.model.dtype))

    def ragged(self, prompts: Sequence[Sequence[int]], steps: int) -> tuple[list[list[int]], list[torch.Tensor]]:
        """All prompts prefilled in one pass, then greedy steps together; tokens and last logits of each."""
        memory = Memory(self.spec)
        sequences = [Held(memory, len(prompt) + steps) for prompt in prompts]
        logits = self.forward(memory, [s.segment(p) for s, p in zip(sequences, prompts, strict=True)])
        made: list[list[int]] = [[] for _ in prompts]
        for _ in range(steps):
            for each, row in zip(made, logits, strict=True):
                each.append(int(row.argmax()))
            logits = self.forward(memory, [s.segment(each[-1:]) for s, each in zip(sequences, made, strict=True)])
        return made, list(logits)


class Pair(Ours):
    """Both models."""

    def __init__(self, reference: Any, *, page_tokens: int = PAGE, seed: int = 0) -> None:
        draw(reference, seed)
        self.reference = reference.eval().float()
        config = self.reference.config.to_dict()
        super().__init__(build_model(config, HeldTensors(dict(self.reference.state_dict())), page_tokens=page_tokens))

    @torch.no_grad()
    def expected(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of every token by the reference, in one pass."""
        return self.reference(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def layer_outputs(self, tokens: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The stream after every layer: ours and the reference's (whose last one may already be normed, and is left out)."""
        memory, ours = Memory(self.spec), []
        batch = memory.batch([Held(memory, len(tokens)).segment(tokens)])
        self.model.forward(batch, on_layer=lambda _, x: ours.append(x.clone()))
        with torch.no_grad():
            states = self.reference(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
        return ours[:-1], [state[0].float() for state in states[1:-1]]


def check_pair(pair: Pair, count: int = 90) -> None:
    """Everything a family must pass: layer by layer, one shot, chunks at page boundaries and off them, token by token, ragged."""
    tokens = pair.tokens(count)
    expected = pair.expected(tokens)
    assert expected.std() > 0.3, f"a dead model proves nothing: {expected.std()=}"
    for number, (mine, theirs) in enumerate(zip(*pair.layer_outputs(tokens), strict=True)):
        assert (mine - theirs).abs().max() <= TOLERANCE, f"layer {number} differs by {(mine - theirs).abs().max()}"
    for sizes in ([count], [PAGE], [2 * PAGE, PAGE, 3 * PAGE], [7, 30, 1, 1, 13], [count // 2, 1]):
        error = (pair.in_chunks(tokens, sizes) - expected).abs().max()
        assert error <= TOLERANCE, f"chunks of {sizes} differ by {error}"
    error = (pair.in_chunks(tokens, [1]) - expected).abs().max()
    assert error <= TOLERANCE, f"token by token differs by {error}"
    check_ragged(pair)


def check_ragged(pair: Pair) -> None:
    prompts = [pair.tokens(length, seed=length) for length in (5, PAGE, 37, 61)]
    made, logits = pair.ragged(prompts, 6)
    for prompt, tokens, row in zip(prompts, made, logits, strict=True):
        expected = pair.expected(prompt + tokens)
        assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert (row - expected[-1]).abs().max() <= TOLERANCE
