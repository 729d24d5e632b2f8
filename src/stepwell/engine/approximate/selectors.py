"""The selector of a model, by name: `quest` and `clusterkv` pick by summaries; `dsa` is the index of the model itself."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.base.errors import ConfigError
from stepwell.base.spec import ModelSpec
from stepwell.base.spec.families.summaries import BOUNDS, CLUSTERS, DSA, QUEST, QUEST_TOKENS, SELECTORS, num_groups
from stepwell.engine.approximate.clusterkv import ClusterKV
from stepwell.engine.approximate.quest import Quest
from stepwell.engine.approximate.selector import Selector
from stepwell.engine.approximate.summaries import Summary
from stepwell.engine.ops.kernels import Kernels
from stepwell.engine.passes.rows import TORCH_DTYPES

SINKS = 16  # first tokens, which are always picked
RECENT = 64  # last tokens, the same
VERSION = 1  # of how tokens are picked, with the numbers above: rows of answers depend on it
BUDGET = 2048  # tokens that a query attends to by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """The selector and its number of tokens, None for the default. `hot_rows` says whether requests keep some on the device."""

    selector: str
    budget: int | None = None
    hot_rows: bool = False

    def __post_init__(self) -> None:
        if self.selector not in SELECTORS:
            raise ConfigError(f"sparse must be one of {', '.join(SELECTORS)}, got {self.selector!r}")
        if self.selector == DSA and self.budget is not None:
            raise ConfigError("with dsa the model defines how many tokens are picked: leave sparse_budget out")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"sparse_budget must be a number of tokens, got {self.budget}")

    @property
    def spills(self) -> bool:
        """Whether rows may be only on the host: with dsa always, with the others if there are hot rows."""
        return self.selector == DSA or self.hot_rows

    @property
    def count(self) -> int:
        return BUDGET if self.budget is None else self.budget

    @property
    def identity(self) -> str | None:
        """What rows of answers depend on apart from weights; None if the model's own config says it all."""
        return None if self.selector == DSA else f"{self.selector}{VERSION}-{self.count}"


def selector_for(sparse: Sparse, spec: ModelSpec, kernels: Kernels) -> Selector | None:
    """Raises ConfigError for a budget smaller than the tokens that are always picked."""
    if sparse.selector == DSA:
        return None
    kv, page = spec.state("kv"), spec.page_tokens
    heads = kv.shards
    key_dim = kv.row_bytes // (2 * heads * TORCH_DTYPES[kv.dtype].itemsize)  # values are as wide as keys in these families
    summary: Summary
    if sparse.selector == QUEST:
        state, summary = BOUNDS, Quest(kv_heads=heads, unit=QUEST_TOKENS)
    else:
        state, summary = CLUSTERS, ClusterKV(kv_heads=heads, unit=page, groups=num_groups(page))
    least = SINKS + max(RECENT, summary.unit) + summary.unit
    if sparse.count < least:
        raise ConfigError(
            f"sparse_budget must be at least {least} tokens for {sparse.selector} with pages of {page}: the first {SINKS} and "
            f"the last ones are always picked; got {sparse.count}"
        )
    return Selector(
        state=state, keys="kv", summary=summary, count=sparse.count, kv_heads=heads, key_dim=key_dim, sinks=SINKS, recent=RECENT,
        best=kernels.best,
    )  # fmt: skip
