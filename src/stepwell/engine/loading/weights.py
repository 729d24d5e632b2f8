"""A checkpoint's tensors by name, as models take them: each once, in the right type, on the right device.

    take(name, Share(4 from 4 of 8), 3)           rows 4 to 7 of 8: what this rank has of them, and no other byte is read
    take(name, (Share(2 from 2 of 4), 5), 3)      rows 2 and 3 of the first 4 of 9, and the 5 after them

Knows no file formats: a `TensorSource` reads. A tensor left over is an error, because a model that ignores one computes
something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Protocol

import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.loading.eight_bits import Block, is_eight_bits, scale_names, unscaled
from stepwell.engine.ranks import ALONE, Ranks, Share

Size = int | tuple[int, ...] | None  # of an axis, or of its pieces in order; None if a config does not say it
Region = tuple[slice, ...]  # of a tensor: a slice for each axis, or nothing for all of it


class TensorSource(Protocol):
    """Where tensors come from. Names are those of Hugging Face checkpoints."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        ...

    def read(self, name: str, region: Region = ()) -> torch.Tensor:
        """One tensor or a region of it, in whatever type it is stored."""
        ...


class HeldTensors:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, region: Region = ()) -> torch.Tensor:
        return self._tensors[name][region] if region else self._tensors[name]


class _Renamed:
    def __init__(self, source: TensorSource, name_of: Callable[[str], str]) -> None:
        self._source = source
        self._theirs = {name_of(name): name for name in source.names()}

    def names(self) -> Iterable[str]:
        return self._theirs.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._theirs[name])

    def read(self, name: str, region: Region = ()) -> torch.Tensor:
        return self._source.read(self._theirs[name], region)


class Weights:
    """Hands out tensors. Those kept in eight bits are multiplied by their scales, which count as used. Not for two threads."""

    def __init__(
        self, source: TensorSource, *, dtype: torch.dtype, device: str | torch.device, block: Block | None = None,
        config: Mapping[str, object] | None = None, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        """`block` is the part of a matrix with one scale, if the config says it; else shapes do. `config` names fields in errors.
        `ranks` shares tensors by the sizes that they are taken with.
        """
        self._source = source
        self._left = dict.fromkeys(source.names())
        self._scale_of: dict[str, str] = {}  # scales in use, by their tensors
        self._block = block
        self._config = config or {}
        self.dtype = dtype
        self.device = device
        self.ranks = ranks

    def names(self) -> Iterable[str]:
        """Names of the tensors that were not taken."""
        return self._left.keys()

    def has(self, name: str) -> bool:
        return name in self._left

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Offers all tensors under other names. To be called before any is taken."""
        self._source = _Renamed(self._source, name_of)
        self._left = dict.fromkeys(self._source.names())

    def take(self, name: str, *shape: Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, which must have this shape. Raises ConfigError when it is not there, was taken before, or is another.

        Also when it is in eight bits and its scale is not there, or not of its size: without one the numbers mean nothing.
        """
        if name not in self._left:
            raise ConfigError(f"the checkpoint has no tensor {name!r}, or it was used twice: is it complete, and of this model?")
        del self._left[name]
        if shape:
            self._must_be(name, self._source.shape(name), tuple(_whole(size) for size in shape))
        shared = any(isinstance(each, Share) for size in shape for each in _pieces(size))
        if not shared:
            return self._read(name, (), dtype or self.dtype)
        axes = [_slices(size) for size in shape]
        parts = [self._read(name, region, dtype or self.dtype) for region in product(*axes)]
        cut = next((axis for axis, slices in enumerate(axes) if len(slices) > 1), 0)
        assert len(parts) == len(axes[cut]), f"{name!r} is cut into pieces along two axes: {shape=}"
        return torch.cat(parts, dim=cut) if len(parts) > 1 else parts[0]

    def shared(self, size: int | None, what: str, *, of: str, axis: int) -> int | None:
        """This rank's part of a size. If a config does not say it, the tensor `of` does."""
        if size is None and self.ranks.size > 1 and self.has(of):
            size = self._source.shape(of)[axis]
        return None if size is None else self.ranks.share(size, what)

    def joined(self, sizes: Mapping[str, Size], *rest: Size) -> torch.Tensor:
        """Several tensors as one, along their first axis, with the size of each: one product instead of several."""
        return torch.cat([self.take(name, first, *rest) for name, first in sizes.items()])

    def skip(self, *beginnings: str) -> None:
        """Tensors with these prefixes are not needed."""
        self._left = {name: None for name in self._left if not name.startswith(beginnings)}

    def finish(self) -> None:
        """Raises ConfigError when a tensor is left over."""
        if self._left:
            some = ", ".join(list(self._left)[:5])
            raise ConfigError(f"the checkpoint has {len(self._left)} tensor(s) this model does not know, among them {some}")

    def _read(self, name: str, region: Region, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._source.read(name, region)
        scale = self._scale(name, tensor)
        if scale is None:
            return tensor.to(device=self.device, dtype=dtype).contiguous()
        whole = self._source.shape(name)
        return unscaled(name, tensor.to(self.device), scale, block=self._block, dtype=dtype, whole=whole, region=region)

    def _must_be(self, name: str, found: tuple[int, ...], wanted: tuple[int | None, ...]) -> None:
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
        scale = next((each for each in scale_names(name) if each in self._left or self._scale_of.get(name) == each), None)
        if is_eight_bits(tensor):
            if scale is None:
                raise ConfigError(f"tensor {name!r} is in eight bits, and the checkpoint has no {scale_names(name)[0]!r} for it")
            self._left.pop(scale, None)
            self._scale_of[name] = scale
            return self._source.read(scale)
        if scale is not None and not tensor.is_floating_point():
            raise ConfigError(f"tensor {name!r} is packed as {tensor.dtype}; only weights in eight-bit floats are unpacked here")
        return None


def _pieces(size: Size) -> tuple[int, ...]:
    """The pieces of an axis whose size is known; none of any other."""
    return () if size is None else size if isinstance(size, tuple) else (size,)


def _whole(size: Size) -> int | None:
    """What an axis has on all ranks together."""
    return None if size is None else sum(each.whole if isinstance(each, Share) else each for each in _pieces(size))


def _slices(size: Size) -> list[slice]:
    """Where the pieces of an axis lie that this rank has; one slice for all where none is shared."""
    pieces, slices, at = _pieces(size), [], 0
    if not any(isinstance(each, Share) for each in pieces):
        return [slice(None)]
    for each in pieces:
        start = at + (each.start if isinstance(each, Share) else 0)
        slices.append(slice(start, start + int(each)))
        at += each.whole if isinstance(each, Share) else each
    return slices
