"""Finds stop strings in a text that comes in pieces, and holds back what could still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Text goes in, and comes out again up to the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What can be shown now. Once `found` is true nothing more is."""
        if self.found:
            return ""
        text = self._held + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when the answer has ended otherwise."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The length of the longest end of `text` that begins `stop`."""
        return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
