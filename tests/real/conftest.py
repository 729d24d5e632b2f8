"""Marks everything here as `real`: it needs weights that come as packages, and minutes rather than seconds."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real: needs real weights (make test-real)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs only when asked for by path or by mark, so that a plain run stays short."""
    here = Path(__file__).parent
    asked = config.getoption("-m") or any(here == path or here in path.parents for path in _arguments(config))
    for item in items:
        if here in item.path.parents:
            item.add_marker("real")
            if not asked:
                item.add_marker(pytest.mark.skip(reason="real weights take minutes: run `make test-real`"))


def _arguments(config: pytest.Config) -> list[Path]:
    return [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
