"""How long each part of a start takes: one line of the log for each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from stepwell.base.meters import Clock, SystemClock

log = logging.getLogger(__name__)


@contextmanager
def phase(name: str, clock: Clock | None = None) -> Iterator[None]:
    """Logs how long the body took, when it has ended well."""
    clock = clock or SystemClock()
    began_s = clock.now()
    yield
    log.info("start: %s took %.1f s", name, clock.now() - began_s)
