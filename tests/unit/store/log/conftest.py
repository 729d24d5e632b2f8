"""Small log stores for the tests of this folder."""

from __future__ import annotations

from log_fixtures import open_here

__all__ = ["open_here"]
