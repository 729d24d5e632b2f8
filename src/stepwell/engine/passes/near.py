"""Rows that were nearly selected, fetched for the next pass: the best of a layer's scores behind those that it selected.

    pass      ... attention of a group's last layer | experts ... next layer's index | wait | resolve ...
    beside                                          | best, resolve, fetch ----------|

It begins once nobody reads rows of the group any more in this pass: the tables that it changes are read by the next pass alone,
and it is behind all that its layers waited for. The next layer that resolves waits for it, and so does the end of the pass: plan
and scores are used by one at a time, and a recorded step ends with nothing under way.

A hot row changes speed alone, so answers stay what they are. Axes as in `sparse/resolve.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from stepwell.engine.passes.beside import Beside
from stepwell.memory.row_pages import ABSENT
from stepwell.sparse.places import Places
from stepwell.sparse.resolve import Fetch, Plan, Resolve, Wanted

Best = Callable[[torch.Tensor, int], torch.Tensor]  # positions of the highest scores of each row


class Near:
    """Of one engine. `rows` is how many each query has on the device if it can: those that it selects, and those near them.
    `best` must be one that may run while the pass looks for the best of the next layer.
    """

    def __init__(
        self, places: Places, plan: Plan, group_of: Sequence[int], *, rows: int, by_score: bool, resolve: Resolve, fetch: Fetch,
        best: Best,
    ) -> None:  # fmt: skip
        self._places, self._plan, self._rows, self._by_score = places, plan, rows, by_score
        self._resolve, self._fetch, self._best = resolve, fetch, best
        self._layers = [[layer for layer, each in enumerate(group_of) if each == group] for group in range(max(group_of) + 1)]
        self._last: tuple[int, Wanted] | None = None  # what was selected last, in which group
        self._under_way: tuple[int, Wanted] | None = None  # by which layer's number. Kept: its tensors are read beside the pass

    def note(self, group: int, wanted: Wanted) -> None:
        """What a group selects, with scores if there are any: without them nothing is near."""
        self._last = None if wanted.score_XT is None else (group, wanted)

    def start(self, layer: int, beside: Beside) -> None:
        """Behind the attention of a layer: begins to fetch, if it was the last that reads what was selected."""
        if self._last is None or layer != self._layers[self._last[0]][-1]:
            return
        (group, wanted), self._last = self._last, None
        self._under_way = layer, wanted
        beside.start(layer, partial(self._bring, group, wanted))

    def wait(self, beside: Beside) -> None:
        """What the current stream is told from now on runs behind it."""
        if self._under_way is not None:
            beside.wait(self._under_way[0])
            self._under_way = None

    def forget(self) -> None:
        """A pass has failed: whoever calls waits for what is under way."""
        self._last = self._under_way = None

    def _bring(self, group: int, wanted: Wanted) -> None:
        near = nearly(wanted, self._rows, self._best)
        near = near if self._by_score else replace(near, score_XT=None)
        self._resolve(self._places, group, near, self._plan)
        for layer in self._layers[group]:
            self._fetch(self._places, layer, self._plan)


def nearly(wanted: Wanted, rows: int, best: Best) -> Wanted:
    """The best `rows` of all that each query sees, ABSENT where it sees fewer. What it selected is among them, and there already.
    Asks the device for nothing.
    """
    assert wanted.score_XT is not None, "without scores nothing is near"
    score_XT = wanted.score_XT.float()
    position_XK = best(score_XT, min(rows, score_XT.shape[1]))
    seen_XK = score_XT.gather(1, position_XK.long()) > -torch.inf
    return replace(wanted, position_XK=position_XK.int().masked_fill(~seen_XK, ABSENT), near=True)
