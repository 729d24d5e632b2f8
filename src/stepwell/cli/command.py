"""The type of a subcommand, and texts for the terminal: escaped, and with settings spelled as flags."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


def printable(text: str) -> str:
    r"""The text with control characters (escapes, line ends, changes of direction) written as \x1b."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


EXIT_USER_ERROR = 2  # a user's error


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`configure` adds the arguments, `run` does the work and returns the exit status. `extra` names the extra it requires."""

    name: str
    summary: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    extra: str = ""


_OTHER = {
    "device_bytes": "device-memory",
    "host_bytes": "host-memory",
    "max_context": "max-model-len",
    "checkpoint_delay_s": "checkpoint-delay",
    "write": "write-policy",
    "budget": "store-budget",
    "store_options": "store-option",
}
_SNAKE = (
    "device_bytes", "host_bytes", "device_memory", "host_memory", "store_budget", "store_options", "page_tokens", "max_context",
    "max_running", "chunk_tokens", "kv_dtype", "checkpoint_dtype", "checkpoint_delay_s", "draft_tokens", "sparse_budget",
    "hot_rows", "tensor_parallel", "restart_workers",
)  # fmt: skip
_WORDS = ("store", "device", "dtype", "kernels", "sparse", "draft", "write", "budget", "requests", "jobs")
_SETTING = re.compile(
    rf"(?<![\w./=\"'-])(?:`?(?P<snake>{'|'.join(_SNAKE)})\b`?|`(?P<word>{'|'.join(_WORDS)})(?:=(?P<value>[^`]+))?`)(?![\"'\w])"
)


def with_flags(message: str) -> str:
    """Spells settings as flags: `host_memory` becomes `--host-memory`, and `budget=100GiB` `--store-budget 100GiB`."""

    def flag(found: re.Match[str]) -> str:
        name = found["snake"] or found["word"]
        value = f" {found['value']}" if found["value"] else ""
        return f"--{_OTHER.get(name, name.replace('_', '-'))}{value}"

    return _SETTING.sub(flag, message)
