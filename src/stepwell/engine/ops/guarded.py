"""A fast operation with the plain one behind it, and what people are told of both.

An operation whose kernel fails to build or to run goes on in plain torch, with one warning and a count: slower, never wrong.
What a library has no kernel for goes there too, and is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

log = logging.getLogger(__name__)


class NoKernel(Exception):
    """Raised by a fast operation, before it has written anything: what it was given is not for it. Says what that was."""


@dataclass(slots=True)
class Report:
    """What runs each operation, for people: which library, what it has no kernel for, and which failed and why."""

    chosen: dict[str, str] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def leave(self, name: str, what: str) -> None:
        """Something that a library has no kernel for runs in plain torch. Said once."""
        if what not in (left := self.left.setdefault(name, [])):
            left.append(what)
            log.warning("%s: %s has no kernel for %s, so plain torch runs it, slowly", name, self.chosen.get(name), what)

    def lines(self) -> dict[str, str]:
        """The operation, and what runs it now."""
        return {name: self._line(name, library) for name, library in self.chosen.items()}

    def _line(self, name: str, library: str) -> str:
        if name in self.failed:
            return f"torch ({library} failed: {self.failed[name]})"
        return f"{library} (torch for {', '.join(self.left[name])})" if name in self.left else library


def by_library(lines: Mapping[str, str]) -> str:
    """What runs operations, in short: `torch`, or `flashinfer: attention, latents; triton: index, ...`."""
    by: dict[str, list[str]] = {}
    for name, library in lines.items():
        by.setdefault(library, []).append(name)
    return next(iter(by)) if len(by) == 1 else "; ".join(f"{library}: {', '.join(names)}" for library, names in by.items())


class Guarded:
    """A fast operation with the plain one behind it: what fails once is not tried again, what has no kernel goes there alone."""

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
        except NoKernel as lack:
            self._report.leave(self._name, str(lack))
            return self._plain(*args, **more)
        except torch.cuda.OutOfMemoryError:
            raise  # not the kernel's fault, and plain torch needs no less
        except Exception as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # the step was computed before it is recorded
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._report.failed[self._name] = f"{type(error).__name__}: {reason:.200}"
            library = self._report.chosen.get(self._name, "its library")
            log.warning("%s by %s failed, and runs in plain torch from now on", self._name, library, exc_info=True)
            return self._plain(*args, **more)
