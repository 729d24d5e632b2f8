"""Events in, messages out: what is published to routers, and when. `tests/property` proves that it is what lookups find."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stepwell import CacheEvent, EventKind, ModelSpec, Tier
from stepwell.base.prompt import PageKey, pack, page_keys, unpack
from stepwell.server.kv_events import blocks
from stepwell.server.kv_events.blocks import AllBlocksCleared, BlockRemoved, BlockStored, BlockTranslator, Message, block_hash
from toys import FULL, HYBRID, PAGE, text

ROOT = PageKey(b"r" * 32)
TOKENS = text(1, 8 * PAGE)


def keys_of(tokens: Sequence[int] = TOKENS, root: PageKey = ROOT) -> list[PageKey]:
    return list(page_keys(root, pack(tokens), PAGE * 4))


KEYS = keys_of()


def stored(start: int, end: int, tier: Tier = Tier.DEVICE, tokens: Sequence[int] = TOKENS, root: PageKey = ROOT) -> CacheEvent:
    keys = keys_of(tokens, root)
    return CacheEvent(
        kind=EventKind.PAGES_STORED, tier=tier, keys=tuple(keys[start:end]), first=start,
        parent=keys[start - 1] if start else root, tokens=pack(tokens[start * PAGE : end * PAGE]),
    )  # fmt: skip


def reported(kind: EventKind, keys: Sequence[PageKey], tier: Tier = Tier.DEVICE) -> CacheEvent:
    return CacheEvent(kind=kind, tier=tier, keys=tuple(keys))


def evicted(start: int, end: int, tier: Tier = Tier.DEVICE) -> CacheEvent:
    return reported(EventKind.PAGES_EVICTED, KEYS[start:end], tier)


def checkpoint(pages: int, tier: Tier = Tier.DEVICE, kind: EventKind = EventKind.CHECKPOINT_STORED) -> CacheEvent:
    return reported(kind, KEYS[pages - 1 : pages], tier)


def lost_checkpoint(pages: int, tier: Tier = Tier.DEVICE) -> CacheEvent:
    return checkpoint(pages, tier, EventKind.CHECKPOINT_EVICTED)


class Router:
    """A translator, and the pages of the prompt above that it has published, by medium."""

    def __init__(self, spec: ModelSpec) -> None:
        self.translator = BlockTranslator(spec)
        self.media: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}

    def hear(self, *events: CacheEvent) -> list[Message]:
        messages = self.translator.translate(events, {ROOT: None})
        for message in messages:
            assert not isinstance(message, AllBlocksCleared)
            reported = self.media[message.medium]
            reported.symmetric_difference_update(message.hashes)
            assert reported.issuperset(message.hashes) is isinstance(message, BlockStored), f"published twice: {message}"
        return messages

    def pages(self, medium: str = "GPU") -> list[int]:
        return [at for at, key in enumerate(KEYS) if block_hash(key) in self.media[medium]]


def test_pages_that_are_enough_are_told_at_once_as_one_chain() -> None:
    (message,) = Router(FULL).hear(stored(0, 3), stored(3, 5))
    assert isinstance(message, BlockStored) and message.parent is None and message.salt is None
    assert message.hashes == tuple(int.from_bytes(key[-8:], "big") for key in KEYS[:5])
    assert (message.medium, message.block_tokens) == ("GPU", PAGE) and unpack(message.tokens).tolist() == TOKENS[: 5 * PAGE]


def test_a_branch_names_the_block_that_it_leaves() -> None:
    router = Router(FULL)
    router.hear(stored(0, 4))
    other = TOKENS[: 2 * PAGE] + text(2, 2 * PAGE)
    (message,) = router.hear(stored(2, 4, tokens=other))
    assert isinstance(message, BlockStored) and message.parent == block_hash(KEYS[1])
    assert message.hashes == tuple(map(block_hash, keys_of(other)[2:]))


def test_pages_of_a_hybrid_are_told_up_to_the_deepest_checkpoint() -> None:
    router = Router(HYBRID)
    assert not router.hear(stored(0, 6)), "no request could resume on any of them"
    router.hear(checkpoint(3))
    assert router.pages() == [0, 1, 2]
    router.hear(checkpoint(5))
    assert router.pages() == [0, 1, 2, 3, 4]


def test_when_a_checkpoint_goes_so_do_the_pages_behind_the_one_before() -> None:
    router = Router(HYBRID)
    router.hear(stored(0, 6), checkpoint(2), checkpoint(5))
    (message,) = router.hear(lost_checkpoint(5))
    assert isinstance(message, BlockRemoved) and message.hashes == tuple(map(block_hash, (KEYS[4], KEYS[3], KEYS[2])))
    assert router.pages() == [0, 1]
    router.hear(lost_checkpoint(2))
    assert router.pages() == []
    router.hear(checkpoint(6))
    assert router.pages() == [0, 1, 2, 3, 4, 5], "they were there all the time"


def test_a_checkpoint_between_others_is_not_missed() -> None:
    router = Router(HYBRID)
    router.hear(stored(0, 6), checkpoint(2), checkpoint(5))
    assert not router.hear(lost_checkpoint(2)), "its pages still lead to the other"


def test_a_checkpoint_counts_in_whatever_tier_it_is() -> None:
    router = Router(HYBRID)
    router.hear(stored(0, 4), stored(0, 4, Tier.HOST), checkpoint(4), checkpoint(4, Tier.HOST))
    assert router.pages() == router.pages("CPU") == [0, 1, 2, 3]
    assert not router.hear(lost_checkpoint(4))
    router.hear(lost_checkpoint(4, Tier.HOST))
    assert router.pages() == router.pages("CPU") == []


def test_a_page_that_comes_before_the_one_it_stands_on_is_told_after_it() -> None:
    """As when a store's values arrive out of order."""
    router = Router(FULL)
    assert not router.hear(stored(2, 3, Tier.HOST))
    assert not router.hear(stored(1, 2, Tier.HOST))
    (message,) = router.hear(stored(0, 1, Tier.HOST))
    assert isinstance(message, BlockStored) and message.hashes == tuple(map(block_hash, KEYS[:3])) and message.parent is None


def test_what_stands_on_a_page_that_is_gone_cannot_be_resumed_from() -> None:
    router = Router(FULL)
    router.hear(stored(0, 4, Tier.HOST), reported(EventKind.PAGES_STORED, KEYS[:4], Tier.STORE))
    router.hear(evicted(0, 4, Tier.HOST))
    assert router.pages("CPU") == [] and router.pages("STORAGE") == [0, 1, 2, 3]
    router.hear(evicted(1, 2, Tier.STORE))
    assert router.pages("STORAGE") == [0]
    router.hear(stored(1, 2, Tier.HOST))
    assert router.pages("CPU") == [1] and router.pages("STORAGE") == [0, 2, 3]


def test_a_checkpoint_in_a_store_makes_pages_anywhere_worth_telling() -> None:
    router = Router(HYBRID)
    router.hear(stored(0, 3), reported(EventKind.PAGES_STORED, KEYS[:2], Tier.STORE), checkpoint(3, Tier.STORE))
    assert router.pages() == [0, 1, 2] and router.pages("STORAGE") == [0, 1]
    router.hear(lost_checkpoint(3, Tier.STORE))
    assert router.pages() == router.pages("STORAGE") == []


def test_a_page_that_a_store_had_before_it_was_known_is_told_in_both() -> None:
    router = Router(FULL)
    assert not router.hear(reported(EventKind.PAGES_STORED, KEYS[:2], Tier.STORE)), "their tokens are unknown"
    router.hear(stored(0, 2, Tier.HOST))
    assert router.pages("CPU") == router.pages("STORAGE") == [0, 1]


def test_no_more_is_kept_of_a_store_than_the_feed_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_IN_STORE", 3)
    router = Router(FULL)
    router.hear(stored(0, 4, Tier.HOST), reported(EventKind.PAGES_STORED, KEYS[3::-1], Tier.STORE))
    assert router.pages("STORAGE") == [0, 1, 2], "the latest of them"
    router.hear(evicted(0, 4, Tier.HOST))
    assert router.translator.num_pages == 3
    router.hear(evicted(0, 3, Tier.STORE))
    assert router.translator.num_pages == 0


def test_what_comes_and_goes_between_two_calls_is_not_told() -> None:
    router = Router(FULL)
    assert not router.hear(stored(0, 3), evicted(0, 3))
    assert router.translator.num_pages == 0


def test_long_prompts_are_told_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_BLOCKS", 3)
    router = Router(FULL)
    messages = router.hear(stored(0, 8))
    assert [len(each.hashes) for each in messages if isinstance(each, BlockStored)] == [3, 3, 2]
    assert [each.parent for each in messages if isinstance(each, BlockStored)] == [None, *map(block_hash, (KEYS[2], KEYS[5]))]
    assert [len(each.hashes) for each in router.hear(evicted(0, 8)) if isinstance(each, BlockRemoved)] == [3, 3, 2]


def test_blocks_are_told_with_the_salt_of_their_namespace() -> None:
    translator, salted, gone = BlockTranslator(FULL), PageKey(b"s" * 32), PageKey(b"g" * 32)
    events = [stored(0, 2), stored(0, 2, root=salted), stored(0, 2, root=gone)]
    messages = translator.translate(events, {ROOT: None, salted: "pepper"})
    assert [each.salt for each in messages if isinstance(each, BlockStored)] == [None, "pepper", gone.hex()]
    (more,) = translator.translate([stored(2, 3, root=salted)], {})
    assert isinstance(more, BlockStored) and more.salt == "pepper"


def test_starting_over_clears_and_tells_what_is_there_now() -> None:
    router = Router(HYBRID)
    router.hear(stored(0, 6), checkpoint(5))
    messages = router.translator.start_over([stored(0, 3), checkpoint(2)], {ROOT: None})
    assert isinstance(messages[0], AllBlocksCleared) and len(messages) == 2
    assert isinstance(messages[1], BlockStored) and messages[1].hashes == tuple(map(block_hash, KEYS[:2]))
    assert not router.translator.translate([evicted(4, 6), lost_checkpoint(5)], {}), "of what it does not know any more"
