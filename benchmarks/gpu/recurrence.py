"""Recurrent layers of four models on a GPU: microseconds of one layer, beside the time that memory needs for the states.

    cd benchmarks && python -m gpu.recurrence

Steps are played from a CUDA graph over eight layers in turn; the limit is each state read and written once. States of a few
requests may stay in the GPU's cache: a share of the limit above 1 means that they did. Runs are one prompt of 8,192 tokens, or
four of 2,048. `torch` is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import silu

from gpu.device_time import median_us, played_us
from stepwell.base.ids import Kind
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.shapes import Point
from stepwell.base.spec.states import StateSpec
from stepwell.engine.ops.kernels import TORCH, Kernels, choose_kernels
from stepwell.engine.ops.recurrent import Points
from stepwell.engine.ops.recurrent_tokens import Steps, Tokens
from stepwell.engine.passes.batch import Batch, RequestRows
from stepwell.engine.passes.pages import DevicePages

MEMORY_BYTES_PER_S = 4.0e12  # of an H200, as far as kernels reach
LAYERS, ROUNDS, WINDOW = 8, 10, 4
BATCHES = ((1,), (1,) * 8, (1,) * 64, (8192,), (2048,) * 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`rule` is head (a delta net's), channel (Kimi's) or time (Mamba-2's)."""

    name: str
    rule: str
    keys: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.key_dim + self.heads * self.value_dim

    @property
    def state(self) -> int:
        return self.heads * self.key_dim * self.value_dim


SHAPES = (
    Shape(name="Qwen3-Next-80B", rule="head", keys=16, heads=32, key_dim=128, value_dim=128),
    Shape(name="Kimi-Linear-48B", rule="channel", keys=32, heads=32, key_dim=128, value_dim=128),
    Shape(name="Mamba-2 2.7B", rule="time", keys=1, heads=80, key_dim=128, value_dim=64),
    Shape(name="Falcon-H1-34B", rule="time", keys=2, heads=32, key_dim=256, value_dim=128),
)


class Layers:
    """A batch over some layers of a model, with random states and tokens."""

    def __init__(self, shape: Shape, lengths: tuple[int, ...]) -> None:
        sizes = {"ssm": shape.state * 4, "conv": WINDOW * shape.channels * 4}
        states = (StateSpec(name=n, shape=Point(), layers=LAYERS, row_bytes=size, dtype="fp32") for n, size in sizes.items())
        spec = ModelSpec(name=shape.name, states=tuple(states))
        rows = torch.zeros(len(lengths), spec.object_bytes(Kind.POINT), dtype=torch.uint8, device="cuda")
        pages = DevicePages(spec, {Kind.POINT: rows})
        nothing = np.empty(0, np.int32)
        segments = [
            RequestRows(tokens=np.zeros(length, np.int32), position=7, prefix_pages=nothing, point_page=page)
            for page, length in enumerate(lengths)
        ]
        self.shape, self.count = shape, sum(lengths)
        self.points = Points.of(Batch(segments, pages, device="cuda", dtype=torch.bfloat16))
        self.mixed_NC, self.gate_NC = _some(self.count, shape.channels), _some(self.count, shape.heads * shape.value_dim)
        self.weight_WC, self.norm_V = _some(WINDOW, shape.channels), _some(shape.value_dim)
        self.tokens = self._tokens()

    def _tokens(self) -> Tokens:
        shape, keys = self.shape, self.shape.keys * self.shape.key_dim
        query, key, value = self.mixed_NC.split((keys, keys, shape.heads * shape.value_dim), dim=1)
        per_head = (shape.heads, shape.key_dim) if shape.rule == "channel" else (shape.heads,)
        rate = -torch.rand(shape.heads, device="cuda")
        return Tokens(
            query_NKD=query.unflatten(1, (shape.keys, shape.key_dim)),
            key_NKD=key.unflatten(1, (shape.keys, shape.key_dim)),
            value_NHV=value.unflatten(1, (shape.heads, shape.value_dim)),
            steps=Steps(
                raw=_some(self.count, *per_head),
                bias=torch.randn(per_head, device="cuda") - 2.0,
                rate=rate[:, None] if shape.rule == "channel" else rate,
            ),
            beta_NH=None if shape.rule == "time" else _some(self.count, shape.heads),
            skip_H=torch.rand(shape.heads, device="cuda") if shape.rule == "time" else None,
        )

    def recur(self, kernels: Kernels) -> None:
        for layer in range(LAYERS):
            kernels.recur(self.points, layer, self.tokens)

    def convolve(self, kernels: Kernels) -> None:
        for layer in range(LAYERS):
            kernels.convolve(self.points, layer, self.mixed_NC, self.weight_WC, act=silu)

    def norm(self, kernels: Kernels) -> None:
        value_NHV, gate_NHV = self.tokens.value_NHV.contiguous(), self.gate_NC.view(self.tokens.value_NHV.shape)
        for _ in range(LAYERS):
            kernels.gated_norm(value_NHV, gate_NHV, self.norm_V, 1e-5)


def run(console: Console | None = None) -> None:
    """Prints the table."""
    kernels = choose_kernels("auto", "cuda", torch.bfloat16)
    table = Table(title=f"one recurrent layer, bf16 over fp32 states, {torch.cuda.get_device_name()}: microseconds")
    for name in ("model", "tokens", "limit", "recurrence", "of limit", "torch", "convolution", "torch", "norm", "torch"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for shape in SHAPES:
        for lengths in BATCHES:
            table.add_row(*_row(kernels, shape, lengths))
            torch.cuda.empty_cache()
    (console or Console(width=140)).print(table)
    (console or Console(width=140)).print(kernels.report.lines())


@torch.inference_mode()
def _row(kernels: Kernels, shape: Shape, lengths: tuple[int, ...]) -> list[str]:
    layers, steps = Layers(shape, lengths), lengths[0] == 1
    measure = partial(played_us if steps else median_us, rounds=ROUNDS, parts=LAYERS)
    parts = (layers.recur, layers.convolve, layers.norm)
    took_us = [measure(partial(part, which)) for part in parts for which in (kernels, TORCH)]
    limit_us = 2 * len(lengths) * shape.state * 4 / MEMORY_BYTES_PER_S * 1e6
    limit, share = (f"{limit_us:,.1f}", f"{limit_us / took_us[0]:.2f}") if steps else ("", "")
    numbers = [f"{each:,.1f}" for each in took_us]
    return [shape.name, f"{len(lengths)} x {lengths[0]:,}", limit, numbers[0], share, *numbers[1:]]


def _some(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    run()
