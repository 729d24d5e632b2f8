"""Bad input: each gets a clear error of ours, nothing is held after it, and the audit passes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stepwell import (
    BadTokens,
    CacheConfig,
    ConfigError,
    LeaseError,
    Namespace,
    NoRoom,
    Prefix,
    SpecError,
    StateSpec,
    StepwellError,
    Tier,
    build_cache,
)
from stepwell.cache.build import CacheTuning
from toys import FULL, FULL_POINT, HYBRID, KV, Rig, model, text

BAD_TOKENS: list[tuple[object, str]] = [
    ([1, 2, -1], "token id -1 is out of range"),
    ([1, 2**31], "out of range"),
    ([1, 2**80], "out of range"),
    ([1.5, 2.0], "whole numbers, got float64"),
    (np.array([1.0]), "whole numbers"),
    ([[1, 2], [3, 4]], "one-dimensional"),
    ([[1], [2, 3]], "sequence of whole numbers"),
    ("text", "one-dimensional"),
    (["a", "b"], "whole numbers"),
    (5, "one-dimensional"),
]


@pytest.mark.parametrize(("tokens", "says"), [*BAD_TOKENS, ([], "empty prompt"), (np.empty(0, np.int32), "empty prompt")])
def test_prompts_that_are_none(tokens: object, says: str) -> None:
    rig = Rig(HYBRID)
    for verb in (rig.cache.lookup, rig.cache.explain, rig.cache.pins.add):
        with pytest.raises(BadTokens, match=says):
            verb(tokens)  # type: ignore[operator]
    _nothing_held(rig)


@pytest.mark.parametrize(("tokens", "says"), BAD_TOKENS)
def test_answers_that_are_none_leave_the_lease_as_it_was(tokens: object, says: str) -> None:
    rig = Rig(HYBRID)
    lease = rig.ready(text(1, 9))
    with pytest.raises(BadTokens, match=says):
        rig.cache.append(lease, tokens)  # type: ignore[arg-type]
    assert lease.num_tokens == 9 and lease.ready
    rig.cache.release(lease)
    _nothing_held(rig)


def test_token_ids_beyond_the_vocabulary() -> None:
    rig = Rig(HYBRID, vocab_size=1000)
    rig.cache.lookup([999])
    with pytest.raises(BadTokens, match=r"token id 1000 is out of range 0\.\.999"):
        rig.cache.lookup([1000])
    _nothing_held(rig)


def test_a_namespace_of_another_layout_and_a_negative_limit() -> None:
    rig = Rig(HYBRID)
    with pytest.raises(ConfigError, match="another layout"):
        rig.cache.lookup([1, 2], namespace=Namespace(model="toy", layout="x"))
    with pytest.raises(ConfigError, match="limit_tokens must be 0 or more"):
        rig.cache.lookup([1, 2], limit_tokens=-1)
    _nothing_held(rig)


@pytest.mark.parametrize("host_pages", [None, 16])
def test_a_prompt_longer_than_the_tier(host_pages: int | None) -> None:
    rig = Rig(HYBRID, device_pages=32, host_pages=host_pages)
    rig.serve(text(1, 9))
    with pytest.raises(NoRoom, match=r"34 prefix page\(s\).*can never fit into the device tier of 1024 bytes") as refusal:
        rig.open(text(2, 133))
    assert not refusal.value.waiting
    assert rig.restore(text(1, 9)) == 8, "a refused request cost another request its pages"
    rig.idle_check()


def test_growing_beyond_the_tier_keeps_the_lease_usable() -> None:
    rig = Rig(HYBRID, device_pages=32)
    lease = rig.ready(text(1, 9))
    before = lease.prefix_pages.tolist(), lease.window_pages.tolist()
    with pytest.raises(NoRoom):
        rig.cache.grow(lease, 10_000)
    assert (lease.prefix_pages.tolist(), lease.window_pages.tolist()) == before
    rig.prefill(lease)
    rig.engine.check(lease)
    rig.cache.release(lease)
    rig.idle_check()


def test_a_page_size_that_does_not_fit_the_model() -> None:
    coarse = StateSpec(name="c128", shape=Prefix(ratio=128), layers=1, row_bytes=8, dtype="u8")
    with pytest.raises(SpecError, match=r"page_tokens 96 does not fit model 'toy'.*'c128'.*multiple or a divisor of 128"):
        model(KV, coarse, page_tokens=96)
    with pytest.raises(SpecError, match="page_tokens must be at least 1"):
        FULL.with_page_tokens(0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device_bytes": 0}, "device_bytes must be positive, got 0"),
        ({"device_bytes": -5}, "device_bytes must be positive, got -5"),
        ({"device_bytes": 1 << 20, "host_bytes": 0}, "host_bytes must be positive, got 0"),
        ({"device_bytes": None}, "at least one tier"),
        ({"device_bytes": 1 << 20, "vocab_size": 0}, "vocab_size must be positive"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CacheConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tuning", "says"),
    [
        ({"copy_timeout_s": 0.0}, "copy_timeout_s must be positive"),
        ({"copy_timeout_s": -1.0}, "copy_timeout_s must be positive"),
        ({"page_alignment_bytes": 48}, "power of two"),
        ({"page_alignment_bytes": 0}, "power of two"),
    ],
)
def test_tunings_that_cannot_work(tuning: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CacheTuning(**tuning)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", [{"device_bytes": 4096}, {"device_bytes": 1 << 20, "host_bytes": 4096}])
def test_budgets_too_small_for_one_page_of_each_kind(tiers: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"must be at least 12\.0 KiB"):
        build_cache(HYBRID, CacheConfig(**tiers))  # type: ignore[arg-type]


def test_a_second_release() -> None:
    rig = Rig(HYBRID)
    other = rig.ready(text(1, 9))
    lease = rig.ready(text(1, 9))
    rig.cache.release(lease)
    with pytest.raises(LeaseError, match="already, or belongs to another cache"):
        rig.cache.release(lease)
    with lease:  # leaving a closed lease's block is no second release
        pass
    rig.cache.audit()
    rig.cache.release(other)
    _nothing_held(rig)


def test_a_lease_of_another_cache() -> None:
    mine, theirs = Rig(HYBRID), Rig(HYBRID)
    lease, own = theirs.ready(text(1, 9)), mine.ready(text(2, 9))
    with pytest.raises(LeaseError, match="belongs to another cache"):
        mine.cache.release(lease)
    for rig, each in ((mine, own), (theirs, lease)):
        rig.cache.audit()
        rig.cache.release(each)
        _nothing_held(rig)


@pytest.mark.parametrize("upto", [10, 1000, -1])
def test_commits_beyond_the_tokens_or_backwards(upto: int) -> None:
    rig = Rig(HYBRID)
    lease = rig.ready(text(1, 9))
    with pytest.raises(LeaseError, match=f"cannot commit up to token {upto}"):
        rig.cache.commit(lease, upto)
    rig.prefill(lease)
    with pytest.raises(LeaseError, match="it stands at 9"):
        rig.cache.commit(lease, 8)
    rig.cache.release(lease)
    rig.idle_check()


def test_a_commit_without_pages() -> None:
    rig = Rig(HYBRID)
    lease = rig.ready(text(1, 9))
    with pytest.raises(LeaseError, match=r"no pages up to token 9; call grow\(\)"):
        rig.cache.commit(lease, 9)
    assert lease.position == 0
    rig.cache.release(lease)
    _nothing_held(rig)


def test_a_commit_after_the_last_one() -> None:
    rig = Rig(FULL_POINT)
    lease = rig.ready(text(1, 8))
    rig.compute(lease, 8, last=True)
    rig.cache.append(lease, [1, 2, 3, 4])
    rig.cache.grow(lease, 12)
    with pytest.raises(LeaseError, match="published its point state"):
        rig.cache.commit(lease, 12, last=True)
    rig.cache.audit()
    rig.cache.release(lease)
    rig.idle_check()


def test_a_commit_while_loading() -> None:
    rig = Rig(HYBRID, host_pages=64)
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(text(1, 17))
    with pytest.raises(LeaseError, match="is loading, but must be ready"):
        rig.cache.commit(lease, 17)
    rig.cache.audit()
    rig.cache.release(lease)
    rig.idle_check()


def test_use_of_a_failed_lease() -> None:
    rig = Rig(HYBRID, host_pages=64)
    rig.serve(text(1, 17))
    rig.evict_all(Tier.DEVICE)
    lease = rig.open(text(1, 17))
    rig.fail_all()
    for verb in _verbs(rig, lease):
        with pytest.raises(LeaseError, match="is failed"):
            verb()
    rig.cache.release(lease)
    rig.idle_check()


def test_use_after_release() -> None:
    rig = Rig(HYBRID)
    lease = rig.ready(text(1, 9))
    rig.cache.release(lease)
    for verb in _verbs(rig, lease):
        with pytest.raises(LeaseError, match="is closed"):
            verb()
    _nothing_held(rig)


def test_growing_without_a_device() -> None:
    rig = Rig(FULL, device_pages=None, host_pages=64)
    with rig.open(text(1, 9)) as lease, pytest.raises(ConfigError, match="needs a device tier"):
        rig.cache.grow(lease, 9)
    _nothing_held(rig)


def test_an_error_inside_the_block_gives_the_lease_back() -> None:
    rig = Rig(HYBRID)
    with pytest.raises(ZeroDivisionError), rig.ready(text(1, 9)):
        raise ZeroDivisionError
    _nothing_held(rig)


def test_one_except_clause_catches_them_all() -> None:
    for error in (BadTokens, ConfigError, LeaseError, NoRoom, SpecError):
        assert issubclass(error, StepwellError)


def _verbs(rig: Rig, lease) -> list[Callable[[], None]]:  # type: ignore[no-untyped-def]
    return [
        lambda: rig.cache.commit(lease, lease.position),
        lambda: rig.cache.grow(lease, 40),
        lambda: rig.cache.append(lease, [1]),
    ]


def _nothing_held(rig: Rig) -> None:
    rig.idle_check()
    assert not any(rig.cache.stats().tier(tier).used_bytes for tier in (Tier.DEVICE, Tier.HOST))
