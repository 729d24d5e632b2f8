"""A checkpoint's tensors by name, as models take them: each once, in the right type, on the right device.

Knows no file formats: a `TensorSource` reads. What nobody took is an error, for a model that ignores a tensor computes
something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.eight_bits import Block, is_eight_bits, scale_names, unscaled

Size = int | None  # of an axis; None where a config does not say it


class TensorSource(Protocol):
    """Where tensors come from. Names are those of Hugging Face checkpoints."""

    def names(self) -> Iterable[str]: ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in whatever type it is stored."""
        ...


class HeldTensors:
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class Weights:
    """Hands out tensors. Those kept in eight bits are multiplied by their scales, which count as used. Not for two threads."""

    def __init__(
        self, source: TensorSource, *, dtype: torch.dtype, device: str | torch.device, block: Block | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        """`block` is what a scale is for, where the config says it; else shapes do. `config` is for words: who said a size."""
        self._source = source
        self._left = dict.fromkeys(source.names())
        self._block = block
        self._config = config or {}
        self.dtype = dtype
        self.device = device

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, which must have this shape. Raises ConfigError when it is not there, was taken before, or is another.

        Also when it is in eight bits and its scale is not there, or not of its size: without one the numbers mean nothing.
        """
        if name not in self._left:
            raise ConfigError(f"the checkpoint has no tensor {name!r}, or it was used twice: is it complete, and of this model?")
        del self._left[name]
        tensor = self._source.read(name)
        if shape:
            self._must_be(name, tuple(tensor.shape), shape)
        scale = self._scale(name, tensor)
        if scale is not None:
            return unscaled(name, tensor.to(self.device), scale, block=self._block, dtype=dtype or self.dtype)
        return tensor.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def joined(self, sizes: Mapping[str, Size], *rest: Size) -> torch.Tensor:
        """Several tensors as one, along their first axis, whose size each name has beside it: one product instead of several."""
        return torch.cat([self.take(name, first, *rest) for name, first in sizes.items()])

    def skip(self, *beginnings: str) -> None:
        """Says that tensors with these beginnings are not needed."""
        self._left = {name: None for name in self._left if not name.startswith(beginnings)}

    def finish(self) -> None:
        """Raises ConfigError when a tensor is left over."""
        if self._left:
            some = ", ".join(list(self._left)[:5])
            raise ConfigError(f"the checkpoint has {len(self._left)} tensor(s) this model does not know, among them {some}")

    def _must_be(self, name: str, found: tuple[int, ...], wanted: tuple[Size, ...]) -> None:
        if len(found) == len(wanted) and all(size in (None, has) for has, size in zip(found, wanted, strict=True)):
            return
        wrong = set(wanted) - set(found)
        said = ", ".join(sorted(field for field, value in self._config.items() if type(value) is int and value in wrong)[:4])
        shape = ["any" if size is None else size for size in wanted]
        raise ConfigError(
            f"tensor {name!r} has shape {list(found)}, but its config says {shape}{f' (see {said})' if said else ''}: "
            f"config and weights are of two models"
        )

    def _scale(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The scale of a tensor that must have one."""
        beside = next((each for each in scale_names(name) if each in self._left), None)
        if is_eight_bits(tensor):
            if beside is None:
                raise ConfigError(f"tensor {name!r} is in eight bits, and the checkpoint has no {scale_names(name)[0]!r} for it")
            del self._left[beside]
            return self._source.read(beside)
        if beside is not None and not tensor.is_floating_point():
            raise ConfigError(f"tensor {name!r} is packed as {tensor.dtype}; only weights in eight-bit floats are unpacked here")
        return None
