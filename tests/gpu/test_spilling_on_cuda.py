"""Rows on the host alone on a GPU: the bits of an engine with the same settings whose rows are all on the device."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from not_run import NO_CUDA  # noqa: E402
from parity.recorded import PAGE  # noqa: E402
from parity.spilling import SPARSE, prompts, recorded, report, spilled  # noqa: E402
from parity.test_spilled_rows import check_same, two_turns  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]

FORMATS: list[dict[str, Any]] = [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "kv_dtype": "fp8"}]


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("how", FORMATS, ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("hot_rows", [0, 2 * PAGE, 8 * PAGE])
def test_rows_on_the_host_change_no_bit(family: str, how: dict[str, Any], hot_rows: int) -> None:
    one = recorded(family, hot_rows=hot_rows, device="cuda", **how)
    other = spilled(family, hot_rows=hot_rows, device="cuda", **how)
    check_same(two_turns(other), two_turns(one))
    torch.cuda.synchronize()
    report(other)  # asks for figures,
    torch.cuda.synchronize()
    found = report(other)  # which are there now
    assert found.misses and found.staged_bytes and (found.fetched_bytes > 0) == (hot_rows > 0)
    assert other.engine.cache.stats().counters.get("kernel_fallbacks", 0) == 0
    one.close()
    other.close()


@pytest.mark.parametrize("family", SPARSE)
def test_a_device_too_small_for_one_request(family: str) -> None:
    (prompt,) = prompts((700,))
    one = recorded(family, hot_rows=2 * PAGE, device="cuda", dtype="fp32")
    other = recorded(family, hot_rows=2 * PAGE, memory="720KiB", device="cuda", dtype="fp32")
    check_same([other.play(prompt, answer=60)], [one.play(prompt, answer=60)])
    assert other.engine.cache.stats().counters["spilled_pages"] > 20
    one.close()
    other.close()
