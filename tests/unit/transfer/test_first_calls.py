"""What a process computes first is what it computes later, however many threads share it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROCESSES = 600  # of which some ten compute wrongly without the first calls, where torch has MKL 2024.2
HANGS_S = 600.0  # on a quiet machine it takes some ten

# Every child is a new process to MKL. The parent must not call any of its functions.
FIRST_IN_A_PROCESS = f"""
import os
import torch
from stepwell.transfer.first_calls import make_first_calls

torch.set_num_threads(2)
angles_NF = torch.arange(448.0)[:, None] / torch.arange(1.0, 33.0)
wrong = 0
for _ in range({PROCESSES}):
    child = os.fork()
    if not child:
        make_first_calls()
        cosines_NF = angles_NF.cos()
        os._exit(int((cosines_NF.double() - angles_NF.double().cos()).abs().max() > 1e-6))
    wrong += os.waitpid(child, 0)[1] != 0
print(wrong)
"""


def test_threads_that_share_the_first_function_of_a_process_compute_it_rightly() -> None:
    several = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-W", "ignore", "-c", FIRST_IN_A_PROCESS]
    ran = subprocess.run(command, env=several, capture_output=True, text=True, check=False, timeout=HANGS_S)
    assert ran.stdout.strip() == "0", f"{ran.stdout} of {PROCESSES} processes computed wrongly\n{ran.stderr[-2000:]}"
