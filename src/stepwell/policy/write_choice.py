"""The write policy where the operator names none: it follows from the sizes of the tiers.

A tier that repeats what the tiers above it hold has less memory for anything else. If the lowest tier has several times the
memory of those above it, that costs little, and no request waits for a copy when memory is needed: `through`. Otherwise
`exclusive`: device and host repeat little of one another. Whether a store repeats what memory holds is another setting: a store
that outlives the process does, unless `durable` is switched off.
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.base.config import WritePolicy

AUTO = "auto"  # how an operator leaves the choice to this
SEVERAL = 4  # times the memory of the tiers above: a tier that has more loses less than a fifth by repeating them


class WriteChoice(NamedTuple):
    write: WritePolicy
    why: str


def choose_write(
    asked: WritePolicy | None, *, device_bytes: int, host_bytes: int | None, has_store: bool, store_bytes: int | None
) -> WriteChoice:
    """What was requested, or what suits tiers of these sizes. A store without `store_bytes` has no limit, or does not report
    it: it counts as large.
    """
    if asked is not None:
        return WriteChoice(asked, "as requested")
    if host_bytes is None:
        return WriteChoice(WritePolicy.THROUGH, "there is no host tier")
    lowest, above_bytes = ("store", device_bytes + host_bytes) if has_store else ("host", device_bytes)
    lowest_bytes = store_bytes if has_store else host_bytes
    if lowest_bytes is None or lowest_bytes > SEVERAL * above_bytes:
        return WriteChoice(WritePolicy.THROUGH, f"the {lowest} has more than {SEVERAL} times the memory of the tiers above it")
    return WriteChoice(WritePolicy.EXCLUSIVE, f"the {lowest} has at most {SEVERAL} times the memory of the tiers above it")
