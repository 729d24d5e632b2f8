"""Tokenizers: round trips, the token that begins a prompt, text as it streams, and those built from GGUF vocabularies."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

pytest.importorskip("transformers")

from engine.loading.tiny import write_vocabulary
from stepwell.base.errors import BadTokens, ConfigError
from stepwell.engine.loading.gguf_header import read_header
from stepwell.engine.loading.gguf_tokenizer import tokenizer_of
from stepwell.engine.loading.random_hybrid import byte_tokenizer
from stepwell.engine.loading.text_length import longest_token
from stepwell.engine.loading.tokenizer import Tokenizer

BYTES = byte_tokenizer()
HARD = "naïve 👍🏽 日本語\n\n  x\t👩‍👩‍👧 \u0301e ß"


def streamed(text: Tokenizer, ids: list[int], after: tuple[int, ...] = ()) -> list[str]:
    stream = text.stream(after)
    return [*(stream.push(token) for token in ids), stream.finish()]


# ---- beginnings -----------------------------------------------------------------------------------


def with_post_processor() -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(BYTES._inner.to_str())
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    return Tokenizer(inner, bos_id=256)


@pytest.mark.parametrize("text", [BYTES, with_post_processor()])
def test_a_prompt_begins_with_bos_exactly_once(text: Tokenizer) -> None:
    assert text.encode("ab") == [256, 97, 98]
    assert text.encode("<bos>ab") == [256, 97, 98]
    assert text.encode("") == [256]
    assert text.encode("ab", special=False) == [97, 98]


def test_settings_of_a_training_run_are_dropped() -> None:
    inner = tokenizers.Tokenizer.from_str(BYTES._inner.to_str())
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    assert Tokenizer(inner).encode("abcd") == [97, 98, 99, 100]


@pytest.mark.parametrize("text", ["a\ud83d", "\udc4d", "a" * 70_000 + "\ud800"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    """It cannot be encoded, and with something put in its place it would be another prompt."""
    with pytest.raises(BadTokens, match="half a character"):
        BYTES.encode(text)


# ---- long texts -----------------------------------------------------------------------------------


def bpe(*words: str, **settings: Any) -> tokenizers.Tokenizer:
    """One that keeps bytes it does not know, and has `words` as tokens of their own."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + number for number, word in enumerate(words)}
    return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, **settings))


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """Tokenizing a megabyte takes most of a second, in which an interpreter that is held counts to a handful at most."""
    turns, done = 0, threading.Event()

    def encode() -> None:
        try:
            BYTES.encode("all the way down " * 60_000)
        finally:
            done.set()

    worker = threading.Thread(target=encode)
    worker.start()
    while not done.wait(0.001):
        turns += 1
    worker.join()
    assert turns > 20, f"another thread had {turns} turns"


def test_far_too_long_a_text_is_told_without_encoding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not BYTES.exceeds("x" * 800, 100) and not BYTES.exceeds("", 1)
    monkeypatch.setattr(Tokenizer, "_ids", lambda *args, **more: pytest.fail("it was encoded"))
    assert BYTES.exceeds("x" * (100 * len("<start_of_turn>") + 1), 100)  # the longest token it has


def test_where_length_does_not_tell_its_beginning_does(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = bpe()
    inner.add_special_tokens(["_" * 500])
    text = Tokenizer(inner)
    seen: list[int] = []
    ids = Tokenizer._ids
    monkeypatch.setattr(Tokenizer, "_ids", lambda self, text, special: seen.append(len(text)) or ids(self, text, special=special))
    assert text.exceeds("x" * 500_000, 1000) and sum(seen) < 100_000
    assert not text.exceeds("_" * 100_000, 1000)  # 200 tokens


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda made: None, 7),
        (lambda made: setattr(made, "normalizer", normalizers.Replace(" ", "▁")), 7),
        (lambda made: setattr(made, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁")])), 28),
        (lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Split(tokenizers.Regex(r"\d"), "isolated")), 7),
        (lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")), None),
        (lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Whitespace()), None),
        (lambda made: setattr(made, "normalizer", normalizers.Strip()), None),
        (lambda made: setattr(made, "normalizer", normalizers.Replace("  ", " ")), None),
        (lambda made: setattr(made, "normalizer", normalizers.Replace(tokenizers.Regex(" +"), " ")), None),
        (lambda made: made.add_special_tokens([tokenizers.AddedToken("<end>", rstrip=True)]), None),
        (lambda made: made.add_special_tokens(["<a longer one>"]), 14),
    ],
)
def test_the_longest_token_is_known_where_no_part_drops_characters(change: Any, expected: int | None) -> None:
    made = bpe("seventy", fuse_unk=True)
    change(made)
    assert longest_token(made) == expected


def test_models_that_fold_what_they_do_not_know_have_no_longest_token() -> None:
    assert (
        longest_token(tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True))) is None
    )
    assert longest_token(tokenizers.Tokenizer(models.WordLevel(vocab={"a": 0, "?": 1}, unk_token="?"))) is None


def test_bos_must_be_named_when_it_is_wanted() -> None:
    with pytest.raises(ConfigError, match="bos_token"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()), add_bos=True)


# ---- streaming ------------------------------------------------------------------------------------


def test_an_emoji_over_four_tokens_comes_in_one_piece() -> None:
    assert streamed(BYTES, BYTES.encode("a👍é", special=False)) == ["a", "", "", "", "👍", "", "é", ""]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_streaming_gives_the_text_back_without_half_characters(text: str) -> None:
    parts = streamed(BYTES, BYTES.encode(text))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@given(st.lists(st.integers(0, 259), max_size=80))
def test_any_tokens_stream_to_what_they_decode_to(ids: list[int]) -> None:
    assert "".join(streamed(BYTES, ids)) == BYTES.decode(ids)


def test_broken_bytes_do_not_hold_the_text_back_for_long() -> None:
    stream = BYTES.stream()
    seen = [stream.push(0x80) for _ in range(10)]
    assert len("".join(seen)) == 2  # one for every four tokens: each might have begun a character
    assert "".join(seen) + stream.finish() == BYTES.decode([0x80] * 10)
    assert "".join(streamed(BYTES, [0x80, *"👍".encode(), 0x80, 97])) == "\ufffd👍\ufffda"


def test_special_tokens_are_no_text() -> None:
    assert streamed(BYTES, [97, 258, 98, 259]) == ["a", "", "b", "", ""]


# ---- GGUF: byte level -----------------------------------------------------------------------------


def opened(tmp_path: Path, fields: dict[str, object]) -> Tokenizer:
    text = tokenizer_of(read_header(write_vocabulary(tmp_path / "v.gguf", fields)).fields)
    assert text is not None
    return text


def gpt2_fields(**more: object) -> dict[str, object]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ Ġ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *(merge.replace(" ", "") for merge in merges), "<tool>"]
    kinds = [3, 3, 3] + [1] * (len(alphabet) + len(merges)) + [4]
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": merges,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items()}


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "default"])
def test_byte_level_vocabularies_round_trip(tmp_path: Path, pre: str) -> None:
    text = opened(tmp_path, gpt2_fields(pre=pre))
    ids = text.encode(f"<|im_start|>the the {HARD}<tool>")
    assert ids[0] == 1 and text.decode(ids).endswith("<tool>") and text.eos_ids == {0, 2}
    assert text.decode(text.encode(HARD)) == (normalize("NFC", HARD) if pre == "qwen2" else HARD)
    assert "".join(streamed(text, text.encode("the 👍"))) == "the 👍"


def test_digits_stay_apart_where_the_pre_tokenizer_says_so(tmp_path: Path) -> None:
    count = {pre: len(opened(tmp_path, gpt2_fields(pre=pre)).encode("1212")) for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2")}
    assert count == {"smollm": 4, "qwen2": 4, "llama-bpe": 3, "gpt-2": 2}


def test_no_bos_unless_the_file_asks(tmp_path: Path) -> None:
    assert opened(tmp_path, gpt2_fields()).encode("a")[0] != 1
    assert opened(tmp_path, gpt2_fields(add_bos_token=True)).encode("a")[0] == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"pre": "new"}, "known are default"),
        ({"model": "bert"}, "known are gpt2 and llama"),
        ({"merges": ["x yy"]}, "does not make a tokenizer"),
        ({"merges": ["ab"]}, "does not make a tokenizer"),
        ({"token_type": [1]}, "one for each token"),
        ({"tokens": "no"}, "must be a list of strings"),
    ],
)
def test_vocabularies_that_are_not_whole_are_refused(tmp_path: Path, more: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        opened(tmp_path, gpt2_fields(**more))


# ---- GGUF: by scores ------------------------------------------------------------------------------


def llama_fields(**more: object) -> dict[str, object]:
    pieces = ["▁", "t", "h", "e", "a", "s", "▁t", "he", "▁the", "th", "▁s"]  # the earlier, the better
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "  "]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0]
    fields = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items()}


def pieces(text: Tokenizer, prompt: str) -> list[str]:
    return [text.token(number) for number in text.encode(prompt, special=False)]


def test_pieces_merge_by_score(tmp_path: Path) -> None:
    text = opened(tmp_path, llama_fields(add_space_prefix=False))
    assert pieces(text, "the the") == ["t", "he", "▁the"]
    assert text.encode("a  s", special=False) == [263, 270, 264], "a run of spaces is taken whole"
    assert text.encode("a")[0] == 1, "a llama vocabulary begins prompts unless its file says otherwise"


@pytest.mark.parametrize("prefix", [False, True])
def test_bytes_stand_in_for_what_the_vocabulary_lacks(tmp_path: Path, prefix: bool) -> None:
    text = opened(tmp_path, llama_fields(add_space_prefix=prefix))
    assert text.decode(text.encode(HARD)) == HARD
    assert "".join(streamed(text, text.encode(HARD))) == HARD
    assert streamed(text, text.encode("👍", special=False))[-2] == "👍"


def test_a_stream_keeps_the_space_between_prompt_and_answer(tmp_path: Path) -> None:
    text = opened(tmp_path, llama_fields())
    prompt, answer = text.encode("the"), text.encode("the", special=False)
    assert "".join(streamed(text, answer, after=tuple(prompt))) == " the"
    assert "".join(streamed(text, answer)) == "the"


def test_merges_agree_with_picking_the_best_pair_each_time(tmp_path: Path) -> None:
    """SentencePiece's own rule, spelled out: join the neighbours that make the best piece, leftmost first, until none do."""
    dice = random.Random(5)
    letters = "abc"
    made = list(letters)
    while len(made) < 40:
        joined = dice.choice(made) + dice.choice(made)
        if joined not in made and len(joined) < 9:
            made.append(joined)
    ranks = {piece: rank for rank, piece in enumerate(made)}
    fields = {
        "tokens": ["<unk>", *made],
        "scores": [0.0, *(-float(rank) for rank in ranks.values())],
        "token_type": [2] + [1] * len(made),
    }
    text = opened(tmp_path, llama_fields(**fields, bos_token_id=99, add_space_prefix=False))
    for _ in range(200):
        prompt = "".join(dice.choice(letters) for _ in range(dice.randint(1, 30)))
        assert pieces(text, prompt) == best_pairs(prompt, ranks)


def best_pairs(prompt: str, ranks: dict[str, int]) -> list[str]:
    parts = list(prompt)
    while True:
        found = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return parts
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_file_without_a_vocabulary_has_no_tokenizer() -> None:
    assert tokenizer_of({"tokenizer.ggml.scores": np.zeros(1)}) is None


def test_a_broken_byte_does_not_cost_the_character_after_it() -> None:
    for text in ("\ufffd中!", "\ufffd\ufffd😀", "a\ufffd😀b"):
        stream, tokens = BYTES.stream(), list(text.encode())
        assert "".join(stream.push(token) for token in tokens) + stream.finish() == text
    cut = [*"中".encode()[:2], *"😀".encode(), *b"!"]
    stream = BYTES.stream()
    assert "".join(stream.push(token) for token in cut) + stream.finish() == BYTES.decode(cut)
