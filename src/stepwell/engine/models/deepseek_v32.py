"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention reads only the rows that an index picks for each query.

Layers without an index of their own look where the last layer that has one did (GLM-5.2). Picked rows that are on the host alone
are fetched between the choice and attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.schedule import LayerSpec
from stepwell.engine.models.base import Decoder, Parts
from stepwell.engine.models.deepseek_v3 import block, decoder, latent_attention, layer_names
from stepwell.engine.models.indexer import Indexer
from stepwell.engine.models.latent import LatentAttention, latent_rotary
from stepwell.engine.ops.pointwise import Angles
from stepwell.engine.ops.selection import Selection, without_scores
from stepwell.engine.ops.staging import attend_spilled
from stepwell.engine.passes.batch import Batch

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")


@dataclass(slots=True, kw_only=True, eq=False)
class Shared:
    """What all layers of a pass need. `selection` is that of the last layer that selected."""

    angles: Angles
    selection: Selection | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseAttention:
    """Latent attention over picked rows. `indexer` None: over those picked last."""

    latent: LatentAttention
    indexer: Indexer | None

    def __call__(self, x_NC: torch.Tensor, shared: Shared, batch: Batch) -> torch.Tensor:
        latent, asked = self.latent, self.latent.ask(x_NC, shared.angles)
        latent.keep(asked, batch)
        if self.indexer is not None:
            shared.selection = self.indexer(x_NC, asked.source_NQ, shared.angles, batch)
            if batch.spilled is not None:
                batch.spilled.resolve(latent.layer, shared.selection)
                shared.selection = without_scores(shared.selection)  # large, and of no more use
        assert shared.selection is not None, f"layer {latent.layer} follows no layer with an index"
        if batch.spilled is not None:
            batch.spilled.fetch(latent.layer)
        query_NHC = latent.queries(asked, shared.angles)
        return latent.answer(self._attend(query_NHC, shared.selection, batch))

    def _attend(self, query_NHC: torch.Tensor, selection: Selection, batch: Batch) -> torch.Tensor:
        latent, spilled = self.latent, batch.spilled
        rows = batch.rows(latent.state, latent.layer, latent.kept)
        attend = partial(latent.kernels.attend_selected, rank=latent.sizes.rank, scale=latent.scale)
        if spilled is None:
            return attend(query_NHC, rows, batch.paging_of(latent.state), selection)
        return attend_spilled(attend, query_NHC, rows, spilled, selection)


def build(parts: Parts) -> Decoder:
    names, layers, rotary = layer_names(parts), parts.spec.layers, latent_rotary(parts.config, device=parts.device)
    if "index" not in layers[0].places:
        raise ConfigError("the first layer has no index of its own, and none before it to share; check indexer_types")
    pairs = zip(names, layers, strict=True)
    blocks = [block(parts, name, _attention(parts, f"{name}.self_attn", layer)) for name, layer in pairs]
    dtype, kernels = parts.weights.dtype, parts.kernels  # not `parts`: it would keep all tensors that it was read from
    made = decoder(parts, blocks, lambda batch: Shared(angles=rotary.angles(batch.positions_N, dtype, kernels)))
    return replace(made, selected=parts.config.size("index_topk"))


def _attention(parts: Parts, name: str, layer: LayerSpec) -> SparseAttention:
    index = layer.places.get("index")
    indexer = None if index is None else Indexer.load(parts, f"{name}.indexer", layer=index)
    return SparseAttention(latent=latent_attention(parts, name, layer=layer.places["kv"], state="kv"), indexer=indexer)
