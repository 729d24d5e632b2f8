"""Chooses the write policy from the sizes of the tiers, if the operator names none.

A tier that duplicates the tiers above it has less memory for anything else. If the lowest tier has several times the memory of
those above it, that costs little, and no request waits for a copy when memory is needed: `through`. Otherwise `exclusive`, under
which device and host duplicate little. Whether a store duplicates memory is a separate setting: a store that outlives the process
does, unless `durable` is switched off.
"""

from __future__ import annotations

from typing import NamedTuple

from stepwell.base.config import WritePolicy

AUTO = "auto"  # the setting that leaves the choice to this module
SEVERAL = 4  # times the memory of the tiers above: a larger tier loses less than a fifth of it to duplicates


class WriteChoice(NamedTuple):
    write: WritePolicy
    why: str


def choose_write(
    asked: WritePolicy | None, *, device_bytes: int, host_bytes: int | None, has_store: bool, store_bytes: int | None
) -> WriteChoice:
    """The requested policy, or one for tiers of these sizes. A store without `store_bytes` is unlimited or does not report its
    size, and counts as large.
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
