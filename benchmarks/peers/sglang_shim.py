"""Makes SGLang, which imports torchvision, importable with a CPU build of torch.

Changes the operator registry of this process only; never touches installed files.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

# All that torchvision's Python half needs, at import, from its compiled half.
BOX_OPERATORS = ("nms", "qnms")
BOX_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_box_operators() -> torch.library.Library:
    """Make sure the operators exist; call once, before anything imports `sglang`.

    Declarations last as long as the returned library, which is empty where
    torchvision's own operators load.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not _compiled_half_loads():
        for name in BOX_OPERATORS:
            library.define(name + BOX_SIGNATURE)
    return library


def _compiled_half_loads() -> bool:
    """Whether torchvision's operators load: those of a CUDA build need a CUDA torch."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None, "torchvision is not installed"
    try:
        torch.ops.load_library(Path(spec.origin).parent / "_C.so")
    except OSError:
        return False
    return True
