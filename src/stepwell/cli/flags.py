"""Settings of the Python API in messages, as the command line spells them. Changes texts alone.

Errors below `cli` name the setting that is wrong: `host_memory`, in backticks where the name is a plain word (`store`).
"""

from __future__ import annotations

import re

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
    """`host_memory` becomes `--host-memory`, and `budget=100GiB` in backticks `--store-budget 100GiB`."""

    def flag(found: re.Match[str]) -> str:
        name = found["snake"] or found["word"]
        value = f" {found['value']}" if found["value"] else ""
        return f"--{_OTHER.get(name, name.replace('_', '-'))}{value}"

    return _SETTING.sub(flag, message)
