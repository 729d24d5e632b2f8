"""What memory takes, measured on the pages, is what the spec says."""

from __future__ import annotations

import pytest

from engine.families import FAMILIES
from engine.small import small

pytest.importorskip("transformers")

EIGHT_BITS = ("deepseek_v3", "deepseek_v32", "deepseek_v4")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8"])
def test_measured_bytes_are_those_of_the_spec(family: str, kv_dtype: str) -> None:
    if kv_dtype == "fp8" and family not in EIGHT_BITS:
        return  # refused, which is tested elsewhere
    page_tokens = 96 if family == "deepseek_v4" else 8  # of whole groups, and windows of whole pages
    with small(family, page_tokens=page_tokens, kv_dtype=kv_dtype) as engine:
        spec, measured = engine.cache.spec, engine.footprint
        assert measured.bytes_per_token == spec.bytes_per_token
        assert measured.checkpoint_bytes == spec.checkpoint_bytes()
        assert measured.bytes_per_token or measured.checkpoint_bytes
