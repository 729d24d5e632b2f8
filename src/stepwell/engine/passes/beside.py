"""Fetches that run beside a pass: on a stream of their own, from the moment their rows are known until somebody reads them.

    pass      | resolve | queries of the layer | rows that are there | wait | those that came | attention | experts ...
    beside              | fetch of this layer ------------------------| fetch of the next one that follows the same selection |

Every fetch of what is selected is waited for in its own layer. What is near (`near.py`) comes by the same stream, is waited for
by the next layer that resolves, and by the end of the pass: so a recorded step ends with nothing under way. Copies nothing
itself, and knows neither selections nor slots. Where there are no streams a fetch is done at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepwell.sparse.resolve import Plan

FIRST = -1  # the priority of what a pass waits for soon: its few programs are not to wait behind those of a large product
AS_ALL = 0  # of what only the next pass wants, where nothing else comes by the stream


class Beside:
    """Of one engine. `plan` is what is fetched; its entries of `claim_M` list references to rows that come while it is carried
    out (`ops/on_triton/gather.py`).
    """

    def __init__(self, plan: Plan, *, layers: int, device: torch.device, priority: int = FIRST) -> None:
        self.plan = plan
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self._arrived = [torch.cuda.Event() for _ in range(layers)] if device.type == "cuda" else []
        self._coming: set[int] = set()

    def coming(self, layer: int) -> bool:
        """Whether rows of a layer are on their way, and nobody has waited for them."""
        return layer in self._coming

    @property
    def any_coming(self) -> bool:
        return bool(self._coming)

    def start(self, layer: int, fetch: Callable[[], None]) -> None:
        """Fetches once the current stream has done what it was told so far."""
        self._coming.add(layer)
        if self._stream is None:
            return fetch()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            fetch()
            self._arrived[layer].record(self._stream)
        return None

    def wait(self, layer: int) -> None:
        """What the current stream is told from now on finds the rows of a layer. Nothing if they are not on their way."""
        if layer in self._coming:
            self._coming.remove(layer)
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_event(self._arrived[layer])

    def wait_all(self) -> None:
        """For what a pass has left that failed: its events may be of a recording that came to nothing."""
        if self._coming:
            self._coming.clear()
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
