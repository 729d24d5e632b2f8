"""When pages go down, where the operator does not say: by the sizes of the tiers.

A tier that repeats what is above it has that much less of its own. Where the lowest one has several times the room that costs
little, and buys much: nobody waits for a copy when room is needed, and over a store a process that is killed starts warm. Where
it has not, tiers that repeat one another hold hardly more than the largest of them.
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.base.config import WritePolicy

AUTO = "auto"  # how an operator leaves the choice to this
SEVERAL = 4  # times the room of what is above: a tier that has more loses less than a fifth by repeating it


class WriteChoice(NamedTuple):
    write: WritePolicy
    why: str


def choose_write(
    asked: WritePolicy | None, *, device_bytes: int, host_bytes: int | None, has_store: bool, store_bytes: int | None
) -> WriteChoice:
    """What was asked for, or what suits tiers of these sizes. A store without `store_bytes` has no limit, or does not say: it
    counts as large.
    """
    if asked is not None:
        return WriteChoice(asked, "asked for")
    if host_bytes is None:
        return WriteChoice(WritePolicy.THROUGH, "there is no host tier")
    lowest, above_bytes = ("store", device_bytes + host_bytes) if has_store else ("host", device_bytes)
    lowest_bytes = store_bytes if has_store else host_bytes
    if lowest_bytes is None or lowest_bytes > SEVERAL * above_bytes:
        return WriteChoice(WritePolicy.THROUGH, f"the {lowest} has more than {SEVERAL} times the room of what is above it")
    return WriteChoice(WritePolicy.ADAPTIVE, f"the {lowest} would repeat too much of what is above it")
