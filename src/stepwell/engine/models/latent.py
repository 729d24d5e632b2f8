"""Multi-head latent attention in absorbed form: one latent a token that all heads read, and no keys or values.

    row of a token      | latent, after its norm | rotated key |           one for all heads, key and value in one
    query of a head     | query @ up_key         | rotated query |         multiplied with the latent, which is never expanded
    output of a head    (shares @ latents) @ up_value                      then one product out

Reads and writes its own layer of one state. Rotated channels are stored first half against second half: if a checkpoint pairs
neighbours, its rows are put in that order once, when it is loaded. Without angles nothing is rotated, as in Kimi-Linear.
Axes: N tokens, H heads, D unrotated width of a query, R rank of a latent, V width of a value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.engine.models.layers import Linear, Parts, RMSNorm, Rotary, number, rotary_from, side_by_side
from stepwell.engine.ops.kernels import TORCH, Kernels
from stepwell.engine.ops.pointwise import Angles, rotate
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.rows import RowFormat, latent_rows
from stepwell.engine.ranks import Ranks

_EPS = 1e-6  # of the norms inside, whatever the config says of those outside


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """The sizes of one layer. A query is `plain` channels and `rotated` ones; a row is `rank` channels and the same rotated ones.

    `query_rank` is that of a low-rank query, and None if one product computes the query. `biased` are the products into and out
    of a layer, and none between.
    """

    hidden: int
    heads: int
    plain: int
    rotated: int
    rank: int
    value: int
    query_rank: int | None
    biased: bool

    @classmethod
    def read(cls, config: Fields, ranks: Ranks) -> LatentSizes:
        """The sizes of one rank: it has some of the heads, and computes and stores whole rows, as all others do."""
        return cls(
            hidden=config.size("hidden_size"),
            heads=ranks.share(config.size("num_attention_heads"), "attention heads"),
            plain=config.size("qk_nope_head_dim"),
            rotated=config.size("qk_rope_head_dim", least=0),
            rank=config.size("kv_lora_rank"),
            value=config.size("v_head_dim"),
            query_rank=config.size("q_lora_rank") if config.has("q_lora_rank") else None,
            biased=config.flag("attention_bias", False),
        )

    @property
    def query(self) -> int:
        return self.plain + self.rotated

    @property
    def row(self) -> int:
        return self.rank + self.rotated


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What a layer computes from its tokens first: the rows to store, and the source of queries."""

    row_NC: torch.Tensor
    source_NQ: torch.Tensor  # the normed low-rank query, or the query itself where there is none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentAttention:
    """`into` computes the query, or the source that `query` computes it from; then the latent and the key to rotate."""

    state: str
    layer: int
    sizes: LatentSizes
    scale: float
    kept: RowFormat
    into: Linear
    query_norm: RMSNorm | None
    query: Linear | None
    latent_norm: RMSNorm
    up_key_HDR: torch.Tensor
    up_value_HRV: torch.Tensor
    out: Linear
    kernels: Kernels = TORCH

    @classmethod
    def load(cls, parts: Parts, name: str, *, state: str = "kv", layer: int, rotates: bool = True) -> LatentAttention:
        """The tensors `name`.q_a_proj (or q_proj), kv_a_proj_with_mqa, kv_b_proj, o_proj and their norms."""
        config, weights, sizes = parts.config, parts.weights, LatentSizes.read(parts.config, parts.ranks)
        biased, rank = sizes.biased, sizes.query_rank
        made_by = f"{name}.q_proj" if rank is None else f"{name}.q_b_proj"
        query = parts.linear(made_by, sizes.heads * sizes.query, rank or sizes.hidden, biased=False)
        row = parts.linear(f"{name}.kv_a_proj_with_mqa", sizes.row, sizes.hidden, biased=biased)
        if rotates and config.flag("rope_interleave", True):  # the checkpoint rotates channels 0 and 1, 2 and 3, and so on
            query = reordered(query, apart(sizes.query, sizes.plain, sizes.query, heads=sizes.heads))
            row = reordered(row, apart(sizes.row, sizes.rank, sizes.row))
        first = query if rank is None else parts.linear(f"{name}.q_a_proj", rank, sizes.hidden, biased=biased)
        up_HXR = weights.take(f"{name}.kv_b_proj.weight", sizes.heads * (sizes.plain + sizes.value), sizes.rank)
        up_key_HDR, up_value_HVR = up_HXR.unflatten(0, (sizes.heads, -1)).split((sizes.plain, sizes.value), dim=1)
        return cls(
            state=state,
            layer=layer,
            sizes=sizes,
            scale=_query_scale(config, sizes) if rotates else sizes.query**-0.5,
            kept=latent_rows(parts.spec.state(state).dtype, sizes.rank, sizes.rotated),
            into=side_by_side(first, row),
            query_norm=None if rank is None else RMSNorm(weights.take(f"{name}.q_a_layernorm.weight", rank), _EPS),
            query=None if rank is None else query,
            latent_norm=RMSNorm(weights.take(f"{name}.kv_a_layernorm.weight", sizes.rank), _EPS),
            up_key_HDR=up_key_HDR.contiguous(),
            up_value_HRV=up_value_HVR.mT.contiguous(),
            out=parts.linear(f"{name}.o_proj", sizes.hidden, sizes.heads * sizes.value, biased=biased),
            kernels=parts.kernels,
        )

    def __call__(self, x_NC: torch.Tensor, angles: Angles | None, batch: Batch) -> torch.Tensor:
        asked = self.ask(x_NC, angles)
        self.keep(asked, batch)
        rows = batch.rows(self.state, self.layer, self.kept)
        rank, paging = self.sizes.rank, batch.paging(None)
        query_NHC = self.queries(asked, angles)
        return self.answer(self.kernels.attend_latent(query_NHC, rows, paging, rank=rank, scale=self.scale))

    def ask(self, x_NC: torch.Tensor, angles: Angles | None) -> Asked:
        """Rows, rotated if there are angles, and the source of queries. Writes nothing."""
        sizes = self.sizes
        into_NX = self.into(x_NC)
        widths = (into_NX.shape[1] - sizes.row, sizes.rank, sizes.rotated)
        source_NQ, latent_NR, key_NC = into_NX.split(widths, dim=1)
        if self.query_norm is not None:
            source_NQ = self.query_norm(source_NQ)
        if angles is not None:
            key_NC = rotate(key_NC[:, None], angles)[:, 0]
        return Asked(row_NC=torch.cat([self.latent_norm(latent_NR), key_NC], dim=-1), source_NQ=source_NQ)

    def queries(self, asked: Asked, angles: Angles | None) -> torch.Tensor:
        """In the form of rows: `[N, H, C]`."""
        sizes = self.sizes
        query_NX = asked.source_NQ if self.query is None else self.query(asked.source_NQ)
        plain_NHD, turned_NHC = query_NX.unflatten(1, (sizes.heads, -1)).split((sizes.plain, sizes.rotated), dim=-1)
        if angles is not None:
            turned_NHC = rotate(turned_NHC, angles)
        return torch.cat([_by_head(plain_NHD, self.up_key_HDR), turned_NHC], dim=-1)

    def keep(self, asked: Asked, batch: Batch) -> None:
        """Writes every token's row to its page."""
        paging = batch.paging_of(self.state)
        rows = batch.rows(self.state, self.layer, self.kept)
        self.kernels.write_rows(rows, paging.page_N, paging.row_N, asked.row_NC)

    def answer(self, seen_NHR: torch.Tensor) -> torch.Tensor:
        """From weighted latents to what the layer adds to the stream."""
        return self.out(_by_head(seen_NHR, self.up_value_HRV).flatten(1))


def latent_rotary(config: Fields, *, device: str | torch.device) -> Rotary:
    """The rotation of all rotated channels. A scaled rotation also grows, by the part of the growth that is not in the scale."""
    name, width = _scaling_name(config), config.size("qk_rope_head_dim")
    scaling = config.section(name)
    grown = dict(scaling.values)
    if scaling.values.get("mscale") and scaling.values.get("mscale_all_dim") and not scaling.has("attention_factor"):
        grown["attention_factor"] = _growth(scaling, "mscale") / _growth(scaling, "mscale_all_dim")
    scaled = Fields(values={**config.values, name: grown}, path=config.path)
    rotary = rotary_from(scaled, width, device=device)
    if 2 * len(rotary.frequencies) != width:
        raise ConfigError(
            f"config field qk_rope_head_dim must be even and partial_rotary_factor 1, got {width} channels to rotate"
        )
    return rotary


def _query_scale(config: Fields, sizes: LatentSizes) -> float:
    """The factor of scores: they grow with a scaled rotation, in all channels (`mscale_all_dim`)."""
    scaling = config.section(_scaling_name(config))
    scaled = (scaling.text("rope_type") or scaling.text("type") or "default") != "default"
    growth = _growth(scaling, "mscale_all_dim") if scaled and scaling.values.get("mscale_all_dim") else 1.0
    return growth * growth / math.sqrt(sizes.query)


def _scaling_name(config: Fields) -> str:
    return "rope_parameters" if config.has("rope_parameters") else "rope_scaling"


def _growth(scaling: Fields, name: str) -> float:
    factor = number(scaling, "factor", 1.0)
    return 0.1 * number(scaling, name, 1.0) * math.log(factor) + 1.0 if factor > 1 else 1.0


# ---- products ---------------------------------------------------------------------------------------


def apart(width: int, start: int, stop: int, *, heads: int = 1) -> torch.Tensor:
    """An order of `heads` times `width` channels in which neighbours of `[start, stop)` are as far apart as its halves.

    0 1 2 3 4 5    for [2, 6) becomes    0 1 2 4 3 5
    """
    order = torch.arange(width)
    order[start:stop] = order[start:stop].unflatten(0, (-1, 2)).T.flatten()
    return (order + width * torch.arange(heads)[:, None]).flatten()


def reordered(product: Linear, order: torch.Tensor) -> Linear:
    """Its outputs in another order."""
    order = order.to(product.weight.device)
    return Linear(product.weight[order], None if product.bias is None else product.bias[order])


def _by_head(x_NHX: torch.Tensor, weight_HXY: torch.Tensor) -> torch.Tensor:
    """Each head by its own matrix."""
    return torch.bmm(x_NHX.transpose(0, 1), weight_HXY).transpose(0, 1)
