"""Weights that a checkpoint stores in eight bits, with a scale for each block of a matrix, as numbers to compute with.

    weight  [..., rows, columns] in eight bits        scale  [..., blocks down, blocks across]

        |  s00  |  s01  |s02|      blocks are of one size, usually 128 x 128; those at the edges may be cut short
        |  s10  |  s11  |s12|      a scale without axes is for the whole tensor

Arithmetic and names only: reads no files.
"""

from __future__ import annotations

from math import prod

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields

Block = tuple[int, int]

USUAL_BLOCK = 128
_POWER_BIAS = 127  # of a scale that is kept as the power of two alone, in a byte


def is_eight_bits(tensor: torch.Tensor) -> bool:
    """A float of one byte. Means nothing without its scale."""
    return tensor.is_floating_point() and tensor.element_size() == 1


def scale_names(name: str) -> tuple[str, ...]:
    """The possible names of the scale of a tensor."""
    shorter = (f"{name.removesuffix('weight')}scale",) if name.endswith(".weight") else ()
    return (f"{name}_scale_inv", f"{name}_scale", *shorter)


def block_in(*configs: Fields) -> Block | None:
    """The block size that the first of several configs says its weights have; None when none of them does."""
    for config in configs:
        quantized = config.section("quantization_config")
        if quantized.has("weight_block_size"):
            size = quantized.values["weight_block_size"]
            if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
                raise ConfigError(f"config field {quantized.path}weight_block_size must be two sizes, got {size!r:.60}")
            return size[0], size[1]
    return None


def unscaled(
    name: str, tensor: torch.Tensor, scale: torch.Tensor, *, block: Block | None, dtype: torch.dtype,
    whole: tuple[int, ...] | None = None, region: tuple[slice, ...] = (),
) -> torch.Tensor:  # fmt: skip
    """The numbers of `tensor`, in `dtype`. `block` None: blocks have the size that both shapes imply.

    `region` is its place in its matrices, whose shape is `whole`; the scale is that of all of them.

    Products are computed in fp32, matrix by matrix: whole experts in fp32 would not fit in memory with the model.
    Raises ConfigError that names the tensor when its scale has not one number for each block.
    """
    factor = _factor(scale).to(tensor.device)
    if factor.ndim == 0 or factor.shape == (1,):
        return (tensor.float() * factor).to(dtype)
    shape, (down, across) = whole or tuple(tensor.shape), region[-2:] or (slice(None), slice(None))
    rows, columns = _block(name, shape, factor, block)
    made = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    for out, matrix, scales in zip(*map(_matrices, (made, tensor, factor)), strict=True):
        wide = scales.repeat_interleave(rows, 0)[: shape[-2]].repeat_interleave(columns, 1)[:, : shape[-1]]
        out.copy_(matrix.float() * wide[down, across])
    return made


def _matrices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(prod(tensor.shape[:-2]), *tensor.shape[-2:])


def _factor(scale: torch.Tensor) -> torch.Tensor:
    """The numbers of a scale. Whole bytes are powers of two, with no number format of their own in older files."""
    return torch.exp2(scale.float() - _POWER_BIAS) if scale.dtype == torch.uint8 else scale.float()


def _block(name: str, shape: tuple[int, ...], scale: torch.Tensor, block: Block | None) -> Block:
    if len(shape) >= 2 and scale.ndim == len(shape) and tuple(scale.shape[:-2]) == shape[:-2]:
        axes = list(zip(shape[-2:], scale.shape[-2:], strict=True))
        rows, columns = block or (_guess(*axes[0]), _guess(*axes[1]))
        if all(size and -(-size // channels) == count for channels, (size, count) in zip((rows, columns), axes, strict=True)):
            return rows, columns
    said = f"blocks of {block[0]} x {block[1]}" if block else "blocks of one size"
    raise ConfigError(
        f"tensor {name!r} of shape {list(shape)} has a scale of shape {list(scale.shape)}, "
        f"which does not have one number for each of its {said}: download both again"
    )


def _guess(size: int, count: int) -> int:
    """Channels of a block when `count` blocks cover `size` channels: the usual ones, else all of one size."""
    if -(-size // USUAL_BLOCK) == count:
        return USUAL_BLOCK
    return max(size // max(count, 1), 1)
