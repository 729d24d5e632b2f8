"""Tensors in safetensors files, one or many, read when asked for. Knows no other format, and nothing of directories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stepwell.base.errors import ConfigError


class SafetensorsFiles:
    """A TensorSource over open files. Holds them mapped; they must stay as they are meanwhile."""

    def __init__(self, files: Sequence[Path], *, places: Mapping[str, str] | None = None) -> None:
        """`places` is an index, tensor name -> file name; without it every tensor of every file counts.

        Raises ConfigError for files that are not whole, and for an index that contradicts them.
        """
        self._files: dict[str, Any] = {path.name: _opened(path) for path in files}
        held = {name: set(file.keys()) for name, file in self._files.items()}
        self._places = _places(held) if places is None else dict(places)
        for tensor, file in self._places.items():
            if tensor not in held.get(file, ()):
                raise ConfigError(f"the index says tensor {tensor!r:.80} is in {file!r:.80}, but it is not: download both again")

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._places[name]].get_slice(name).get_shape())

    def read(self, name: str, region: tuple[slice, ...] = ()) -> torch.Tensor:
        """Reads only the rows of a region from the file."""
        file = self._places[name]
        try:
            opened = self._files[file]
            tensor: torch.Tensor = opened.get_slice(name)[region] if region else opened.get_tensor(name)
        except (SafetensorError, RuntimeError, AttributeError) as error:  # the last two: a type this torch does not have
            raise ConfigError(f"tensor {name!r:.80} in {file} cannot be read: {error}") from None
        return tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}; download it again") from None


def _places(held: Mapping[str, set[str]]) -> dict[str, str]:
    return {tensor: file for file, tensors in held.items() for tensor in sorted(tensors)}
