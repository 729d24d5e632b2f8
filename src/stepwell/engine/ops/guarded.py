"""A fast operation with its reference in plain torch as the fallback, and the report of the one that runs.

An operation whose kernel a library cannot build or launch runs in plain torch from then on, with one warning and a count:
slower, never wrong. Inputs for which a library has no kernel run there too, and are logged once. Every other error fails the
pass: an assertion or a wrong argument in this package is a bug, and a fallback would hide it behind slow answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from subprocess import SubprocessError
from typing import Any

import torch

# What libraries raise for a compiler that fails or is missing, for a cache that cannot be written, and for a failed launch.
_BUILD_OR_LAUNCH = (RuntimeError, OSError, ImportError, SubprocessError)

log = logging.getLogger(__name__)


class NoKernel(Exception):
    """Raised by a fast operation, before it has written anything: it has no kernel for its input, which the message names."""


class NotYet(NoKernel):
    """The kernel is being compiled, and will be there in a later pass."""


@dataclass(slots=True)
class Report:
    """What runs each operation: which library, what it has no kernel for, and which failed and why."""

    chosen: dict[str, str] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)  # operations whose kernels are being compiled
    changes: int = 0  # how often operations got kernels that had been compiled: measured speeds hold until then

    def leave(self, name: str, what: str) -> None:
        """Notes an input that a library has no kernel for, which plain torch runs. Logs it once."""
        if what not in (left := self.left.setdefault(name, [])):
            left.append(what)
            log.warning("%s: %s has no kernel for %s, so plain torch runs it, slowly", name, self.chosen.get(name), what)

    def lines(self) -> dict[str, str]:
        """The operation, and what runs it now."""
        return {name: self._line(name, library) for name, library in self.chosen.items()}

    def _line(self, name: str, library: str) -> str:
        if name in self.failed:
            return f"torch ({library} failed: {self.failed[name]})"
        if name in self.awaited:
            return f"torch ({library} is being compiled)"
        return f"{library} (torch for {', '.join(self.left[name])})" if name in self.left else library


def by_library(lines: Mapping[str, str]) -> str:
    """What runs operations, in short: `torch`, or `flashinfer: attention, latents; triton: index, ...`."""
    by: dict[str, list[str]] = {}
    for name, library in lines.items():
        by.setdefault(library, []).append(name)
    return next(iter(by)) if len(by) == 1 else "; ".join(f"{library}: {', '.join(names)}" for library, names in by.items())


class Guarded:
    """A fast operation with a fallback. A kernel that failed is not tried again; a call without a kernel falls back alone."""

    def __init__(self, name: str, fast: Callable[..., Any], plain: Callable[..., Any], report: Report) -> None:
        self._name = name
        self._fast = fast
        self._plain = plain
        self._report = report

    def __call__(self, *args: Any, **more: Any) -> Any:
        if self._name in self._report.failed:
            return self._plain(*args, **more)
        try:
            return self._fast(*args, **more)
        except NotYet:
            self._report.awaited.add(self._name)
            return self._plain(*args, **more)
        except NoKernel as lack:
            self._report.leave(self._name, str(lack))
            return self._plain(*args, **more)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # not the kernel's fault, and plain torch needs no less
            if not _of_a_library(error) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                raise  # a bug of ours; or a step that ran before and is being captured
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._report.failed[self._name] = f"{type(error).__name__}: {reason:.200}"
            library = self._report.chosen.get(self._name, "its library")
            log.warning("%s by %s failed, and runs in plain torch from now on", self._name, library, exc_info=True)
            return self._plain(*args, **more)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left. Libraries that load their kernels by the driver say it in words alone."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or (isinstance(error, RuntimeError) and "out of memory" in str(error))


def _of_a_library(error: Exception) -> bool:
    """Whether a library failed to build or launch a kernel. An error of another type does where its code raised it."""
    if isinstance(error, _BUILD_OR_LAUNCH):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
    return package != __name__.partition(".")[0]
