"""A checkpoint's tensors by name, as models take them: each once, in the right type, on the right device.

Knows no file formats: a `TensorSource` reads. What nobody took is an error, for a model that ignores a tensor computes
something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from stepwell.base.errors import ConfigError


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
    """Hands out tensors. Not for two threads at once."""

    def __init__(self, source: TensorSource, *, dtype: torch.dtype, device: str | torch.device) -> None:
        self._source = source
        self._left = dict.fromkeys(source.names())
        self.dtype = dtype
        self.device = device

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, which must have this shape. Raises ConfigError when it is not there, was taken before, or is another."""
        if name not in self._left:
            raise ConfigError(f"the checkpoint has no tensor {name!r}, or it was used twice: is it complete, and of this model?")
        del self._left[name]
        tensor = self._source.read(name)
        if shape and tuple(tensor.shape) != shape:
            raise ConfigError(f"tensor {name!r} has shape {list(tensor.shape)}, but its config says {list(shape)}")
        return tensor.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def joined(self, names: Iterable[str]) -> torch.Tensor:
        """Several tensors as one, along their first axis: one product instead of several."""
        return torch.cat([self.take(name) for name in names])

    def skip(self, *beginnings: str) -> None:
        """Says that tensors with these beginnings are not needed."""
        self._left = {name: None for name in self._left if not name.startswith(beginnings)}

    def finish(self) -> None:
        """Raises ConfigError when a tensor is left over."""
        if self._left:
            some = ", ".join(list(self._left)[:5])
            raise ConfigError(f"the checkpoint has {len(self._left)} tensor(s) this model does not know, among them {some}")
