"""Watches whose pages are evicted: only a tenant's that is over its quota, as long as such a tenant has something to evict."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell import Cache, Tier
from stepwell.tree.accounts import Account
from stepwell.tree.node import Run, Victim


class QuotaWatch:
    """Between a cache and its order of eviction. Asks the tree itself, not the accounts' own orders."""

    def __init__(self, cache: Cache) -> None:
        self._tree = cache._state.tree
        self._pop = self._tree.ranking.pop
        self.judged = 0  # evictions that came while a tenant was over its quota
        self._tree.ranking.pop = self.pop  # type: ignore[method-assign]

    def pop(self, tier: Tier, *, runs: bool, checkpoints: bool, of: Account | None = None) -> Victim | None:
        """What anybody may lose; by then nothing of the wanted sorts may be queued of those who have too much."""
        if of is not None:
            return self._pop(tier, runs=runs, checkpoints=checkpoints, of=of)
        over = {each for each in self._tree.accounts if each.excess_bytes(tier)}
        self.judged += bool(over)
        for victim, account in self._queued(tier):
            wanted = runs if isinstance(victim, Run) else checkpoints
            assert not (wanted and account in over), f"{account} is over its quota, and {victim} could go"
        return self._pop(tier, runs=runs, checkpoints=checkpoints)

    def _queued(self, tier: Tier) -> Iterator[tuple[Victim, Account]]:
        for node in self._tree.nodes():
            run = node.runs[tier]
            if run is not None and run.entry:
                yield run, node.account
            for checkpoint in (node.checkpoints or {}).values():
                residency = checkpoint.residencies[tier]
                if residency is not None and residency.entry:
                    yield residency, node.account
