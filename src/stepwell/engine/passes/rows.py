"""How the rows of a state are stored: as plain numbers, or in eight bits with scales.

    Plain      numbers as they are
    Tiled      | e4m3 x width | fp32 scale of every 128 | bf16 x exact |         latents (656 bytes), index keys (132 bytes)
    Powers     | e4m3 x width | bf16 x exact | power of two of every 64, padded |   rows of DeepSeek-V4 (584 bytes)

A tile with a number that is not finite is read as NaN throughout, in either format: eight bits have no infinity, and a fault must
stay visible. Numbers of 1e-38 and less become 0.

A model knows the format of each of its states; `Rows` is one layer of a state, through which it reads and writes. If rows are
on the host alone, `LayerPlaces` looks them up, and no other code knows. Does not know requests.
Axes: P pages, R rows of a page, E what a row is stored as, N rows that are written, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad

from stepwell.base.errors import ConfigError
from stepwell.base.spec import Part
from stepwell.sparse.places import Places, Read

EIGHT = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
TILE, POWER_TILE, POWERS = 128, 64, 8  # channels a scale is for, and how many powers are padded to
POWER_BIAS = 127  # a power of 0 is stored as this
LEAST_POWER, NO_POWER = -126, 128  # the smallest number that is not subnormal, and what stands for no number
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MIXED = ("fp8", "bf16+fp32", "fp16+fp32")  # bytes until they are decoded: eight bits and scales, two kinds of numbers
_STORED = {**TORCH_DTYPES, **dict.fromkeys(_MIXED, torch.uint8)}


class RowFormat(Protocol):
    def encode(self, x_NC: torch.Tensor) -> torch.Tensor:
        """The stored form of these rows, `[N, E]`."""
        ...

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The channels of stored rows `[..., E]`, to compute with: `[..., C]`."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    def encode(self, x_NC: torch.Tensor) -> torch.Tensor:
        return x_NC

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return stored.to(dtype)


PLAIN = Plain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """`width` channels with a scale for each tile, followed by `exact` ones that are only rounded to bf16."""

    width: int
    exact: int = 0

    def encode(self, x_NC: torch.Tensor) -> torch.Tensor:
        scaled_NTX = _tiles(x_NC[:, : self.width].float(), TILE)
        scale_NT = _part_of_largest(scaled_NTX.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny * LARGEST))
        eight = (scaled_NTX / scale_NT[..., None]).clamp(-LARGEST, LARGEST).to(EIGHT).flatten(1)[:, : self.width]
        exact = x_NC[:, self.width :].to(torch.bfloat16)
        return torch.cat([_bytes(eight), _bytes(scale_NT), _bytes(exact)], dim=-1)

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        num_scales = -(-self.width // TILE)
        eight, scale, exact = stored.split((self.width, 4 * num_scales, 2 * self.exact), dim=-1)
        scaled = _tiles(_as(eight, EIGHT).float(), TILE) * _as(scale, torch.float32)[..., None]
        return torch.cat([scaled.flatten(-2)[..., : self.width].to(dtype), _as(exact, torch.bfloat16).to(dtype)], dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Powers:
    """Like `Tiled`, with smaller tiles whose scales are powers of two, one byte each."""

    width: int
    exact: int

    def encode(self, x_NC: torch.Tensor) -> torch.Tensor:
        scaled_NTX = _tiles(x_NC[:, : self.width].float(), POWER_TILE)
        most_NT = _part_of_largest(scaled_NTX.abs().amax(-1))
        part_NT, exponent_NT = torch.frexp(most_NT)  # a part in [0.5, 1): the same on every device, as a logarithm is not
        power_NT = (exponent_NT - (part_NT == 0.5).int()).float().clamp(LEAST_POWER, NO_POWER)
        power_NT = power_NT.masked_fill(most_NT == 0, LEAST_POWER).masked_fill(~most_NT.isfinite(), NO_POWER)
        eight = (scaled_NTX / torch.exp2(power_NT)[..., None]).clamp(-LARGEST, LARGEST).to(EIGHT).flatten(1)[:, : self.width]
        exact = x_NC[:, self.width :].to(torch.bfloat16)
        powers = pad((power_NT + POWER_BIAS).to(torch.uint8), (0, self._scale_bytes - power_NT.shape[1]))
        return torch.cat([_bytes(eight), _bytes(exact), powers], dim=-1)

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        eight, exact, powers = stored.split((self.width, 2 * self.exact, self._scale_bytes), dim=-1)
        scale = torch.exp2(powers[..., : -(-self.width // POWER_TILE)].float() - POWER_BIAS)
        scaled = _tiles(_as(eight, EIGHT).float(), POWER_TILE) * scale[..., None]
        return torch.cat([scaled.flatten(-2)[..., : self.width].to(dtype), _as(exact, torch.bfloat16).to(dtype)], dim=-1)

    @property
    def _scale_bytes(self) -> int:
        return POWERS * -(-self.width // (POWERS * POWER_TILE))


def latent_rows(dtype: str, width: int, exact: int) -> RowFormat:
    """The format of an MLA latent and its rotated key, or of an index key (no exact channels)."""
    return Tiled(width=width, exact=exact) if dtype == "fp8" else PLAIN


def shared_rows(dtype: str, width: int, exact: int) -> RowFormat:
    """The format of DeepSeek-V4, whose rows are key and value in one."""
    return Powers(width=width, exact=exact) if dtype == "fp8" else PLAIN


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlaces:
    """Where the rows of one layer are, for pages by the ids of prefix pages."""

    places: Places
    layer: int
    group: int  # whose selection the layer uses
    read_rows: Read = Places.read

    @property
    def host_PRE(self) -> torch.Tensor:
        """The layer in pages of the host."""
        return self.places.host_PLRE[:, self.layer]

    def read(self, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Stored rows `[..., E]`, wherever they are."""
        return self.read_rows(self.places, self.layer, page, row, self.group)

    def whole(self, table: torch.Tensor) -> torch.Tensor:
        """All stored rows of pages `[..., P]`: `[..., P, R, E]`."""
        row_R = torch.arange(self.places.page_rows, device=table.device)
        page = table[..., None].expand(*table.shape, len(row_R))
        return self.read(page, row_R.expand_as(page))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One layer of a state, as a model reads and writes it: in `dtype`, whatever the stored format.

    With `places`, reads name prefix pages, and `stored_PRE` are ROWS pages: use `places` to find them. Writes always name the
    pages of `stored_PRE`.
    """

    stored_PRE: torch.Tensor
    format: RowFormat
    dtype: torch.dtype
    places: LayerPlaces | None = None

    def write(self, page_N: torch.Tensor, row_N: torch.Tensor, x_NC: torch.Tensor) -> None:
        self.stored_PRE[page_N, row_N] = self.format.encode(x_NC).to(self.stored_PRE.dtype)

    def whole(self, table: torch.Tensor) -> torch.Tensor:
        """All rows of whole pages, in their order: `[..., P, R, C]` for a table of pages `[..., P]`."""
        if self.places is not None:
            return self.format.decode(self.places.whole(table), self.dtype)
        stored = self.stored_PRE.index_select(0, table.flatten()).unflatten(0, table.shape)
        return self.format.decode(stored, self.dtype)

    def some(self, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Single rows, `[..., C]` for pages and rows `[...]`."""
        return self.written(page, row) if self.places is None else self.format.decode(self.places.read(page, row), self.dtype)

    def written(self, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Like `read`, for pages that the pass writes to, named as for `write`: their rows are never on the host alone."""
        return self.format.decode(self.stored_PRE[page, row], self.dtype)


def part_PLRE(rows: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """A part of every page as `[page, layer, row, element]`, wherever the part has its rows. Without a copy."""
    part_PX = rows[:, part.offset : part.offset + part.size_bytes].view(dtype)
    size = part_PX.element_size()
    shape = (len(part_PX), part.layers, part.rows, part.row_bytes // size)
    strides = (part_PX.stride(0), part.layer_stride // size, part.row_stride // size, 1)
    return part_PX.as_strided(shape, strides, part_PX.storage_offset())


def typed_PLRE(rows: torch.Tensor, part: Part, dtype: str) -> torch.Tensor:
    """Rows as elements, for a state that is stored as `dtype`. Raises ConfigError for an unknown one."""
    if dtype not in _STORED:
        raise ConfigError(f"the engine cannot compute with a state of {dtype}; choose one of: {', '.join(_STORED)}")
    return part_PLRE(rows, part, _STORED[dtype])


def _tiles(x: torch.Tensor, size: int) -> torch.Tensor:
    tiles: torch.Tensor = pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    return tiles


def _part_of_largest(x: torch.Tensor) -> torch.Tensor:
    """`x / LARGEST`, rounded once: divided by a plain number, CUDA multiplies with its inverse."""
    return x / torch.full_like(x, LARGEST)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return _as(x, torch.uint8)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes as other numbers."""
    flat = x.contiguous().view(-1)
    # a single row is contiguous wherever it lies, but wider numbers cannot begin at any byte
    if flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % dtype.itemsize:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(dtype).view(*x.shape[:-1], x.shape[-1] * x.element_size() // dtype.itemsize)
