"""Worlds may shorten the tree's nodes; every test leaves them as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stepwell.tree import tree


@pytest.fixture(autouse=True)
def _nodes_of_the_usual_length() -> Iterator[None]:
    usual = tree.NODE_PAGES
    yield
    tree.NODE_PAGES = usual
