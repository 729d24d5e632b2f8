"""Whose bytes these are: a name for weights that changes when their files do. Reads files, hashes no weights as a whole.

Engines know models by a path. The same path may hold other weights tomorrow, so the files count: names, sizes, times of change,
and samples of what is in them.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

Stamp = list[tuple[str, int, int, int]]

SAMPLE_BYTES = 64 << 10
SAMPLES = 16  # of each file of weights
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
SMALL = (".json", ".txt", ".model")  # read whole: configs and the like


class Adapters:
    """Digests of adapters as they were when first seen, which is when an engine loads them.

    It keeps the weights it has loaded, whatever becomes of their files. Once those have changed, nobody here can tell which of
    the two it has: the adapter has no digest any more, until it comes under a number of its own.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Stamp, str | None]] = {}

    def digest(self, number: int, path: str) -> str | None:
        """None where the adapter cannot be told from others, or cannot be read."""
        root = Path(path)
        try:
            stamp = _stamp(root)
            if (number, path) not in self._known:
                digest = files_digest(root)
                if digest is None or _stamp(root) != stamp:  # not there yet, or being written
                    return None
                self._known[number, path] = (stamp, digest)
        except OSError:
            return None
        first, digest = self._known[number, path]
        if first != stamp:
            self._known[number, path] = (first, None)
            return None
        return digest


def files_digest(root: Path) -> str | None:
    """A digest of a model's or an adapter's folder, or of one file; None where there are no weights. Raises OSError."""
    state, weighs = blake2b(digest_size=16), False
    for path in _files(root):
        weighs |= path.suffix in WEIGHTS
        state.update(_signature(path, str(path.relative_to(root) if root.is_dir() else path.name)))
    return state.hexdigest() if weighs else None


def _files(root: Path) -> list[Path]:
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
    return [path for path in files if path.suffix in WEIGHTS or path.suffix in SMALL]


def _stamp(root: Path) -> Stamp:
    """What changes whenever a file is written or replaced, without reading any."""
    found = [(str(path), path.stat()) for path in _files(root)]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


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
