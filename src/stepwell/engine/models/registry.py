"""From a config and tensors to a model, by the module that `base/spec/families` registers for its `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

import torch

from stepwell.base.errors import ConfigError, SpecError
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families import from_config, served_family
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.families.summaries import DSA
from stepwell.engine.approximate.selectors import Sparse, selector_for
from stepwell.engine.loading.eight_bits import block_in
from stepwell.engine.loading.weights import TensorSource, Weights
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.layers import Parts, norm_eps
from stepwell.engine.ops.kernels import Kernels, choose_kernels
from stepwell.engine.passes.rows import TORCH_DTYPES
from stepwell.engine.ranks import ALONE, Ranks
from stepwell.transfer.first_calls import make_first_calls


def build_model(
    config: Mapping[str, object], source: TensorSource, *, dtype: str = "fp32", device: str | torch.device = "cpu",
    page_tokens: int | None = None, kv_dtype: str | None = None, kernels: str | Kernels = "auto", sparse: Sparse | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:  # fmt: skip
    """The model of a `config.json` and its tensors. Raises ConfigError (SpecError) if they do not make one.

    Each of several ranks has a shard: a share of the heads, inner channels and output matrix, and the spec of the state that it
    keeps itself. Logits are the whole model's on every rank. A rank reads only its part of the tensors, except from GGUF files,
    which are read whole.

    `dtype` is the format it computes in, `kv_dtype` that of its attention rows if another, `kernels` run its operations
    (`ops/kernels.py`), given by name or as objects, and `sparse` selects the tokens that answers attend to. Makes the first calls
    of a process (`transfer/first_calls.py`).
    """
    make_first_calls()
    spec, text = spec_of(config, dtype=dtype, page_tokens=page_tokens, kv_dtype=kv_dtype, sparse=sparse), _text_of(config)
    spec = _of_rank(spec, sparse, ranks)
    block = block_in(text, Fields(values=config))
    weights = Weights(source, dtype=TORCH_DTYPES[dtype], device=device, block=block, config=text.values, ranks=ranks)
    chosen = choose_kernels(kernels, device, TORCH_DTYPES[dtype]) if isinstance(kernels, str) else kernels
    selector = None if sparse is None else selector_for(sparse, spec, chosen)
    parts = Parts(config=text, spec=spec, weights=weights, kernels=chosen, selector=selector, eps=norm_eps(text))
    model: Decoder = import_module(f"{__package__}.{served_family(text.text('model_type')).model}").build(parts)
    weights.finish()
    return replace(
        model,
        kernels=chosen,
        selector=selector,
        selected=model.selected if selector is None else selector.count,
        ranks=ranks,
        graph_windows=model.graph_windows if ranks.size == 1 else (),  # ranks capture no CUDA graphs
    )


def spec_of(
    config: Mapping[str, object], *, dtype: str, page_tokens: int | None = None, kv_dtype: str | None = None,
    sparse: Sparse | None = None,
) -> ModelSpec:  # fmt: skip
    """The state of the whole model, over all ranks. Reads no weights. Raises ConfigError for one that the engine cannot run."""
    kind = _text_of(config).text("model_type")
    if not served_family(kind).fp8_rows and kv_dtype == "fp8":
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
            f"{sparse.selector} selects tokens by the keys of all heads, and each of {ranks.size} ranks has only some of them: "
            f"leave sparse out, or use one rank"
        )
    return share_of(spec, ranks.size)


def share_of(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The spec of one rank of `ranks`. Raises ConfigError that says which numbers of ranks are possible."""
    try:
        return spec.for_ranks(ranks)
    except SpecError as error:
        raise ConfigError(f"--tensor-parallel {ranks}: {error}") from None
