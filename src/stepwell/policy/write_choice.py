"""When pages go down, where the operator does not say: by the sizes of the tiers.

A tier that repeats what is above it has that much less of its own. Where it has several times the room that costs little, and
buys much: nobody waits for a copy when room is needed, and a process that is killed starts warm. Where it has not, tiers that
repeat one another hold hardly more than the largest of them.
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.base.config import WritePolicy

AUTO = "auto"  # how an operator leaves the choice to this
SEVERAL = 4  # times the room of what is above: a tier that has more loses less than a fifth by repeating it


class WriteChoice(NamedTuple):
    write: WritePolicy
    durable: bool
    why: str


def choose_write(
    asked: WritePolicy | None, *, durable: bool, device_bytes: int, host_bytes: int | None, has_store: bool,
    store_bytes: int | None,
) -> WriteChoice:  # fmt: skip
    """What was asked for, or what suits tiers of these sizes. A store without `store_bytes` has no limit, or does not say: it
    counts as large.
    """
    if asked is not None:
        return WriteChoice(asked, durable, "asked for")
    if host_bytes is None:
        return WriteChoice(WritePolicy.THROUGH, durable, "there is no host tier")
    is_host_large = host_bytes > SEVERAL * device_bytes
    is_store_large = store_bytes is None or store_bytes > SEVERAL * (device_bytes + host_bytes)
    small = [] if is_host_large else ["host"]
    if has_store and not is_store_large:
        small.append("store")
    if not small:
        why = f"each tier has more than {SEVERAL} times the room of what is above it"
        return WriteChoice(WritePolicy.THROUGH, durable, why)
    why = f"{' and '.join(small)} would repeat too much of what is above"
    return WriteChoice(WritePolicy.ADAPTIVE, durable or (has_store and is_store_large), why)
