"""A network that only one command and its child processes can see, and whether this machine can make one. Tests use it too.

Mooncake's processes listen on every interface and accept no host that has `lo` alone, so they get a network namespace of
their own with a pair of virtual cards. It needs no name and no cleaning up: it goes with the last process in it, and
those go with the first (it is the init of a process namespace).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from stepwell.base.extras import install

HOST = "192.0.2.1"  # an address for documentation: no real one is hidden
_CARDS = (
    "ip link set lo up && { ip link add d0 type veth peer name d1 && ip link set d1 up || ip link add d0 type dummy; } "
    f'&& ip addr add {HOST}/24 dev d0 && ip link set d0 up && exec "$@"'
)
_UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child")
_WAYS = (_UNSHARE, (*_UNSHARE, "--map-root-user"))  # as root, or as any user where the kernel allows it
_PACKAGES = "apt-get install libibverbs1 iproute2"


def inside(command: Sequence[str]) -> list[str]:
    """The command line that runs a command in a private network. Only where `why_not()` is empty."""
    return [*_way(), "sh", "-c", _CARDS, "sh", *command]


@cache
def why_not() -> str:
    """Why there can be no private network with Mooncake in it on this machine; empty when there can."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            return f"there is no program {program!r} here ({_PACKAGES})"
    loaded = _run([sys.executable, "-c", "import mooncake.store"])
    if loaded.returncode:
        how = install("mooncake") if "ModuleNotFoundError" in loaded.stderr else _PACKAGES
        return f"Mooncake's wheel does not load ({_last(loaded)}; {how})"
    return "" if _way() else f"no private network can be made ({_last(_try(_WAYS[-1]))})"


@cache
def _way() -> tuple[str, ...]:
    return next((way for way in _WAYS if _try(way).returncode == 0), ())


def _try(way: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return _run([*way, "sh", "-c", _CARDS, "sh", "true"])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
