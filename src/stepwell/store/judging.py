"""The outcome of reads and writes, value by value: no value counts before it matches its stamp.

The one place that verifies the stamps of values, for everything that reads from a store. Touches no store; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from hmac import compare_digest

from stepwell.base.tasks import ItemStatus
from stepwell.store.api import Read, ReadOutcome, ReadResult, Space, WriteOutcome
from stepwell.store.seal import Seals, Verdict

UNSETTLED = (ReadOutcome.FAILED, ReadOutcome.LENGTH)  # a store with `late_write_s` may still write into such buffers

_OF_READ = {
    ReadOutcome.MISSING: ItemStatus.MISSING,
    ReadOutcome.LENGTH: ItemStatus.LENGTH,
    ReadOutcome.DAMAGED: ItemStatus.DAMAGED,
    ReadOutcome.CANCELLED: ItemStatus.CANCELLED,
    ReadOutcome.FAILED: ItemStatus.FAILED,
}
_OF_VERDICT = {
    Verdict.INTACT: ItemStatus.OK,
    Verdict.UNREADABLE: ItemStatus.UNREADABLE,
    Verdict.VERSION: ItemStatus.VERSION,
    Verdict.FOREIGN: ItemStatus.FOREIGN,
    Verdict.SWAPPED: ItemStatus.SWAPPED,
    Verdict.LENGTH: ItemStatus.LENGTH,
    Verdict.DAMAGED: ItemStatus.DAMAGED,
    Verdict.OTHER_KEY: ItemStatus.OTHER_KEY,
}
OF_WRITE = {
    WriteOutcome.STORED: ItemStatus.OK,
    WriteOutcome.EXISTS: ItemStatus.OK,
    WriteOutcome.NO_ROOM: ItemStatus.NO_ROOM,
    WriteOutcome.TOO_LARGE: ItemStatus.NO_ROOM,
    WriteOutcome.FAILED: ItemStatus.FAILED,
}


def judge_reads(
    seals: Seals, space: Space, reads: Sequence[Read], results: Sequence[ReadResult]
) -> tuple[list[ItemStatus], list[bytes]]:
    """The status of each read, and the digests of the values that were read. All of them are verified."""
    found, digest, none = ReadOutcome.FOUND, seals.digest, bytes(seals.digest_bytes)
    keys, buffers = [read.key for read in reads], [read.into for read in reads]
    outcomes, stamps = [result.outcome for result in results], [result.stamp for result in results]
    lengths, statuses = list(map(len, buffers)), [ItemStatus.OK] * len(reads)
    all_came = outcomes.count(found) == len(reads) == len(results)
    if all_came:
        digests = list(map(digest, buffers))  # with nothing in between
    else:
        digests = [digest(into) if outcome is found else none for into, outcome in zip(buffers, outcomes, strict=True)]
    expected = seals.stamp_all(space, keys, lengths, digests)
    if all_came and compare_digest(b"".join(stamps), b"".join(expected)):
        return statuses, digests
    for at, (result, stamped) in enumerate(zip(results, expected, strict=True)):
        if result.outcome is not found:
            statuses[at] = _OF_READ[result.outcome]
        elif not compare_digest(result.stamp, stamped):  # find out why
            verdict = seals.judge(space, keys[at], result.stamp, length=lengths[at], digest=digests[at])
            statuses[at] = _OF_VERDICT[verdict]
    return statuses, digests


def deletable(reads: Sequence[Read], statuses: Sequence[ItemStatus]) -> list[bytes]:
    """The keys of values that are useless, so that a good copy can replace them. Excludes values of other format versions."""
    judged = zip(reads, statuses, strict=True)
    return [read.key for read, status in judged if status.is_damage and status is not ItemStatus.VERSION]
