"""Fixtures of the shared log, for every test here."""

from __future__ import annotations

from shared_log_fixtures import directory, open_here, start_peer

__all__ = ["directory", "open_here", "start_peer"]
