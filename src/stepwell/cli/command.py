"""What a subcommand is. Each lives in a module of its own, and `main` lists them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

EXIT_USER_ERROR = 2  # the user has to change something


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`configure` adds the arguments, `run` does the work and returns the exit status. `extra` is what it needs installed."""

    name: str
    summary: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    extra: str = ""
