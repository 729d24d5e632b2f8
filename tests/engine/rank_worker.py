"""A rank in a process of its own: takes jobs from its standard input, a JSON object a line, and answers a line for each.

    python rank_worker.py RANK SIZE MEETING

What it computed is a file next to the job's checkpoint. It ends when its input does, and with its first failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.side_by_side import PAGE, Held, Memory, Ours
from stepwell.base.ids import Kind
from stepwell.base.spec.families import from_config
from stepwell.engine.loading.safetensors_files import SafetensorsFiles
from stepwell.engine.loading.weights import TensorSource
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.mtp import load_mtp
from stepwell.engine.models.registry import build_model
from stepwell.engine.ranks import ALONE, Ranks, join

LIMIT_S = 180.0  # of a collective: the other rank may still be starting, on a machine that is busy
CHUNKS = (2 * PAGE, 7, 30, 1, 1, 13, 1)
PROMPTS = (5, PAGE, 37)
STEPS = 6


def observe(model: Decoder) -> dict[str, torch.Tensor]:
    """Logits of every token of a prompt in chunks, tokens and logits of greedy answers, and what is left in memory."""
    ours, memory = Ours(model), Memory(model.spec, count=32)
    found = {"logits": ours.in_chunks(ours.tokens(90), CHUNKS, memory)}
    made, last = ours.ragged([ours.tokens(length, seed=length) for length in PROMPTS], STEPS)
    found |= {"answers": torch.tensor(made), "last": torch.stack(last)}
    kept = [part.state for kind in Kind for part in model.spec.parts(kind)]  # some states have rows at no boundary
    return found | {f"state.{name}": memory.pages.bytes_PLRB(name).contiguous() for name in kept}


def observe_draft(model: Decoder, config: Mapping[str, object], source: TensorSource) -> dict[str, torch.Tensor]:
    """Hidden states and logits of the layer behind the model's last, and its rows."""
    whole = from_config(config, kv_dtype="fp32", model_dtype="fp32", page_tokens=PAGE, draft=True)
    spec = replace(whole, states=whole.states[len(model.spec.states) :], schedule=()).for_ranks(model.ranks.size)
    layer, memory = load_mtp(config, source, model, spec), Memory(spec, count=8)
    held, tokens = Held(memory, 40), Ours(model).tokens(40)
    hidden_NC = torch.randn(40, model.embed.shape[1], generator=torch.Generator().manual_seed(1))
    parts = [
        layer(memory.batch([held.segment(tokens[at : at + 10])], every_token=True), hidden_NC[at : at + 10])
        for at in range(0, 40, 10)
    ]
    return {
        "draft.hidden": torch.cat([hidden for hidden, _ in parts]),
        "draft.logits": torch.cat([logits for _, logits in parts]),
        "state.draft": memory.pages.bytes_PLRB("draft").contiguous(),
    }  # fmt: skip


def compute(folder: Path, ranks: Ranks, job: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    config, source = json.loads((folder / "config.json").read_text()), SafetensorsFiles([folder / "model.safetensors"])
    model = build_model(config, source, page_tokens=PAGE, ranks=ranks, dtype=job.get("dtype", "fp32"))
    found = observe(model)
    return found | observe_draft(model, config, source) if job.get("draft") else found


def main() -> None:
    rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    ranks = join(rank, size, meeting, backend="gloo", timeout_s=LIMIT_S) if size > 1 else ALONE
    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        save_file(compute(folder, ranks, job), folder / f"rank{rank}of{size}.safetensors")
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
