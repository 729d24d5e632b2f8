"""The head of a GGUF file: its metadata, and where each tensor lies. Reads no tensor.

    magic | version | tensor count | field count | fields ... | tensor records ... | padding | tensor data ...

Takes the file as hostile: every length is checked against the rest of the file before anything is read or allocated.
The `gguf` package has a reader too; it makes an array per element, which is 19 s for a vocabulary of 262,144 tokens.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from stepwell.base.errors import ConfigError

_VERSIONS = (2, 3)
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_MAX_SIDE = 1 << 40  # also keeps products of four sides exact and small enough to print


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies. `shape` is in torch's order: the last axis is the one whose elements are neighbours."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Header:
    """`fields` holds numbers, flags, strings, lists of strings and NumPy arrays."""

    fields: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Raises ConfigError for a file that is not one or not whole."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path.name).header()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ConfigError(f"{path} cannot be read: {error}") from None


class _Reader:
    """A place in the file that moves on with each read."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data, self._name, self._at = data, name, 0

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise self._bad("does not begin with GGUF")
        if (version := self._number("<I")) not in _VERSIONS:
            raise self._bad(f"has version {version}, known are 2 and 3 (little endian)")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        fields: dict[str, object] = {}
        for _ in range(num_fields):  # each takes at least 12 bytes, so a false count soon meets the file's end
            name = self._text()
            fields[name] = self._value(self._number("<I"))
        records = [self._record() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._bad("has an alignment that is none")
        start = -(-self._at // alignment) * alignment
        return Header(fields=fields, tensors={record[0]: self._placed(*record, start) for record in records})

    def _record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        axes = self._number("<I")
        if axes > _MAX_AXES:
            raise self._bad(f"has a tensor {name!r:.60} of {axes} axes")
        sides = tuple(self._number("<Q") for _ in range(axes))
        return name, sides[::-1], self._number("<I"), self._number("<Q")

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> StoredTensor:
        try:
            quantization = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError):
            raise self._bad(f"has a tensor {name!r:.60} of unknown type {kind}") from None
        if not shape or not all(0 < side < _MAX_SIDE for side in shape) or shape[-1] % block:
            raise self._bad(f"has a tensor {name!r:.60} of impossible shape {list(shape)}")
        size_bytes = prod(shape) // block * block_bytes
        if start + offset + size_bytes > len(self._data):
            raise self._bad(f"ends before its tensor {name!r:.60} does: download it again")
        return StoredTensor(kind=quantization, shape=shape, offset=start + offset, size_bytes=size_bytes)

    # ---- single values --------------------------------------------------------------------------------

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("<I"), self._number("<Q"))
        array = self._numbers(kind, 1)
        # 1e-5 was written as the nearest float32; its shortest decimal is what was meant.
        return float(str(array[0])) if array.dtype == np.float32 else array[0].item()

    def _array(self, kind: int, count: int) -> object:
        if kind != _STRING:
            return self._numbers(kind, count)
        return [self._text() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        if kind not in _SCALARS:
            raise self._bad(f"has a field of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def _text(self) -> str:
        # What is not UTF-8 becomes a replacement character: some vocabularies hold raw bytes, and no name we look for does.
        return self._take(self._number("<Q")).decode("utf-8", errors="replace")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise self._bad("ends in the middle of its header: download it again")
        taken, self._at = self._data[self._at : end], end
        return taken

    def _bad(self, why: str) -> ConfigError:
        return ConfigError(f"{self._name} is not a GGUF file we can read: it {why}")
