"""What a run was measured on, for the JSON beside its figures."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def machine(device: str) -> dict[str, Any]:
    return {
        "cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
        "threads": torch.get_num_threads(), "load": os.getloadavg(),
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
    }  # fmt: skip
