"""What is handed out stays as it was until the hand-out ends, whatever happens to the cache meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stepwell import Kind, LeaseError, ModelSpec, Tier, WritePolicy
from stepwell.base.tasks import NO_PAGES
from stepwell.store_tier.hand_out import HandOut
from stepwell.testing.digest_engine import Pages
from toys import FULL, FULL_POINT, FULL_WINDOW, HYBRID, Rig, text


def handed_out(spec: ModelSpec) -> tuple[Rig, HandOut]:
    rig = Rig(spec, host_pages=40, write=WritePolicy.THROUGH)
    rig.serve(text(1, 17))
    out = rig.cache.hand_out(text(1, 17), ttl_s=60)
    assert out is not None and out.tokens == 16
    return rig, out


def check_bytes(rig: Rig, out: HandOut) -> None:
    """All that the hand-out names is what a model leaves behind for its tokens."""
    first = rig.spec.window_span(out.tokens).start
    windows, points = (out.checkpoint.windows, out.checkpoint.points) if out.checkpoint is not None else (NO_PAGES, NO_PAGES)
    path = np.asarray(text(1, out.tokens), "<i4").tobytes()
    rig.engine.check_pages(Pages(out.namespace, path, out.pages.ids, windows, first, points), Tier.HOST, out.tokens)


def flush(rig: Rig) -> None:
    rig.cache.flush()


def clear(rig: Rig) -> None:
    rig.cache.clear()


def fail_a_load(rig: Rig) -> None:
    rig.cache.evict_idle()
    lease = rig.open(text(1, 17))
    assert rig.fail_all() and lease.failed
    rig.cache.release(lease)


@pytest.mark.parametrize("spec", [FULL, FULL_WINDOW, FULL_POINT, HYBRID], ids=["full", "window", "point", "hybrid"])
@pytest.mark.parametrize("happens", [flush, clear, fail_a_load])
def test_nothing_that_is_handed_out_is_used_for_others(spec: ModelSpec, happens: Callable[[Rig], None]) -> None:
    rig, out = handed_out(spec)
    check_bytes(rig, out)
    happens(rig)
    rig.cache.audit()
    assert out.pin.held and rig.restore(text(1, 17)) == 0
    for name in range(2, 8):
        rig.serve(text(name, 17))
    check_bytes(rig, out)
    rig.cache.pins.release(out.pin)
    rig.cache.flush()
    rig.idle_check()
    assert all(rig.used(Tier.HOST, kind) == 0 for kind in (Kind.PREFIX, Kind.WINDOW, Kind.POINT) if spec.parts(kind))


def test_a_hand_out_ends_with_its_time_and_frees_what_memory_was_emptied_of() -> None:
    rig, out = handed_out(HYBRID)
    rig.cache.flush()
    rig.clock.advance(61)
    rig.cache.step()
    assert not out.pin.held
    assert all(rig.used(Tier.HOST, kind) == 0 for kind in (Kind.PREFIX, Kind.WINDOW, Kind.POINT))
    with pytest.raises(LeaseError):
        rig.cache.pins.release(out.pin)
    rig.idle_check()


def test_a_pin_on_the_device_keeps_the_pages_of_its_checkpoint() -> None:
    rig = Rig(HYBRID)
    rig.serve(text(1, 17))
    pin = rig.cache.pins.add(text(1, 17))
    assert pin.residency is not None
    windows, points = pin.residency.windows.copy(), pin.residency.points.copy()
    rig.cache.flush()
    for name in range(2, 8):
        rig.serve(text(name, 17))
    ((_, prefix),) = pin.pages
    path = np.asarray(text(1, 16), "<i4").tobytes()
    pages = Pages(rig.cache.namespace, path, prefix, windows, HYBRID.window_span(16).start, points)
    rig.engine.check_pages(pages, Tier.DEVICE, 16)
    rig.cache.pins.release(pin)
    rig.idle_check()
