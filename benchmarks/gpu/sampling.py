"""The cost of sampling in a step: greedy, by temperature, top-k and top-p, by the kernels and by plain torch.

Sharp logits are spread as those of a trained model are, so that few tokens make up the top-p; of flat ones most do.
"""

from __future__ import annotations

from functools import partial

import torch

from gpu.bench import Bench
from gpu.device_time import median_us
from gpu.limits import MEMORY_BYTES_PER_S
from report import Goal, Row
from stepwell.engine.ops.drawing import Draw, Pick, pick
from stepwell.engine.ops.kernels import choose_kernels

VOCAB, BATCHES, ROUNDS = 151_936, (1, 8, 64), 20
MOST_US = 100.0
WARM = Draw(temperature=0.8, top_k=None, top_p=1.0, number=0.37)
SETTINGS = {
    "greedy": None, "temperature": WARM, "top-p": Draw(temperature=0.8, top_k=None, top_p=0.9, number=0.37),
    "top-k": Draw(temperature=0.8, top_k=20, top_p=1.0, number=0.37),
    "top-k, top-p": Draw(temperature=0.8, top_k=20, top_p=0.95, number=0.37),
}  # fmt: skip
SPREADS = {"sharp": 3.0, "flat": 1.0}


@torch.inference_mode()
def measure(bench: Bench) -> list[Row]:
    if bench.device != "cuda":
        return [Row(what="choosing tokens", note="left out: it is measured on a GPU alone")]
    by_kernel, rows = choose_kernels("auto", bench.device, torch.bfloat16).pick, []
    for batch in BATCHES:
        for spread, scale in SPREADS.items():
            logits_BV = (torch.randn(batch, VOCAB, device=bench.device) * scale).bfloat16().float()
            for name, draw in SETTINGS.items():
                if bench.budget.left_s <= 0:
                    return [*rows, Row(what="the rest", note="left out: no time")]
                with bench.budget.uncounted():
                    by_kernel(logits_BV, [draw] * batch)  # compiled once
                rows.append(_row(f"{batch} x {name}, {spread}", logits_BV, [draw] * batch, by_kernel))
    return rows


def _row(what: str, logits_BV: torch.Tensor, draws: list[Draw | None], by_kernel: Pick) -> Row:
    took_us, torch_us = (median_us(partial(each, logits_BV, draws), rounds=ROUNDS, parts=1) for each in (by_kernel, pick))
    same = torch.equal(by_kernel(logits_BV, draws), pick(logits_BV, draws))
    figures: dict[str, float | str] = {
        "kernels, us": took_us, "plain torch, us": torch_us, "reading once, us": logits_BV.nbytes / MEMORY_BYTES_PER_S * 1e6,
        "same tokens": "yes" if same else "NO",
    }  # fmt: skip
    return Row(what=what, figures=figures, goal=Goal(value=took_us, limit=MOST_US, most=True))
