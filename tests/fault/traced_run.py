"""A fixed workload under pressure; prints a digest of every decision it led to. Run by a test under several hash seeds."""

from __future__ import annotations

import hashlib
from functools import partial

from stepwell import Lease, Namespace, Tier, WritePolicy
from toys import HYBRID, Rig, text


def main() -> None:
    digest = hashlib.blake2b(digest_size=16)
    for write in WritePolicy:
        rig = Rig(HYBRID, device_pages=56, host_pages=40, write=write)
        spaces = [rig.cache.namespace, rig.cache.namespace_for(adapter="a"), rig.cache.namespace_for(salt="")]
        for turn in range(40):
            rig.clock.advance(7)
            tokens = [*text(turn % 3, 8), *text(turn % 11, 5 + turn % 9)]
            lease = rig.patiently(partial(_open, rig, tokens, spaces[turn % 3]))
            rig.settle()
            digest.update(repr((lease.prefix_pages, lease.window_pages, lease.point_pages, lease.sources)).encode())
            rig.prefill(lease)
            rig.cache.release(lease)
            for tier in (Tier.DEVICE, Tier.HOST):
                for refs in rig.state.arena(tier).refs.values():
                    digest.update(refs.tobytes())
        digest.update(repr(rig.cache.counters.snapshot()).encode())
    print(digest.hexdigest())  # noqa: T201


def _open(rig: Rig, tokens: list[int], space: Namespace) -> Lease:
    return rig.cache.acquire(rig.cache.lookup(tokens, namespace=space))


if __name__ == "__main__":
    main()
