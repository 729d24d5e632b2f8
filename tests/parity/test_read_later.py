"""Prompts whose passes are queued before the one before is read. Resumed from the host, they give the bits of an engine that
reads every pass at once and keeps all on the device.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.families import FAMILIES
from parity.recorded import Recorded, distance, same_bits, script


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_are_read_later_leave_the_same_bits(family: str) -> None:
    at_once = Recorded(family)
    expected = script(at_once, seed=3)
    at_once.close()
    later = Recorded(family)
    later.engine.passing.reads_later = True
    for then in expected:
        later.evict_to_host()
        now = later.play(then.prompt)
        assert now.resumed == then.resumed and same_bits(now, then), f"differs by {distance(now, then)}"
    later.close()
