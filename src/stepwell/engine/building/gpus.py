"""The GPUs that torch sees. Takes no memory of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    names: tuple[str, ...]
    cuda: str | None  # the version that torch was built for; None for a torch without


def gpus() -> Gpus:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Gpus(names=tuple(torch.cuda.get_device_name(number) for number in range(count)), cuda=torch.version.cuda)
