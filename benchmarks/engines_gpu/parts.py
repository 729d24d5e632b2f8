"""Packages for a machine that installs nothing: folders of packages, or archives of them, made importable for a process.

A part is a tree as `pip install --target DIR/NAME` leaves it, or such a tree in `NAME.tar`, `NAME.tar.gz`, `NAME.txz` or
`NAME.tar.zst`, anywhere below DIR; an archive may be cut into pieces `NAME.tar.zst.part_00`, `.part_01`. Archives hold the folder
NAME and are unpacked once. zstandard itself may be a part.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ENDINGS = (".tar", ".tar.gz", ".tgz", ".txz", ".tar.xz", ".tar.zst")


def paths_of(parts: Path, into: Path, names: Sequence[str]) -> list[Path]:
    """Folders to put on PYTHONPATH, in this order. Raises FileNotFoundError for a part that is missing."""
    archives = _archives(parts)
    into.mkdir(parents=True, exist_ok=True)
    zstandard = archives.pop("zstandard", None)
    if zstandard is not None:
        _unpack(zstandard, into)
    sys.path[:0] = [str(each) for each in into.iterdir() if (each / "zstandard").is_dir()]
    wanted = {name: archives[name] for name in names if name in archives and not (into / name).is_dir()}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda pieces: _unpack(pieces, into), wanted.values()))
    found = [next((root / name for root in (into, parts) if (root / name).is_dir()), None) for name in names]
    missing = [name for name, path in zip(names, found, strict=True) if path is None]
    if missing:
        raise FileNotFoundError(
            f"{parts} has no part {', '.join(missing)}; it has {', '.join(sorted(archives)) or 'no archives'}"
        )
    return [path for path in found if path is not None]


def _archives(parts: Path) -> dict[str, list[Path]]:
    """Files of each archive by name, pieces in order."""
    found: dict[str, list[Path]] = {}
    for path in sorted(parts.rglob("*")):
        whole = path.name.partition(".part_")[0]
        ending = next((each for each in ENDINGS if whole.endswith(each)), None)
        if path.is_file() and ending is not None:
            found.setdefault(whole.removesuffix(ending), []).append(path)
    return found


def _unpack(pieces: Sequence[Path], into: Path) -> None:
    with _joined(pieces) as raw:
        if ".tar.zst" in pieces[0].name:
            import zstandard

            raw = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(raw)
        with tarfile.open(fileobj=raw, mode="r|*") as archive:
            archive.extractall(into, filter="tar")


class _Pieces(io.RawIOBase):
    """Files one after the other, read as one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [path.open("rb") for path in paths]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._files:
            count = self._files[0].readinto(buffer)
            if count:
                return count
            self._files.pop(0).close()
        return 0


@contextmanager
def _joined(paths: Sequence[Path]) -> Iterator[IO[bytes]]:
    with io.BufferedReader(_Pieces(paths), 1 << 20) as joined:
        yield joined
