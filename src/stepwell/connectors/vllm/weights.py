"""The weights that a worker holds now, as one digest, and whether they are known after a reset.

vLLM announces that caches must be emptied before `sleep` or a change of weights, but never whether weights have changed; only
their bytes show it. `CurrentWeights` reads all parameters and buffers on their own device, at memory speed. `WeightCheck`, on the
scheduler's side, tracks the query after a reset until every rank has answered. Changes nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stepwell.connectors.vllm.orders import WeightsAnswer

WORD_BYTES = 8
CHUNK_WORDS = 4 << 20  # 32 MiB, and three times that for intermediate results
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's


class CurrentWeights:
    """The weights of the models that contain some layers."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._models = _models_of(list(layers))
        self._first = self._digest()

    def name(self) -> str | None:
        """Empty for the weights at start-up, otherwise a digest; None if the model was not found."""
        now = self._digest()
        return "" if now == self._first and now is not None else now

    def _digest(self) -> str | None:
        state = blake2b(digest_size=16)
        for model in self._models:
            for name, tensor in _tensors(model):
                state.update(repr((name, str(tensor.dtype), tuple(tensor.shape), sum_of(tensor))).encode())
        return state.hexdigest() if self._models else None


def _models_of(layers: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The outermost modules that contain these layers. Modules do not know their parents, so all modules of the process are
    searched.
    """
    parents: dict[int, list[torch.nn.Module]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            for child in each.__dict__.get("_modules", {}).values():
                parents.setdefault(id(child), []).append(each)
    found: dict[int, torch.nn.Module] = {}
    seen: set[int] = set()
    open_ = list(layers)
    while open_:
        module = open_.pop()
        if id(module) not in seen:
            seen.add(id(module))
            around = parents.get(id(module), [])
            open_ += around
            if not around:
                found[id(module)] = module
    alone = {id(layer) for layer in layers}
    return [module for key, module in found.items() if key not in alone]  # a single layer is not a model


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield from _plain(name, tensor)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensors; quantized tensors hold several."""
    whole: Any = tensor
    if is_traceable_wrapper_subclass(whole):
        for part in whole.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(whole, part))
    elif tensor.device.type != "meta":
        yield name, tensor


@torch.no_grad()
def sum_of(tensor: torch.Tensor) -> int:
    """A 64-bit hash of a tensor's bytes. CPUs and other devices use different functions."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return int(xxhash.xxh3_64_intdigest(raw.numpy().data)) if raw.device.type == "cpu" else sum_of_words(raw)


def sum_of_words(raw: torch.Tensor) -> int:
    """The same for bytes on a GPU: mixes each word with its position, and adds them up."""
    whole = len(raw) // WORD_BYTES * WORD_BYTES
    words = raw[:whole].view(torch.int64) if raw.data_ptr() % WORD_BYTES == 0 else raw[:whole].clone().view(torch.int64)
    total = int.from_bytes(bytes(raw[whole:].tolist()), "little") * 3 + len(raw)
    for start in range(0, len(words), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        mixed = torch.arange(start + 1, start + 1 + len(part), dtype=torch.int64, device=part.device).mul_(_STEP).add_(part)
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
        total += int(mixed.sum().item())
    return total & (1 << 64) - 1


class Held(Enum):
    """Which weights the workers hold."""

    FIRST = "those at start-up"
    OTHER = "others, with a digest"
    UNKNOWN = "not readable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    held: Held
    digest: str = ""


@dataclass(slots=True)
class WeightCheck:
    """One thread, the scheduler's."""

    pending: bool = False  # after a reset, until every rank has answered
    wanted: bool = False  # a request waits for the answer
    _number: int = 0
    _is_asked: bool = False
    _answers: dict[int, str | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Starts a new check; answers to earlier queries no longer count."""
        self.pending, self.wanted, self._is_asked, self._answers = True, False, False, {}
        self._number += 1

    def question(self) -> int:
        if not self.wanted or self._is_asked:
            return 0
        self._is_asked = True
        return self._number

    def answered(self, answers: Mapping[int, WeightsAnswer], num_ranks: int) -> Weights | None:
        """The result, once the last rank has answered."""
        self._answers |= {rank: name for rank, (number, name) in answers.items() if self.pending and number == self._number}
        if not self.pending or len(self._answers) < num_ranks:
            return None
        self.pending = self.wanted = False
        names = [self._answers[rank] for rank in sorted(self._answers)]
        if None in names:
            return Weights(held=Held.UNKNOWN)
        if not any(names):
            return Weights(held=Held.FIRST)
        return Weights(held=Held.OTHER, digest=blake2b(repr(names).encode(), digest_size=16).hexdigest())
