"""Summaries of keys, by which queries of a model with keys per head pick the rows they read: states in addition to `kv`.

    bounds      Quest: of every 16 tokens, the smallest and the largest number of their keys in each channel
    clusters    ClusterKV: of every page, the means of some groups of its keys, and the group of each token

They are kept in the format of the keys and cut over ranks with them. Where rows may spill, they stay on the device. Yields
states; builds no ModelSpec.
"""

from __future__ import annotations

from stepwell.base.errors import SpecError
from stepwell.base.spec.families.attention import Heads
from stepwell.base.spec.shapes import Prefix
from stepwell.base.spec.spill import Spill
from stepwell.base.spec.states import StateSpec

DSA, QUEST, CLUSTERKV = "dsa", "quest", "clusterkv"
SELECTORS = (DSA, QUEST, CLUSTERKV)
BOUNDS, CLUSTERS = "bounds", "clusters"
QUEST_TOKENS = 16  # of a unit
CLUSTER_TOKENS = 40  # for each group there is
CLUSTERKV_PAGE_TOKENS = 256
MOST_GROUPS = 256  # whole numbers up to here are exact in any format


def num_groups(page_tokens: int) -> int:
    """Groups that the keys of a page are put into."""
    return min(max(page_tokens // CLUSTER_TOKENS, 2), page_tokens, MOST_GROUPS)


def summary_state(selector: str, kv: StateSpec, heads: Heads, page_tokens: int) -> StateSpec:
    """What `selector` keeps of the keys of `kv`. Raises SpecError for pages that cannot hold it."""
    width = kv.row_bytes // (heads.num * (heads.key_dim + heads.value_dim))
    if selector == QUEST:
        if page_tokens % QUEST_TOKENS:
            raise SpecError(f"page_tokens must be a multiple of {QUEST_TOKENS} for quest, got {page_tokens}")
        return _state(BOUNDS, QUEST_TOKENS, kv, heads, 2 * heads.key_dim * width)
    numbers = num_groups(page_tokens) * heads.key_dim + page_tokens
    return _state(CLUSTERS, page_tokens, kv, heads, numbers * width)


def summary_spill(kv: StateSpec) -> Spill:
    """Keys and values may be on the host alone, for summaries say which are read. Every layer picks for itself."""
    return Spill(states=(kv.name,), group_of={kv.name: tuple(range(kv.layers))})


def _state(name: str, ratio: int, kv: StateSpec, heads: Heads, head_bytes: int) -> StateSpec:
    return StateSpec(
        name=name,
        shape=Prefix(ratio=ratio),
        layers=kv.layers,
        row_bytes=heads.num * head_bytes,
        dtype=kv.dtype,
        shards=kv.shards,
    )
