"""Everything here runs under vLLM itself, in a venv of its own: `make test-vllm`. A plain run leaves it out."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs only when asked for by path, so that a plain run needs no vLLM."""
    here = Path(__file__).parent
    paths = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    asked = any(here == path or here in path.parents for path in paths)
    for item in items:
        if here in item.path.parents:
            item.add_marker("vllm")
            if not asked:
                item.add_marker(pytest.mark.skip(reason="vLLM takes minutes and a venv of its own: run `make test-vllm`"))
