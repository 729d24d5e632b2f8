"""`shared-log:DIR`: from options to an open store, in every process that shares the log. Reads no environment.

It takes the options of `log:DIR`, which the process that opens the log first determines, and

timeout=10    seconds that a call waits for another process before it fails
"""

from __future__ import annotations

import sys
from math import isfinite

from stepwell.base.errors import ConfigError
from stepwell.store.log.opening import read_options
from stepwell.store.registry import Opening
from stepwell.store.shared.store import TIMEOUT_S, SharedLog


def open_shared_log(opening: Opening) -> SharedLog:
    """Raises ConfigError for options that cannot work, StoreError for a directory that can be neither opened nor shared."""
    if sys.platform != "linux":
        raise ConfigError("shared-log needs Linux, for memory that two processes can trust; use log:DIR, in one process")
    options = read_options(opening, "shared-log", "timeout")
    timeout = opening.options.get("timeout")
    return SharedLog(options, clock=opening.clock, timeout_s=_seconds(timeout) if timeout is not None else TIMEOUT_S)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and 0 < seconds <= 3600):
        raise ConfigError(f"timeout is a number of seconds, from above 0 to 3600; got {text!r:.80}")
    return seconds
