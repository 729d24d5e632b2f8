"""The weights that a worker holds now, as one digest: whether they are still those of the start.

vLLM says that caches must be emptied, before `sleep` or a change of weights, and never whether weights have changed: their bytes
do. Reads all parameters and buffers on their own device, at the speed of its memory. Changes nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

WORD_BYTES = 8
CHUNK_WORDS = 4 << 20  # 32 MiB, and three times that for intermediate results
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's


class WeightsNow:
    """Those of the model that some layers are part of."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._models = _models_of(list(layers))
        self._first = self._digest()

    def name(self) -> str | None:
        """Empty for the weights of the start, else a digest; None where the model was not found."""
        now = self._digest()
        return "" if now == self._first and now is not None else now

    def _digest(self) -> str | None:
        state = blake2b(digest_size=16)
        for model in self._models:
            for name, tensor in _tensors(model):
                state.update(repr((name, str(tensor.dtype), tuple(tensor.shape), sum_of(tensor))).encode())
        return state.hexdigest() if self._models else None


def _models_of(layers: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The outermost modules around these layers. Modules do not know their parents, so all of the process are searched."""
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
    return [module for key, module in found.items() if key not in alone]  # a layer by itself is no model


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield from _plain(name, tensor)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantized tensors keep their bytes in others."""
    whole: Any = tensor
    if is_traceable_wrapper_subclass(whole):
        for part in whole.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(whole, part))
    elif tensor.device.type != "meta":
        yield name, tensor


@torch.no_grad()
def sum_of(tensor: torch.Tensor) -> int:
    """64 bits that follow from every bit of a tensor and from where it is. Other devices than a CPU give other sums."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return int(xxhash.xxh3_64_intdigest(raw.numpy().data)) if raw.device.type == "cpu" else sum_of_words(raw)


def sum_of_words(raw: torch.Tensor) -> int:
    """The same for bytes on a GPU: words are mixed with their places, and added."""
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
