"""Whose bytes these are: a name for weights that changes when their files do. Reads files, hashes no weights as a whole.

Engines know models by a path. The same path may hold other weights tomorrow, so the files count: names, sizes, times of change,
and samples of what is in them.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

SAMPLE_BYTES = 64 << 10
SAMPLES = 16  # of each file of weights
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
SMALL = (".json", ".txt", ".model")  # read whole: configs and the like


def files_digest(root: Path) -> str | None:
    """A digest of a model's or an adapter's folder, or of one file; None where there are no weights."""
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
    state, weighs = blake2b(digest_size=16), False
    for path in files:
        if path.suffix in WEIGHTS or path.suffix in SMALL:
            weighs |= path.suffix in WEIGHTS
            state.update(_signature(path, str(path.relative_to(root) if root.is_dir() else path.name)))
    return state.hexdigest() if weighs else None


def _signature(path: Path, name: str) -> bytes:
    found = path.stat()
    state = blake2b(repr((name, found.st_size)).encode(), digest_size=16)
    with path.open("rb") as file:
        if path.suffix in SMALL or found.st_size <= SAMPLES * SAMPLE_BYTES:
            state.update(file.read())
        else:
            state.update(found.st_mtime_ns.to_bytes(16, "little", signed=True))  # what no sample shows
            for number in range(SAMPLES):
                file.seek((found.st_size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                state.update(file.read(SAMPLE_BYTES))
    return state.digest()
