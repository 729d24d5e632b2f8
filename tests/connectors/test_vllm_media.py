"""Images and the like below vLLM are known by content and position; indistinguishable media are counted and not cached."""

from __future__ import annotations

from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
from toy_runs import Lora, Make, computed_by, counters, text
from toy_vllm import WIDE_MODELS, ToyEngine

from stepwell import BadTokens
from stepwell.connectors.vllm.requests import MARK, RequestTokens

PAGE = 16
PLACEHOLDER = 999


def image(name: str, offset: int, length: int, modality: str = "image") -> Any:
    """As vLLM describes one: a digest of its content, and where its placeholders are."""
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(modality=modality, identifier=sha256(name.encode()).hexdigest(), mm_position=position)


def prompt(*images: Any, tokens: int = 90, seed: int = 1) -> list[int]:
    """A text with placeholders, which are the same for any image."""
    ids = text(seed, tokens)
    for each in images:
        ids[each.mm_position.offset : each.mm_position.offset + each.mm_position.length] = [PLACEHOLDER] * each.mm_position.length
    return ids


def computed(engine: ToyEngine, *images: Any, **more: Any) -> int:
    """Computed tokens of a prompt of 90 tokens and an answer of 4. The toy asserts that it reads bytes of these images alone."""
    return computed_by(engine, prompt(*images), mm_features=images, **more)


@pytest.mark.parametrize("model", WIDE_MODELS)
def test_equal_media_at_equal_positions_are_shared_and_others_never(make: Make, model: str) -> None:
    engine = make(model)
    assert computed(engine, image("cat", 20, 30)) == 94
    assert computed(engine, image("cat", 20, 30)) == 94 - 80
    assert computed(engine, image("dog", 20, 30)) == 94 - (PAGE if model == "wide" else 0), "text before it is shared"
    assert computed(engine, image("dog", 20, 30)) == 94 - 80
    assert computed(engine, image("cat", 20, 30)) == 94 - 80


@pytest.mark.parametrize("offset", [15, 31, 16, 0])
@pytest.mark.parametrize("length", [1, 2])
def test_a_single_placeholder_tells_media_apart(make: Make, offset: int, length: int) -> None:
    """Also the last of a page, or the first."""
    engine = make("wide")
    computed(engine, image("cat", offset, length))
    before = offset // PAGE * PAGE
    assert computed(engine, image("dog", offset, length)) == 94 - before
    assert computed(engine, image("cat", offset, length)) == 94 - 80


def test_the_same_image_elsewhere_is_another(make: Make) -> None:
    engine = make("wide")
    ids = prompt(image("cat", 20, 40))
    computed_by(engine, ids, mm_features=(image("cat", 20, 40),))
    for others in ((image("cat", 20, 39), image("cat", 59, 1)), (image("cat", 21, 39),), (image("cat", 20, 40, "video"),), ()):
        assert computed_by(engine, ids, mm_features=others) == 94 - PAGE
    assert computed_by(engine, ids, mm_features=(image("cat", 20, 40),)) == 94 - 80


def test_a_later_image_leaves_what_is_before_it_as_it_was(make: Make) -> None:
    engine, cat = make("wide"), image("cat", 20, 8)
    computed(engine, cat, image("dog", 70, 4))
    assert computed(engine, cat, image("fox", 70, 4)) == 94 - 64


def test_the_next_turn_of_a_conversation_finds_its_answer_too(make: Make) -> None:
    """The answer begins in a page that has an image in it."""
    engine, cat = make("wide"), image("cat", 34, 4)
    first = engine.submit(prompt(cat, tokens=40), answer=40, mm_features=(cat,))
    engine.run()
    longer = [*first.all_token_ids[:80], *text(5, 10)]
    assert computed_by(engine, longer, mm_features=(cat,)) == 94 - 80
    assert computed_by(engine, longer, mm_features=(image("dog", 34, 4),)) == 94 - 32


def test_the_next_process_finds_media_in_the_store(make: Make, tmp_path: Any) -> None:
    store = {"store": f"log:{tmp_path}", "store_budget": "64MiB"}
    first = make("wide", **store)
    computed(first, image("cat", 20, 30))
    first.close()
    second = make("wide", **store)
    assert computed(second, image("cat", 20, 30)) == 94 - 80
    assert computed(second, image("dog", 20, 30)) == 94 - PAGE


def test_salts_and_adapters_keep_equal_media_apart(make: Make, tmp_path: Any) -> None:
    engine, cat = make("wide"), image("cat", 20, 30)
    (tmp_path / "adapter.safetensors").write_bytes(b"one")
    for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_request": Lora(1, str(tmp_path))}):
        assert [computed(engine, cat, **more) for _ in range(2)] == [94, 94 - 80]


def test_no_text_is_taken_for_media(make: Make) -> None:
    """The vocabulary refuses a client that sends the ids under which an image is cached."""
    engine, cat = make("wide"), image("cat", 20, 30)
    request = SimpleNamespace(all_token_ids=prompt(cat), mm_features=(cat,))
    marked = RequestTokens(request, page_tokens=PAGE, vocab_size=1000)(0)
    assert [token >= MARK for token in marked] == [16 <= at < 64 for at in range(90)]
    computed(engine, cat)
    for _ in range(2):
        assert computed_by(engine, marked) == 94
    with pytest.raises(BadTokens, match=r"0\.\.999"):
        RequestTokens(SimpleNamespace(all_token_ids=marked, mm_features=()), page_tokens=PAGE, vocab_size=1000)(0)


def test_tokens_of_a_page_are_the_same_wherever_one_begins_to_read(make: Make) -> None:
    images = (image("cat", 20, 30), image("dog", 60, 1))
    tokens = RequestTokens(
        SimpleNamespace(all_token_ids=prompt(*images), mm_features=images), page_tokens=PAGE, vocab_size=1000
    )  # fmt: skip
    assert all(tokens(start) == tokens(0)[start:] for start in range(91))


@pytest.mark.parametrize(
    ("model", "more", "event", "says"),
    [
        ("wide", {"prompt_embeds": object()}, "not_cached_embeddings", "prompt embeddings"),
        ("wide", {"pooling_params": object()}, "not_cached_pooling", "pooling request"),
        ("wide", {"resumable": True}, "not_cached_resumable", "streamed"),
        ("wide", {"lora_request": Lora(1, "/nowhere")}, "not_cached_adapter", "adapter cannot be read"),
        ("wide", {"named": "my cat"}, "not_cached_media", "by the client"),
        ("wide", {"named": "request-7-image-0"}, "not_cached_media", "by the client"),
        ("full", {"named": "0" * 64}, "not_cached_media", "--block-size"),
    ],
)
def test_what_cannot_be_told_apart_is_computed_counted_and_explained(
    make: Make, model: str, more: dict[str, Any], event: str, says: str
) -> None:
    engine, cat = make(model, explain=True), image("cat", 20, 30)
    if "named" in more:
        cat.identifier, more = more["named"], {"mm_features": (cat,)}
    for times in (1, 2):
        request = engine.submit(prompt(cat), kv_transfer_params={"stepwell_explain": True}, **more)
        engine.run()
        assert engine.computed == 94 * times and request.returned is not None
        assert says in request.returned["stepwell"]["says"] and counters(engine)[event] == times
    assert computed_by(engine, prompt(cat)) == 94, "nor does anybody else find it"


def test_events_of_pages_with_media_have_vllms_hashes_and_its_tokens(make: Make) -> None:
    engine, cat = make("wide", events=True), image("cat", 20, 30)
    request = engine.submit(prompt(cat), mm_features=(cat,))
    engine.run()
    stored = [event for event in engine.events if type(event).__name__ == "BlockStored"]
    assert [each for event in stored for each in event.block_hashes] == request.block_hashes[:5]
    assert [token for event in stored for token in event.token_ids] == request.all_token_ids[:80]
