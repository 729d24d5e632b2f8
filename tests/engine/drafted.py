"""Checkpoints that draft for the small random models, from the same weights to others, and models with a layer that drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import torch

from engine.families import SMALL, checkpoint
from engine.small import DEFAULTS
from stepwell.engine import Engine, EngineConfig, build_engine
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.weights import HeldTensors

OWN = "own layer"


def tensors_of(made: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: made.source.read(name) for name in made.source.names()}


@cache
def target(family: str, *, own_layer: bool = False) -> Checkpoint:
    """A small model, as it is or with a layer that drafts."""
    return with_own_layer(checkpoint(family)) if own_layer else checkpoint(family)


def with_own_layer(made: Checkpoint) -> Checkpoint:
    """The same with a layer behind its last that drafts, which is nothing like the others but guesses well now and then."""
    tensors, config = {name: each.clone() for name, each in tensors_of(made).items()}, dict(made.config)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    assert isinstance(layers, int) and isinstance(hidden, int)
    for name in [each for each in tensors if each.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))]:
        tensors[name] = tensors[name] * 0.3
    tensors["model.embed_tokens.weight"] *= hidden**0.5  # the next token hangs on the last one above all, as a draft may know
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [each for each in tensors if each.startswith(last)]:
        tensors[name.replace(last, new)] = tensors[name] + noise(*tensors[name].shape) * tensors[name].std() * 0.3
    tensors |= {
        f"{new}enorm.weight": 1 + 0.1 * noise(hidden),
        f"{new}hnorm.weight": 1 + 0.1 * noise(hidden),
        f"{new}eh_proj.weight": torch.cat([torch.eye(hidden), noise(hidden, hidden) * 0.25 / hidden**0.5], dim=1),
        f"{new}shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        f"{new}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{new}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    return replace(
        made, config=config | {"num_nextn_predict_layers": 1}, source=HeldTensors(tensors), digest=f"{made.digest}-own"
    )


@cache
def draft(kind: str) -> Checkpoint:
    """`llama`, `deepseek_v3`: the model itself. `near`: llama with other weights by a little. `far`: nothing like it."""
    if kind in ("llama", "deepseek_v3"):
        return checkpoint(kind)
    if kind == "unwindowed":  # mistral's weights, looking at everything
        made = checkpoint("mistral")
        return replace(made, config=dict(made.config) | {"model_type": "llama"}, digest="test-unwindowed")
    made, generator = checkpoint("llama"), torch.Generator().manual_seed(11)
    tensors = tensors_of(made)
    share = {"near": 0.05, "far": 10.0}[kind]
    changed = {
        name: tensor + torch.randn(tensor.shape, generator=generator) * tensor.std() * share if tensor.ndim > 1 else tensor
        for name, tensor in tensors.items()
    }
    return replace(made, source=HeldTensors(changed), digest=f"test-{kind}")


def engine_for(family: str, drafted: str | None = None, made: Checkpoint | None = None, **settings: Any) -> Engine:
    """A small engine: without a draft, with a model of its own as one, or with the model's own layer."""
    checkpoint = made or target(family, own_layer=family in ("deepseek_v3", "deepseek_v32") and drafted in (None, OWN))
    config: Mapping[str, Any] = DEFAULTS | ({"draft": "mtp"} if drafted == OWN else {}) | settings
    return build_engine(checkpoint, EngineConfig(**config), draft=None if drafted in (None, OWN) else draft(drafted))


class Letters:
    """A tokenizer of one letter a token, as far as the engine needs one."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(letter) % 128 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(256 + token) for token in ids)

    def stream(self, after: object = (), *, special: bool = False) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(256 + token)

    def finish(self) -> str:
        return ""


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    return [[Random(length).randrange(SMALL["vocab_size"]) for _ in range(length)] for length in lengths]
