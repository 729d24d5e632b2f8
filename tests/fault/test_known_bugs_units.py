"""Known bugs of earlier systems, group C: units, alignment, and pages against windows."""

from __future__ import annotations

import pytest

from stepwell import ModelSpec, PlacementConfig, Point, Prefix, StateSpec, Tier
from toys import HYBRID, KV, SSM, Rig, model, swa, text


@pytest.mark.parametrize(
    ("page", "window"),
    [(8, 1), (8, 3), (8, 5), (8, 8), (8, 12), (8, 16), (8, 20), (4, 6), (4, 9), (1, 1), (1, 3), (6, 4), (16, 128)],
)
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_any_window_against_any_page_leaves_a_restorable_checkpoint(page: int, window: int, tier: Tier) -> None:
    """C3: a page longer than the window, a window longer than the page, and one that the page does not divide."""
    rig = Rig(model(KV, swa(window), SSM, page_tokens=page), device_pages=4096, host_pages=4096)
    prompt = text(1, 5 * page + 1)
    rig.serve(prompt)
    if tier is Tier.HOST:
        rig.evict_all(Tier.DEVICE)
    again = rig.serve(prompt)
    assert (again.device, again.host) == ((5 * page, 0) if tier is Tier.DEVICE else (0, 5 * page))


@pytest.mark.parametrize("align", [4, 6, 8, 12, 10])
def test_point_state_is_restored_only_at_the_depth_it_was_saved_for(align: int) -> None:
    """C4: a state's place is an absolute token count, legal for page and model alike, wherever the prompt resumed."""
    spec = model(KV, StateSpec(name="ssm", shape=Point(), layers=1, row_bytes=32, dtype="u8", align=align))
    rig = Rig(spec, device_pages=1024)
    step = spec.boundary_step
    prompt = text(1, 3 * step + 1)
    rig.serve(prompt[: step + 3])
    grown = rig.serve(prompt)
    assert grown.device == step
    for length in range(1, len(prompt) + 1):
        found = rig.restore(prompt[:length])
        assert found % step == 0 and found < length
        rig.serve(prompt[:length])
    assert rig.restore(prompt) == 3 * step


@pytest.mark.parametrize("length", range(1, 30))
def test_lookup_and_placement_share_one_cap(length: int) -> None:
    """C5: the last stop of a prompt is the boundary the same prompt resumes from, to the token."""
    rig = Rig(HYBRID)
    prompt = text(1, length)
    lease = rig.ready(prompt)
    last = max(lease.stops, default=0)
    rig.prefill(lease)
    rig.cache.release(lease)
    assert rig.restore(prompt) == last == rig.spec.usable(length) < length


def test_rows_pooled_over_several_pages_survive_a_split_between_them() -> None:
    """C6: a row that stands for more than a page lives in the page that completes it, so a branch may cut its group."""
    pooled = StateSpec(name="pooled", shape=Prefix(ratio=8), layers=1, row_bytes=8, dtype="u8")
    rig = Rig(ModelSpec(name="toy", page_tokens=4, states=(KV, pooled)), host_pages=256)
    trunk = text(1, 12)  # one and a half groups
    for name in (2, 3):
        rig.serve([*trunk, *text(name, 13)])
    assert [rig.serve([*trunk, *text(name, 13)]).device for name in (2, 3)] == [24, 24]
    rig.evict_all(Tier.DEVICE)
    assert rig.serve([*trunk, *text(2, 13)]).host == 24
    both = rig.serve([*trunk, *text(3, 13)])
    assert (both.device, both.host) == (12, 12)  # the trunk came up with the other branch


@pytest.mark.parametrize("answer", range(1, 14))
def test_an_answer_of_any_length_leaves_a_whole_window_for_the_next_turn(answer: int) -> None:
    """C2: pages of the window are freed behind the request, but never those that its last boundary needs."""
    rig = Rig(model(KV, swa(6)), placement=PlacementConfig(interval_tokens=0, decode_interval_tokens=4))
    prompt = text(1, 10)
    rig.serve(prompt, answer=text(2, answer))
    assert rig.serve([*prompt, *text(2, answer), 7]).device == (10 + answer) // 4 * 4
