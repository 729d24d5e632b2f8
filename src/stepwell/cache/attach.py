"""A store comes and goes while the cache runs. Puts a link together and takes it out; the rest is in `link.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from stepwell.base.config import StoreConfig, WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Tier
from stepwell.cache.backup import forget_beliefs, offer, offer_everything
from stepwell.cache.core import Core
from stepwell.cache.errands import Errands
from stepwell.cache.link import StoreLink
from stepwell.cache.porter import Porter, ThreadPorter
from stepwell.policy.breaker import Breaker
from stepwell.policy.patience import Patience, Speed
from stepwell.store.api import Store
from stepwell.transfer.store_hands import HostPages, StoreHands


def link_store(
    core: Core, store: Store, config: StoreConfig, host_pages: Sequence[HostPages], porter: Porter | None, *, ranks: int
) -> StoreLink:
    """Attaches a store: what reaches the host from now on is offered to it, and what is there already."""
    if Tier.HOST not in core.tree.arenas:
        raise ConfigError("a store stands below host memory: give the cache host_bytes")
    if porter is None:
        if len(host_pages) != ranks:
            raise ConfigError(
                f"a store needs to reach the host memory of all {ranks} rank(s), and knows {len(host_pages)}: "
                "give build_cache() host_pages, one for each"
            )
        hands = [StoreHands(store, memory, rank=i, ranks=len(host_pages)) for i, memory in enumerate(host_pages)]
        porter = ThreadPorter(hands, core.clock, readers=config.readers, writers=config.writers)
    breaker = Breaker()
    errands = Errands(
        porter, core.arena(Tier.HOST), core.mover, core.counters, core.clock, breaker, timeout_s=config.errand_timeout_s
    )
    patience = Patience(credit_s=config.wait_credit_s, share=config.wait_share)
    link = StoreLink(store=store, config=config, errands=errands, breaker=breaker, patience=patience)
    if config.recompute_tokens_per_s is not None:
        core.compute = Speed(config.recompute_tokens_per_s)
    core.link = link
    forget_beliefs(core)
    if core.config.write is not WritePolicy.BACK:  # then things go down when the host needs their room
        core.mover.on_saved = partial(offer, core, link)
        offer_everything(core, link)
    return link


def unlink_store(core: Core) -> None:
    """Detaches the store. Its errands go on; nothing new is asked of it."""
    link = core.link
    assert link is not None
    link.detached = True
    core.link = None
    core.mover.on_saved = None
