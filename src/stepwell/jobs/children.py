"""Child processes that end when this process does, however it ends: at its last line, by Ctrl-C, or by `kill -9`.

Linux kills such a child when the thread that started it ends (PR_SET_PDEATHSIG), so one thread that lasts as long as the process
starts all of them. The child requests that itself, in a few lines that run before the command and then become it: code between
fork and exec in a process with threads may deadlock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one has ended already")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """`Popen(command, **options)`, killed when this process ends. Its id is that of the command. From any thread."""
    become = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid())] if sys.platform == "linux" else []
    return _starter().submit(lambda: subprocess.Popen([*become, *command], **options)).result()


@cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="starts-children")
