"""When pages go down, by the sizes of the tiers."""

from __future__ import annotations

import pytest

from stepwell.base.config import WritePolicy
from stepwell.policy.write_choice import WriteChoice, choose_write

THROUGH, EXCLUSIVE = WritePolicy.THROUGH, WritePolicy.EXCLUSIVE
NO_LIMIT = "no limit"


def chosen(device: int, host: int | None, store: int | str | None = None, asked: WritePolicy | None = None) -> WriteChoice:
    size = store if isinstance(store, int) else None
    return choose_write(asked, device_bytes=device, host_bytes=host, has_store=store is not None, store_bytes=size)


@pytest.mark.parametrize(
    ("sizes", "write"),
    [
        ((20, None), THROUGH),
        ((20, 81), THROUGH),
        ((20, 80), EXCLUSIVE),
        ((4, 4, 8), EXCLUSIVE),
        ((4, 4, 32), EXCLUSIVE),
        ((4, 4, 33), THROUGH),
        ((4, 20, 96), EXCLUSIVE),
        ((20, 60, NO_LIMIT), THROUGH),
    ],
)
def test_the_lowest_tier_repeats_what_is_above_it_where_it_has_several_times_the_room(
    sizes: tuple[int, ...], write: WritePolicy
) -> None:
    assert chosen(*sizes).write is write


def test_what_is_asked_for_is_done() -> None:
    assert chosen(4, 4, 8, asked=WritePolicy.EXCLUSIVE).write is WritePolicy.EXCLUSIVE


def test_the_reason_names_the_lowest_tier() -> None:
    assert "store" in chosen(4, 4, 8).why and "host" in chosen(4, 4).why
