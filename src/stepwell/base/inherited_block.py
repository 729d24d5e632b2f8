"""Memory without a name, for processes that this one starts: they map the descriptor that they inherit."""

from __future__ import annotations

import mmap
import os
import weakref

from stepwell.base.errors import ConfigError
from stepwell.base.units import format_bytes


class InheritedBlock:
    """All of it is taken when it is made. It lives as long as anybody has it mapped, or this object lives."""

    def __init__(self, size_bytes: int) -> None:
        """Raises ConfigError where so much cannot be had."""
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("stepwell", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)  # else the lack of room would kill whoever writes first
            self._map = mmap.mmap(self.fd, size_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{format_bytes(size_bytes)} of shared host memory cannot be had ({error}): give less") from error

    @property
    def view(self) -> memoryview:
        return memoryview(self._map)
