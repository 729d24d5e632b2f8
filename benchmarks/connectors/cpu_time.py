"""CPU seconds of an engine: they are nearly the same on a machine that others use, where seconds are not."""

from __future__ import annotations

import psutil


def cpu_s() -> float:
    """Of this process and those that it made, which must not have ended since it was last asked."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))
