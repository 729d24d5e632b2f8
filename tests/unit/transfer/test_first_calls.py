"""What a process computes first is what it computes later, however many threads share it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

torch = pytest.importorskip("torch")

from stepwell.transfer.first_calls import make_first_calls  # noqa: E402

PROCESSES = 600  # about ten of them compute cosines wrongly without the first calls, where torch has MKL 2024.2
HANGS_S = 600.0  # on a quiet machine it takes some ten
WRONG = 3  # how a child ends that has computed wrongly

# Every child is a new process to MKL. The parent must not call any of its functions.
FIRST_IN_A_PROCESS = f"""
import os
from collections import Counter
import torch
from stepwell.transfer.first_calls import FUNCTIONS, make_first_calls

torch.set_num_threads(2)
shares_NF = (torch.arange(448.0)[:, None] + torch.arange(1.0, 33.0)) / 512
ended = Counter()
for _ in range({PROCESSES}):
    child = os.fork()
    if not child:
        make_first_calls()
        off = 0.0
        for name in ("cos", *FUNCTIONS):
            found_NF, right_NF = getattr(shares_NF, name)().double(), getattr(shares_NF.double(), name)()
            off = max(off, float(((found_NF - right_NF).abs() / (1 + right_NF.abs())).max()))
        os._exit({WRONG} if off > 1e-6 else 0)
    ended[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
print(dict(ended))
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here: run `make test` on x86-64")
def test_threads_that_share_the_first_calls_of_a_process_compute_rightly() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FIRST_IN_A_PROCESS]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS_S)
    assert ran.stdout.strip() == str({0: PROCESSES}), f"{ran.stdout}, {WRONG} for wrong\n{ran.stderr[-2000:]}"


def test_vllm_is_told_to_make_them() -> None:
    (plugin,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "stepwell"]
    assert plugin.load() is make_first_calls
