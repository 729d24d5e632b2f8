"""The stores below random caches: good, small, failing, damaging, losing. They outlive the caches above them.

Keeps a shadow of every byte that was ever offered to them, and answers by definition what they hold: a page when every rank
has its share, a checkpoint when every rank has the manifest and every member that the manifest names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from random import Random

from ledger import Content
from toy_models import Choose, Setup, make_borrowed_setup, make_setup

from stepwell import Kind, ModelSpec, Namespace, WritePolicy
from stepwell.base.config import PrefetchPolicy, StoreConfig
from stepwell.base.prompt import manifest_key
from stepwell.policy.store_use import StoreTuning
from stepwell.store.memory import MemoryStore
from stepwell.store.wrappers import Faults, Faulty
from toys import LastingStore

NO_FAULTS = Faults()
FAULTS = {
    "good": NO_FAULTS,
    "small": NO_FAULTS,
    "failing": Faults(fail=0.25),
    "damaging": Faults(flip=0.15, swap=0.15, short=0.15),
    "losing": Faults(lose=0.2),
    "small and bad": Faults(fail=0.1, hang=0.05, flip=0.1, swap=0.1, short=0.1, lose=0.1, hang_s=40.0),
}
ALWAYS_WORTH_IT = 1e-6  # tokens a second: nothing is slower than computing
HEAD_BYTES, MEMBER_BYTES, MEMBER_KEY_BYTES = 12, 56, 32  # of a manifest

PATIENT = StoreConfig(
    prefetch=PrefetchPolicy.WAIT_COMPLETE,
    recompute_tokens_per_s=ALWAYS_WORTH_IT,
    checkpoint_delay_s=0,
)
ROOMY = StoreTuning(host_share=1.0, backup_age_s=1e9)


@dataclass(frozen=True, kw_only=True)
class StoreSetup:
    """A random cache, and how it uses which sort of store."""

    cache: Setup
    sort: str  # of FAULTS
    seed: int
    eager: bool  # operations begin at once, and cannot be called back
    config: StoreConfig
    tuning: StoreTuning


class Shelf:
    """Two stores to attach, one after the other: the first as bad as the setup says, the second good."""

    def __init__(self, setup: StoreSetup) -> None:
        spec, self._ranks = setup.cache.spec, setup.cache.ranks
        self._faults = FAULTS[setup.sort]
        self._loses = setup.sort not in ("good", "failing")  # something that was written
        self.sleep: Callable[[float], None] = lambda seconds: None  # the cache above says what time it is
        kind = LastingStore if setup.cache.durable else MemoryStore
        self.inner = (kind(_few_objects(spec, self._ranks) if "small" in setup.sort else None), kind())
        faulty = (self._faults, NO_FAULTS)
        self.stores = tuple(
            Faulty(inner, faults, random=Random(setup.seed), sleep=lambda seconds: self.sleep(seconds))
            for inner, faults in zip(self.inner, faulty, strict=True)
        )
        self.offered: dict[tuple[int, Kind, Content], set[bytes]] = defaultdict(set)  # by rank

    def make_well(self, *, well: bool) -> None:
        """From now on nothing goes wrong; or as much as before."""
        self.stores[0].faults = NO_FAULTS if well else self._faults

    def damage(self, faults: Faults) -> None:
        """From now on the first store does this to what is read from it."""
        self.stores[0].faults = faults
        self._loses = True  # a reader of something damaged deletes it

    def lose(self, random: Random, among: Collection[bytes] | None = None) -> None:
        """A page or a checkpoint of the first store is gone, of those named; or, now and then, a mere part of a checkpoint."""
        values = self.inner[0]._values
        members = {key for _, manifest in self._manifests(0) for key in _members(values[_, manifest].data)}
        names = [name for name in values if name[1] not in members or random.random() < 0.1]
        names = [name for name in names if among is None or name[1] in among]
        if names:
            self.inner[0]._drop(random.choice(names))
            self._loses = True

    # ---- what is in them, by definition -------------------------------------------------------------

    def has_page(self, which: int, namespace: Namespace, key: bytes) -> bool:
        return all((digest, key) in self.inner[which]._values for digest in self._shards(namespace))

    def has_checkpoint(self, which: int, namespace: Namespace, boundary: bytes) -> bool:
        return all(self._is_whole(which, digest, manifest_key(boundary)) for digest in self._shards(namespace))  # type: ignore[arg-type]

    def torn(self) -> list[bytes]:
        """Manifests that name members which are not there, in stores that lose nothing once it was written."""
        sound = [which for which in (0, 1) if which or not self._loses]
        return [key for which in sound for digest, key in self._manifests(which) if not self._is_whole(which, digest, key)]

    def num_torn(self, which: int) -> int:
        return sum(not self._is_whole(which, digest, key) for digest, key in self._manifests(which))

    def _manifests(self, which: int) -> Iterator[tuple[bytes, bytes]]:
        return (name for name, value in self.inner[which]._values.items() if value.data[:4] == b"SWcp")

    def _is_whole(self, which: int, digest: bytes, manifest: bytes) -> bool:
        values = self.inner[which]._values
        value = values.get((digest, manifest))
        if value is None:
            return False
        return all((digest, key) in values for key in _members(value.data))

    def _shards(self, namespace: Namespace) -> list[bytes]:
        return [replace(namespace, shard=f"{rank}/{self._ranks}").digest for rank in range(self._ranks)]


def _members(manifest: bytes) -> list[bytes]:
    """The keys that a manifest names."""
    starts = range(HEAD_BYTES, len(manifest), MEMBER_BYTES)
    return [manifest[start : start + MEMBER_KEY_BYTES] for start in starts]


def _few_objects(spec: ModelSpec, ranks: int) -> int:
    return ranks * 8 * sum(spec.object_bytes(kind) for kind in Kind)


def make_store_setup(choose: Choose, *, external: bool) -> StoreSetup:
    """A cache over a host tier, at least, and a store below it."""
    setup = make_borrowed_setup(choose) if external else make_setup(choose)
    if external:
        setup = replace(setup, write=choose(tuple(WritePolicy)))
    elif choose((True, False)):
        setup = replace(setup, write=WritePolicy.THROUGH)  # what a store is mostly used with
    setup = replace(setup, host_objects=setup.host_objects or 24, ranks=min(setup.ranks, 2))
    page_bytes = setup.spec.object_bytes(Kind.PREFIX)
    prefetch = choose((PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.BEST_EFFORT, PrefetchPolicy.TIMEOUT))
    tokens_per_s = choose((ALWAYS_WORTH_IT, ALWAYS_WORTH_IT, None, 50.0))
    tuning = StoreTuning(
        host_share=choose((0.5, 1.0, 0.2)),
        fetch_chunk_bytes=choose((1, max(2 * page_bytes, 1), 2**20)),
        fallback_share=choose((0.25, 0.0, 1.0)),
        op_timeout_s=25.0,
        backup_queue=choose((4096, 4096, 2)),
        backup_age_s=choose((1e9, 60.0)),
        backup_bytes=choose((2**20, 1)),
    )
    delay_s = choose((0.0, 3.0, 30.0))
    config = StoreConfig(prefetch=prefetch, recompute_tokens_per_s=tokens_per_s, checkpoint_delay_s=delay_s)
    setup = replace(setup, durable=choose((True, False)))
    return StoreSetup(
        cache=setup, sort=choose(tuple(FAULTS)), seed=choose(tuple(range(4))), eager=choose((True, False)), config=config,
        tuning=tuning,
    )  # fmt: skip
