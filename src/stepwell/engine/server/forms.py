"""How an answer looks on the wire. The seam between the two APIs: each has a form, made anew for each request."""

from __future__ import annotations

from typing import Any, Protocol

from stepwell.engine.request import Delta


class Form(Protocol):
    """Choices of one kind of answer. May remember what it has written so far."""

    @property
    def prefix(self) -> str:
        """Of ids."""
        ...

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that begins a stream, where there is one."""
        ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a chunk."""
        ...

    def whole(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of an answer that is not streamed, from all its deltas as one."""
        ...
