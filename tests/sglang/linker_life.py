"""One process of SGLang's tree over Stepwell's linker: `linker_life.py save|resume DIRECTORY`. Writes its result as JSON.

Runs with the interpreter that SGLang is installed for, and imports nothing of pytest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks" / "peers")]

import sglang_copies  # noqa: E402
import torch  # noqa: E402
from stack import KINDS, PAGE, TOKENS, some_bytes, tokens_of  # noqa: E402

sglang_copies.install()

from linked import evict, found, linked, linker_of, resume, save  # noqa: E402

FLIPPED = 9  # the page that a bit is flipped in
LEAVES_AT = 700  # tokens of the prompt that another one shares


def save_all(root: Path) -> dict[str, object]:
    """Saved, and resumed from the host after the device has lost it."""
    out: dict[str, object] = {"piece": some_bytes(FLIPPED).hex()}
    for kind in KINDS:
        with linked(kind, root / kind) as made:
            save(made, tokens_of(7))
            evict(made)
            out[f"{kind} host"] = resume(made, tokens_of(7))
    return out


def resume_all(root: Path) -> dict[str, object]:
    out: dict[str, object] = {}
    other = tokens_of(7)[:LEAVES_AT] + tokens_of(8)[LEAVES_AT:]
    for kind in KINDS:
        with linked(kind, root / kind) as made:
            out[f"{kind} store"] = resume(made, tokens_of(7))
            out[f"{kind} fetched"] = linker_of(made).stats()["fetched"]
        with linked(kind, root / kind) as made:
            out[f"{kind} branch"] = resume(made, other)
    with linked("full", root / "flipped") as made:
        out["flipped"] = resume(made, tokens_of(7))
    with linked("full", root / "full", dtype=torch.float16) as made:
        out["dtype"] = found(made, tokens_of(7))
    with linked("full", root / "full", heads=(1, 128)) as made:
        out["layout"] = found(made, tokens_of(7))
    with linked("full", root / "full", host_memory="256KiB") as made:  # fewer pages than the prompt has
        out["small"] = resume(made, tokens_of(7))
    out["again"] = _again(root)
    return out


def _again(root: Path) -> list[Any]:
    """A prompt that was loaded and inserted by its request, as computed ones are; then evicted, and loaded once more."""
    with linked("full", root / "full") as made:
        save(made, tokens_of(7))  # the store has it already
        evict(made)
        first, stats = resume(made, tokens_of(7), "first"), linker_of(made).stats()
        second = resume(made, tokens_of(7)[: TOKENS // 2 // PAGE * PAGE], "second")
        return [first, second, stats["saved"]]


DO: dict[str, Callable[[Path], dict[str, object]]] = {"save": save_all, "resume": resume_all}

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write("\n" + json.dumps(DO[sys.argv[1]](Path(sys.argv[2]))) + "\n")
