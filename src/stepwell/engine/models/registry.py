"""From a config to a model: which module builds which `model_type`. The only place that knows all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType

import torch

from stepwell.base.errors import ConfigError, SpecError
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families import from_config
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.families.summaries import DSA
from stepwell.engine.approximate.selectors import Sparse, selector_for
from stepwell.engine.loading.eight_bits import block_in
from stepwell.engine.loading.weights import TensorSource, Weights
from stepwell.engine.models import (
    deepseek_v3,
    deepseek_v4,
    deepseek_v4_names,
    deepseek_v32,
    dense,
    falcon_h1,
    gemma3,
    gpt_oss,
    kimi_linear,
    mamba2,
    qwen3_next,
)
from stepwell.engine.models.base import Decoder, Parts
from stepwell.engine.ops.kernels import Kernels, choose_kernels
from stepwell.engine.passes.rows import TORCH_DTYPES
from stepwell.engine.ranks import ALONE, Ranks
from stepwell.transfer.first_calls import make_first_calls

_MODULES: tuple[ModuleType, ...] = (
    deepseek_v3, deepseek_v4, deepseek_v32, dense, falcon_h1, gemma3, gpt_oss, kimi_linear, mamba2, qwen3_next,
)  # fmt: skip
_BUILDERS: dict[str, Callable[[Parts], Decoder]] = {
    model_type: module.build for module in _MODULES for model_type in module.MODEL_TYPES
}
_IN_EIGHT_BITS = frozenset(  # models whose rows can be kept so
    (*deepseek_v3.MODEL_TYPES, *deepseek_v32.MODEL_TYPES, *deepseek_v4.MODEL_TYPES, *kimi_linear.MODEL_TYPES)
)
_NAMED: dict[str, Callable[[TensorSource], TensorSource]] = dict.fromkeys(deepseek_v4.MODEL_TYPES, deepseek_v4_names.named)


def known_models() -> tuple[str, ...]:
    return tuple(sorted(_BUILDERS))


def build_model(
    config: Mapping[str, object], source: TensorSource, *, dtype: str = "fp32", device: str | torch.device = "cpu",
    page_tokens: int | None = None, kv_dtype: str | None = None, kernels: str | Kernels = "auto", sparse: Sparse | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:  # fmt: skip
    """The model a `config.json` and its tensors make. Raises ConfigError (SpecError) for what cannot be one.

    Of several ranks each has a shard of it: a share of its heads, inner channels and output matrix, and the spec of what it keeps
    itself. Logits are the whole model's on every rank. Only what a rank has is read of
    the tensors, but of GGUF files, which are read whole.

    `dtype` is what it computes in, `kv_dtype` what its attention rows are kept in when that is another, `kernels` what runs its
    operations (`ops/kernels.py`), by name or made already, `sparse` what picks the tokens that answers look at, if anything does.
    It makes the first calls of a process (`transfer/first_calls.py`).
    """
    make_first_calls()
    spec = _of_rank(spec_of(config, dtype=dtype, page_tokens=page_tokens, kv_dtype=kv_dtype, sparse=sparse), sparse, ranks)
    text = _text_of(config)
    if named := _NAMED.get(text.text("model_type")):
        source = named(source)
    block = block_in(text, Fields(values=config))
    weights = Weights(source, dtype=TORCH_DTYPES[dtype], device=device, block=block, config=text.values, ranks=ranks)
    chosen = choose_kernels(kernels, device, TORCH_DTYPES[dtype]) if isinstance(kernels, str) else kernels
    picks = None if sparse is None else selector_for(sparse, spec, chosen)
    build = _BUILDERS[text.text("model_type")]
    model = build(Parts(config=text, spec=spec, weights=weights, kernels=chosen, selector=picks))
    weights.finish()
    return replace(
        model, kernels=chosen, selector=picks, selected=model.selected if picks is None else picks.count, ranks=ranks,
        steady=model.steady if ranks.size == 1 else (),  # workers of ranks capture no CUDA graphs
    )  # fmt: skip


def spec_of(
    config: Mapping[str, object], *, dtype: str, page_tokens: int | None = None, kv_dtype: str | None = None,
    sparse: Sparse | None = None,
) -> ModelSpec:  # fmt: skip
    """What the whole model remembers, whoever keeps it. Reads no weights. Raises ConfigError for what the engine cannot run."""
    kind = _text_of(config).text("model_type")
    if kind not in _BUILDERS:
        raise ConfigError(f"the engine cannot run {kind or 'this model'!r}; it runs {', '.join(known_models())}")
    if kv_dtype == "fp8" and kind not in _IN_EIGHT_BITS:
        raise ConfigError(f"rows of {kind!r} have no eight-bit format here; use a kv_dtype of bf16, fp16 or fp32")
    return from_config(
        config, kv_dtype=kv_dtype or dtype, model_dtype=dtype, page_tokens=page_tokens,
        sparse=None if sparse is None else sparse.selector, spills=sparse is not None and sparse.spills,
    )  # fmt: skip


def _text_of(config: Mapping[str, object]) -> Fields:
    fields = Fields(values=config)
    return fields.section("text_config") if fields.has("text_config") else fields


def _of_rank(spec: ModelSpec, sparse: Sparse | None, ranks: Ranks) -> ModelSpec:
    if ranks.size == 1:
        return spec
    if sparse is not None and sparse.selector != DSA:
        raise ConfigError(
            f"{sparse.selector} picks tokens by the keys of all heads, of which each of {ranks.size} ranks has some: "
            f"leave sparse out, or use one rank"
        )
    return share_of(spec, ranks.size)


def share_of(spec: ModelSpec, ranks: int) -> ModelSpec:
    """What each of so many ranks keeps of a model. Raises ConfigError that says how many could."""
    try:
        return spec.for_ranks(ranks)
    except SpecError as error:
        raise ConfigError(f"--tensor-parallel {ranks}: {error}") from None
