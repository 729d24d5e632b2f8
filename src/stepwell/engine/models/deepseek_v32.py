"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention reads only the rows that an index selects for each query.

Layers without an index of their own use the selection of the last layer that has one (GLM-5.2). Selected rows that are only on
the host are fetched between selection and attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from stepwell.base.errors import ConfigError
from stepwell.engine.models.base import Block, Decoder, decoder
from stepwell.engine.models.deepseek_v3 import block, layer_names
from stepwell.engine.models.indexer import Indexer
from stepwell.engine.models.latent import LatentAttention, latent_rotary
from stepwell.engine.models.layers import Parts
from stepwell.engine.ops.pointwise import Angles
from stepwell.engine.ops.selection import Selection, without_scores
from stepwell.engine.ops.staging import attend_spilled
from stepwell.engine.passes.batch import Batch


@dataclass(slots=True, kw_only=True, eq=False)
class Shared:
    """What all layers of a pass need. `selection` is that of the last layer with an index."""

    angles: Angles
    selection: Selection | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseAttention:
    """Latent attention over selected rows. `indexer` None: over the last selection."""

    latent: LatentAttention
    indexer: Indexer | None

    def __call__(self, x_NC: torch.Tensor, shared: Shared, batch: Batch) -> torch.Tensor:
        latent, asked = self.latent, self.latent.ask(x_NC, shared.angles)
        latent.keep(asked, batch)
        if self.indexer is not None:
            shared.selection = self.indexer(x_NC, asked.source_NQ, shared.angles, batch)
            if batch.spilled is not None:
                batch.spilled.resolve(latent.layer, shared.selection)
                shared.selection = without_scores(shared.selection)  # large, and no longer needed
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
    names, layers = layer_names(parts), parts.spec.layers
    angles = parts.angles(latent_rotary(parts.config, device=parts.device))
    if "index" not in layers[0].places:
        raise ConfigError("the first layer has no index of its own, and none before it to share; check indexer_types")
    pairs = zip(names, layers, strict=True)
    blocks = [sparse_block(parts, name, layer.places["kv"], layer.places.get("index")) for name, layer in pairs]
    selected = parts.config.size("index_topk")
    return decoder(parts, blocks, lambda batch: Shared(angles=angles(batch)), experts=True, selected=selected)


def sparse_block(parts: Parts, name: str, layer: int, index: int | None, *, states: tuple[str, str] = ("kv", "index")) -> Block:
    """The block whose tensors begin with `name`, with rows and index keys in these layers of `states`."""
    kv, keys = states
    latent = LatentAttention.load(parts, f"{name}.self_attn", state=kv, layer=layer)
    indexer = None if index is None else Indexer.load(parts, f"{name}.self_attn.indexer", layer=index, state=keys)
    return block(parts, name, SparseAttention(latent=latent, indexer=indexer))
