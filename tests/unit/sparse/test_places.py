"""Where rows are: in a page on the device, in a slot whose key says so, or on the host; and what came to be in between."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from stepwell.base.errors import ConfigError  # noqa: E402
from stepwell.memory.row_pages import ABSENT, Changes  # noqa: E402
from stepwell.sparse import resolve as plain  # noqa: E402
from stepwell.sparse.counts import Counts, Found  # noqa: E402
from stepwell.sparse.places import Places, check_pages  # noqa: E402
from stepwell.sparse.resolve import EMPTY, IN_USE, LAST, Plan, Wanted, score_bins  # noqa: E402
from unit.sparse.scene import R  # noqa: E402

PAGES, HOT = 4, 2


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def changes(new=(), headers=(), hot=()) -> Changes:
    """Headers as page: (ordinal, rows, host); hot pages as number: page."""
    return Changes(
        new=ids(*new), pages=ids(*dict(headers)), header_N3=np.array(list(dict(headers).values()), np.int32).reshape(-1, 3),
        numbers=ids(*dict(hot)), hot_pages=ids(*dict(hot).values()),
    )  # fmt: skip


@pytest.fixture
def places() -> Places:
    """Page 0 has its rows in rows page 5, pages 1 to 3 on the host; hot pages 0 and 1 are rows pages 7 and 6."""
    places = Places(
        rows_PLRE=torch.zeros(8, 1, R, 8, dtype=torch.uint8), host_PLRE=torch.zeros(9, 1, R, 8, dtype=torch.uint8),
        slot_PGR=torch.full((PAGES, 1, R), 1, dtype=torch.int32), header_P3=torch.zeros(PAGES, 3, dtype=torch.int32),
        numbers=HOT, requests=1,
    )  # fmt: skip
    headers = {0: (0, 5, ABSENT)} | {page: (page, ABSENT, page + 4) for page in (1, 2, 3)}
    places.apply(changes(new=range(PAGES), headers=headers, hot={0: 7, 1: 6}))
    return places


def resolve(places: Places, *position: int) -> Plan:
    plan = Plan(16, torch.device("cpu"))
    wanted = Wanted.of(
        torch.tensor([position]), last_X=torch.tensor([99]), table_BP=torch.arange(PAGES)[None], hot_BQ=torch.arange(HOT)[None]
    )
    plain.resolve(places, 0, wanted, plan)
    return plan


def where(places: Places, *position: int) -> list[tuple[int, int]]:
    at = torch.tensor(position)
    found = places.where(at // R, at % R, 0)
    return list(zip(found.device.tolist(), found.host.tolist(), strict=True))


def test_a_row_is_in_one_of_three_places(places: Places) -> None:
    resolve(places, 2, R + 1)
    assert where(places, 2, R + 1, R + 2) == [(5 * R + 2, ABSENT), (7 * R, ABSENT), (ABSENT, 5 * R + 2)]


def test_a_page_that_comes_to_use_again_has_no_hot_rows(places: Places) -> None:
    resolve(places, R + 1)
    places.apply(changes(new=[1], headers={1: (1, ABSENT, 8)}))
    assert where(places, R + 1) == [(ABSENT, 8 * R + 1)]
    assert int(resolve(places, R + 1).count_1) == 1, "though a slot still holds what it was"


def test_a_page_that_spills_keeps_its_identity_and_hot_rows_keep_theirs(places: Places) -> None:
    resolve(places, R + 1)
    places.apply(changes(headers={0: (0, ABSENT, 2)}))
    assert where(places, 2, R + 1) == [(ABSENT, 2 * R + 2), (7 * R, ABSENT)]


def test_a_hot_page_that_was_given_back_holds_nothing_when_it_is_lent_again(places: Places) -> None:
    resolve(places, R + 1)
    places.apply(changes(hot={0: ABSENT}))
    assert where(places, R + 1) == [(ABSENT, 5 * R + 1)]
    places.apply(changes(hot={0: 3}))
    assert where(places, R + 1) == [(ABSENT, 5 * R + 1)]


def test_every_pass_is_counted_though_nothing_has_changed(places: Places) -> None:
    before = int(places.now_1)
    places.apply(changes())
    assert int(places.now_1) == before + 1


def test_reading_a_page_whose_rows_are_nowhere_fails(places: Places) -> None:
    places.apply(changes(headers={1: (1, ABSENT, ABSENT)}))
    with pytest.raises(AssertionError, match="neither on the device nor on the host"):
        places.read(0, torch.tensor([1]), torch.tensor([0]), 0)
    assert int(resolve(places, R + 1).count_1) == 0


@pytest.mark.parametrize(("device", "host", "setting"), [(2**30, 1, "device_memory"), (1, 2**30, "host_memory")])
def test_more_rows_than_32_bits_can_number_are_refused(device: int, host: int, setting: str) -> None:
    many = torch.empty(1, dtype=torch.uint8).expand(2**30, 1, R, 1)
    with pytest.raises(ConfigError, match=f"too many.*lower {setting}"):
        Places(
            rows_PLRE=many[:device], host_PLRE=many[:host], slot_PGR=torch.zeros(1, 1, R, dtype=torch.int32), numbers=1,
            requests=1, header_P3=torch.zeros(1, 3, dtype=torch.int32),
        )  # fmt: skip


def test_more_hot_rows_or_references_than_can_be_numbered_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower hot_rows or max_running"):
        check_pages(64, device=1, host=1, hot=2**25)
    check_pages(64, device=2**25 - 1, host=2**25 - 1, hot=2**25 - 1)
    with pytest.raises(ConfigError, match="lower max_running"):
        Plan(2**30 + 1, torch.device("meta"))
    assert Plan(2**30, torch.device("meta")).entries == 2**30


def test_counts_are_summed_over_requests_and_bytes_over_groups() -> None:
    counts = Counts(groups=2, requests=3, device=torch.device("cpu"))
    counts.tally_GBC += torch.arange(24).view(2, 3, 4)
    assert counts.read([10, 100]) == Found(), "no reading was started yet"
    counts.start_reading()
    fetched = [2 + 6 + 10, 14 + 18 + 22]
    assert counts.read([10, 100]) == Found(
        resident=60, hits=66, fetched=sum(fetched), read_through=78, fetched_bytes=10 * fetched[0] + 100 * fetched[1]
    )  # fmt: skip


def test_slots_that_are_empty_go_first_then_the_lowest_score_and_those_in_use_never() -> None:
    key, stamp = torch.tensor([3, ABSENT, 4, 5, 6]), torch.tensor([9, 0, 10, 50, 10**3])
    score = torch.tensor([2.0, 0.0, -torch.inf, 1.0, 0.0])
    assert score_bins(key, stamp, torch.tensor([10**3]), score).tolist() == [1, EMPTY, LAST, LAST, IN_USE]
    same = score_bins(key, stamp, torch.tensor([10**4]), torch.full((5,), 3.0))
    assert same.tolist() == [1, EMPTY, 1, 1, 1]
