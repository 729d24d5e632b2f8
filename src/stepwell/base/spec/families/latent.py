"""Multi-head latent attention: one latent per token and layer for all heads, and the DSA index.

Every rank needs all of a latent, so these states are never sharded. Says which layer keeps what, and
yields states; builds no ModelSpec.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.dtypes import Dtypes
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.schedule import Schedule, count
from stepwell.base.spec.shapes import Prefix
from stepwell.base.spec.spill import Spill
from stepwell.base.spec.states import StateSpec


def mla_schedule(config: Fields) -> Schedule:
    """DeepSeek-V3, R1, Kimi-K2: latents only."""
    return (("kv",),) * config.num_layers()


def mla_states(config: Fields, dtypes: Dtypes, schedule: Schedule) -> Iterator[StateSpec]:
    yield latent_state(len(schedule), config, dtypes)


def v32_schedule(config: Fields) -> Schedule:
    """DeepSeek-V3.2: latents, and index keys in every layer. Fields by which GLM-5 leaves some out mean nothing to it."""
    return (("kv", "index"),) * config.num_layers()


def glm_schedule(config: Fields) -> Schedule:
    """GLM-5: latents, and index keys in the layers that select for themselves."""
    return tuple(("kv", "index") if own else ("kv",) for own in own_index(config, config.num_layers()))


def dsa_states(config: Fields, dtypes: Dtypes, schedule: Schedule) -> Iterator[StateSpec]:
    yield latent_state(len(schedule), config, dtypes)
    yield StateSpec(
        name="index",
        shape=Prefix(),
        layers=count(schedule, "index"),
        row_bytes=_index_row_bytes(config, dtypes),
        dtype=dtypes.kv,
    )


def dsa_spill(schedule: Schedule) -> Spill:
    """Latents may be on the host alone, for the index says which are read. Layers that share a selection need the same rows."""
    own = ["index" in kept for kept in schedule]
    return Spill(states=("kv",), group_of={"kv": tuple(max(own[: layer + 1].count(True) - 1, 0) for layer in range(len(own)))})


def latent_state(layers: int, config: Fields, dtypes: Dtypes) -> StateSpec:
    return StateSpec(name="kv", shape=Prefix(), layers=layers, row_bytes=_latent_row_bytes(config, dtypes), dtype=dtypes.kv)


def mla_draft(config: Fields, dtypes: Dtypes, page_tokens: int) -> Iterator[StateSpec]:
    """What the next-token-prediction layers keep. Without it a resumed answer is right, and only slower."""
    yield _draft("draft", config, _latent_row_bytes(config, dtypes), dtypes.kv)
    yield _draft_hidden(config, dtypes, page_tokens)


def dsa_draft(config: Fields, dtypes: Dtypes, page_tokens: int) -> Iterator[StateSpec]:
    """As `mla_draft`; a draft layer has an index of its own."""
    yield _draft("draft", config, _latent_row_bytes(config, dtypes), dtypes.kv)
    yield _draft("draft_index", config, _index_row_bytes(config, dtypes), dtypes.kv)
    yield _draft_hidden(config, dtypes, page_tokens)


def own_index(config: Fields, num_layers: int) -> list[bool]:
    """Which layers keep an index; the others reuse the selection of the last layer that did.

    GLM-5.2 (78 layers, every 4th, offset 3):   0 1 2 . . . 6 . . . 10 . . .  ...  74 . . .     21 layers
    """
    if config.has("indexer_types"):
        return config.per_layer("indexer_types", {"full": True, "shared": False}, num_layers=num_layers)
    if config.has("index_topk_pattern"):
        return config.per_layer("index_topk_pattern", {"F": True, "S": False}, num_layers=num_layers)
    period = config.size("index_topk_freq", 1)
    last_dense = config.size("index_skip_topk_offset", 2, least=0) - 1
    return [max(index - last_dense, 0) % period == 0 for index in range(num_layers)]


def _draft(name: str, config: Fields, row_bytes: int, dtype: str, ratio: int = 1) -> StateSpec:
    layers = config.size("num_nextn_predict_layers", 0, least=0)
    if not layers:
        raise SpecError("config field num_nextn_predict_layers is missing or 0: this model has no draft layers to cache")
    return StateSpec(name=name, shape=Prefix(ratio=ratio), layers=layers, row_bytes=row_bytes, dtype=dtype, required=False)


def _draft_hidden(config: Fields, dtypes: Dtypes, page_tokens: int) -> StateSpec:
    """A draft layer reads what the model made of the token before: so each page keeps that of its last token."""
    return _draft("draft_hidden", config, config.size("hidden_size") * dtypes.model_width, dtypes.model, ratio=page_tokens)


def _latent_row_bytes(config: Fields, dtypes: Dtypes) -> int:
    # a model without rotary positions writes 0 channels of rotated key
    return dtypes.latent_row_bytes(config.size("kv_lora_rank"), config.size("qk_rope_head_dim", least=0))


def _index_row_bytes(config: Fields, dtypes: Dtypes) -> int:
    return dtypes.index_row_bytes(config.size("index_head_dim"))
