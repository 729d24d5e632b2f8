"""Names for weights that change when their files do. Reads files, but hashes no weights as a whole.

Engines know a model by its path, and the same path may hold other weights tomorrow. The name therefore covers names, sizes and
modification times of the files, and samples of their contents.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

Stamp = list[tuple[str, int, int, int]]

SAMPLE_BYTES = 64 << 10
SAMPLES = 16  # per file of weights
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
SMALL = (".json", ".txt", ".model")  # read whole: configs and the like


class Adapters:
    """Digests of adapters as they were when first seen, which is when an engine loads them.

    An engine keeps the weights it has loaded, even if their files change. After a change it is unknown which weights it has, so
    the adapter has no digest until it appears under a new number.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Stamp, str | None]] = {}

    def digest(self, number: int, path: str) -> str | None:
        """None if the adapter cannot be read or identified."""
        root = Path(path)
        try:
            stamp = _stamp(root)
            if (number, path) not in self._known:
                digest = files_digest(root)
                if digest is None or _stamp(root) != stamp:  # missing or still being written
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
    """A digest of the directory of a model or adapter, or of one file; None without weights. Raises OSError."""
    state, weighs = blake2b(digest_size=16), False
    for path in _files(root):
        weighs |= path.suffix in WEIGHTS
        state.update(_signature(path, str(path.relative_to(root) if root.is_dir() else path.name)))
    return state.hexdigest() if weighs else None


def _files(root: Path) -> list[Path]:
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
    return [path for path in files if path.suffix in WEIGHTS or path.suffix in SMALL]


def _stamp(root: Path) -> Stamp:
    """Metadata that changes whenever a file is written or replaced. Reads no file."""
    found = [(str(path), path.stat()) for path in _files(root)]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


def _signature(path: Path, name: str) -> bytes:
    found = path.stat()
    state = blake2b(repr((name, found.st_size)).encode(), digest_size=16)
    with path.open("rb") as file:
        if path.suffix in SMALL or found.st_size <= SAMPLES * SAMPLE_BYTES:
            state.update(file.read())
        else:
            state.update(found.st_mtime_ns.to_bytes(16, "little", signed=True))  # for changes outside of the samples
            for number in range(SAMPLES):
                file.seek((found.st_size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                state.update(file.read(SAMPLE_BYTES))
    return state.digest()
