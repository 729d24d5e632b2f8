"""Anonymous shared memory for child processes, which map the descriptor that they inherit."""

from __future__ import annotations

import mmap
import os
import weakref

from stepwell.base.errors import ConfigError
from stepwell.base.units import format_bytes


class InheritedBlock:
    """A block of memory, all of it allocated on construction. It exists while this object does or a process has it mapped."""

    def __init__(self, size_bytes: int) -> None:
        """Raises ConfigError if the memory is not available."""
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("stepwell", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)  # otherwise a lack of memory would kill the first writer
            self._map = mmap.mmap(self.fd, size_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{format_bytes(size_bytes)} of shared host memory cannot be had ({error}): give less") from error

    @property
    def view(self) -> memoryview:
        return memoryview(self._map)
