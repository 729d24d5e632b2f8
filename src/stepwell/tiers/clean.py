"""What the device could give up at once, since the host has it too. Filled by `reserve.py`, used by `eviction.py`."""

from __future__ import annotations

from collections.abc import Iterator

from stepwell.base.ids import Tier
from stepwell.memory.arena import Arena
from stepwell.tree.node import Residency, Run, Victim


class Clean:
    """Things that are to leave the device next, oldest first. Some are no longer clean until `check` has looked at them."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._page_bytes = arena.layout.prefix_stride
        self._sizes: dict[Victim, int] = {}
        self.run_bytes = self.checkpoint_bytes = 0
        self.left_bytes = 0  # of the device, clean or not, since somebody set this to 0

    def __iter__(self) -> Iterator[Victim]:
        return iter(list(self._sizes))

    def __len__(self) -> int:
        return len(self._sizes)

    def note(self, victim: Victim) -> None:
        """It is clean, or will be when its copy ends."""
        self._forget(victim)
        if isinstance(victim, Run):
            self._sizes[victim] = victim.num_pages * self._page_bytes
            self.run_bytes += self._sizes[victim]
        else:
            self._sizes[victim] = victim.size_bytes
            self.checkpoint_bytes += victim.size_bytes

    def check(self, at_most: int) -> None:
        """Looks at so many: those that have left, or were used since, are not counted any more."""
        for victim in list(self._sizes)[:at_most]:
            if is_clean(victim):
                self.note(victim)
            else:
                self._forget(victim)

    def next(self, *, runs: bool, checkpoints: bool) -> Victim | None:
        """One of the wanted sorts that may go now."""
        found, past = None, list[Victim]()
        for victim in self._sizes:
            if not (runs if isinstance(victim, Run) else checkpoints):
                continue
            if not is_clean(victim):
                past.append(victim)
            elif victim.entry:  # else its copy goes on, or somebody uses it
                found = victim
                break
        for victim in past:
            self._forget(victim)
        return found

    def audit(self) -> None:
        """Asserts that the bytes of each sort add up."""
        runs = sum(size for victim, size in self._sizes.items() if isinstance(victim, Run))
        found, counted = (runs, sum(self._sizes.values()) - runs), (self.run_bytes, self.checkpoint_bytes)
        assert found == counted, f"{found=} {counted=}"

    def _forget(self, victim: Victim) -> None:
        size = self._sizes.pop(victim, 0)
        if isinstance(victim, Run):
            self.run_bytes -= size
        else:
            self.checkpoint_bytes -= size


def is_clean(victim: Victim) -> bool:
    """Whether something on the device is to leave it next, and the host has it, or will."""
    if not victim.leaving or victim.unsaved:
        return False
    if isinstance(victim, Residency):
        held = victim.checkpoint.held
        return held[Tier.DEVICE] is victim and held[Tier.HOST] is not None
    node = victim.node
    device, host = node.runs
    return device is victim and host is not None and host.num_pages == node.num_pages
