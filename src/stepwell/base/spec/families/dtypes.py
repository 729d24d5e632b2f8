"""Number formats of cached rows, and the bytes one row takes in each of them.

Arithmetic only. In fp8 the latent, index and compressed rows carry their own scales, which is why they
are wider than one byte per element; the layouts are the ones the serving engines' sparse kernels read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.fields import Fields

WIDTH_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
KV_DTYPES = tuple(WIDTH_BYTES)
DEFAULT_DTYPE = "bf16"

_MODEL_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ROPE_WIDTH_BYTES = 2  # rotated channels stay bf16 inside fp8 rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """`kv` is what attention rows are kept in, `model` what everything else is computed in."""

    kv: str
    model: str

    @property
    def kv_width(self) -> int:
        return WIDTH_BYTES[self.kv]

    @property
    def model_width(self) -> int:
        return WIDTH_BYTES[self.model]

    def latent_row_bytes(self, rank: int, rope: int) -> int:
        """One MLA latent and its rotated key. fp8: a float scale for each 128 channels of the latent."""
        if self.kv == "fp8":
            return rank + 4 * ceil(rank / 128) + rope * _ROPE_WIDTH_BYTES
        return (rank + rope) * self.kv_width

    def index_row_bytes(self, dim: int) -> int:
        """One key of a sparse-attention index. fp8: a float scale for each 128 channels."""
        return dim + 4 * ceil(dim / 128) if self.kv == "fp8" else dim * self.kv_width

    def shared_row_bytes(self, dim: int, rope: int) -> int:
        """One DeepSeek-V4 row, key and value in one. fp8: a byte of scale for each 64 channels, padded to 8."""
        if self.kv == "fp8":
            return dim - rope + rope * _ROPE_WIDTH_BYTES + 8 * ceil((dim - rope) / 512)
        return dim * self.kv_width


def choose_dtypes(kv_dtype: str | None, text: Fields, outer: Fields, *, model_dtype: str | None = None) -> Dtypes:
    """The formats to cache in: the caller's choice, else the one the config says the model runs in, else bf16.

    A choice other than fp8 is the format the whole model runs in, unless `model_dtype` says another; fp8 only shrinks attention
    rows.
    """
    configured = model_dtype or _configured(text) or _configured(outer) or DEFAULT_DTYPE
    chosen = configured if kv_dtype is None else kv_dtype
    if chosen not in WIDTH_BYTES:
        raise SpecError(f"unknown KV dtype {chosen!r}; choose one of: {', '.join(KV_DTYPES)}")
    return Dtypes(kv=chosen, model=configured if chosen == "fp8" or model_dtype else chosen)


def recurrent_dtype(config: Fields) -> str:
    """Recurrent state is kept in fp32 even by 16-bit models, unless the config says otherwise."""
    return _MODEL_DTYPES.get(config.text("mamba_ssm_dtype"), "fp32")


def _configured(config: Fields) -> str | None:
    written = config.text("dtype") or config.text("torch_dtype")
    return _MODEL_DTYPES.get(written.removeprefix("torch."))
