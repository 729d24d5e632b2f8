"""When pages go down, by the sizes of the tiers."""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.base.config import WritePolicy
from stepwell.policy.write_choice import WriteChoice, choose_write

THROUGH, ADAPTIVE = WritePolicy.THROUGH, WritePolicy.ADAPTIVE
NO_LIMIT = "no limit"


def chosen(device: int, host: int | None, store: int | str | None = None, **more: Any) -> WriteChoice:
    sizes = {"asked": None, "durable": False, "device_bytes": device, "host_bytes": host, "has_store": store is not None}
    return choose_write(**{**sizes, "store_bytes": store if isinstance(store, int) else None, **more})


@pytest.mark.parametrize(
    ("sizes", "write", "durable"),
    [
        ((20, None), THROUGH, False),
        ((20, 81), THROUGH, False),
        ((20, 80), ADAPTIVE, False),
        ((4, 4, 8), ADAPTIVE, False),
        ((4, 4, 32), ADAPTIVE, False),
        ((4, 4, 33), ADAPTIVE, True),
        ((4, 20, 96), ADAPTIVE, False),
        ((4, 20, 97), THROUGH, False),
        ((20, 60, NO_LIMIT), ADAPTIVE, True),
        ((4, 20, NO_LIMIT), THROUGH, False),
    ],
)
def test_a_tier_repeats_what_is_above_it_where_it_has_several_times_the_room(
    sizes: tuple[int, ...], write: WritePolicy, durable: bool
) -> None:
    assert chosen(*sizes)[:2] == (write, durable)


def test_what_is_asked_for_is_done() -> None:
    assert chosen(4, 4, 8, asked=WritePolicy.BACK)[:2] == (WritePolicy.BACK, False)
    assert chosen(4, 4, NO_LIMIT, asked=ADAPTIVE)[:2] == (ADAPTIVE, False), "durable only where it is asked for too"
    assert chosen(4, 4, 8, durable=True)[:2] == (ADAPTIVE, True)


def test_the_reason_names_the_tiers_that_are_small() -> None:
    assert "host and store" in chosen(4, 4, 8).why
    assert "store" not in chosen(4, 4, NO_LIMIT).why
