"""A request's tokens as the cache is to see them: media are part of the prompt, by content and position. Imports no vLLM.

    tokens        12  7  ##  ##  ##  ##   9   3   5 ...      ## stands for one image or another: the same ids
    pages        |---- has media ----|-- has media --|--- none ---|
    the cache's  |  marked, by what is where         | as they are |

Two images have the same placeholder ids, but never the same keys and values. So all ids of a page that media reach into are
replaced: by marked ones, which follow from the id, its place in the page, and which media lie where. Marked ids are none of any
vocabulary, so that no text is ever taken for media. An answer's ids in such a page are replaced likewise: the next prompt of a
conversation has them as its own. Two pages with other media have the same ids by chance only, which `STRENGTH_BITS` bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import shake_256
from string import hexdigits
from typing import Any

from stepwell.base.errors import BadTokens

MARK = 1 << 30  # marked ids are this and above; below are those of vocabularies
STRENGTH_BITS = 128
_DIGEST_CHARS = (64, 128)  # of vLLM's digests of media: BLAKE3, SHA-256, SHA-512


class RequestTokens:
    """One request's tokens, prompt and answer, as far as they are known. The scheduler's thread."""

    def __init__(self, request: Any, *, page_tokens: int, vocab_size: int) -> None:
        self._request, self._page_tokens, self._vocab_size = request, page_tokens, vocab_size

    def __call__(self, start: int) -> list[int]:
        """Those from one on. Raises BadTokens for ids that the vocabulary lacks: one of them could pass for a marked one."""
        tokens = list(self._request.all_token_ids[start:])
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            raise BadTokens(f"token ids must be in 0..{self._vocab_size - 1}, got {min(tokens)}..{max(tokens)}")
        if not self._request.mm_features:
            return tokens
        size, end = self._page_tokens, start + len(tokens)
        for page in range(start // size, -(-end // size)):
            if (mask := self._masks.get(page)) is not None:
                for at in range(max(page * size, start), min((page + 1) * size, end)):
                    tokens[at - start] = MARK + (mask[at - page * size] + tokens[at - start]) % MARK
        return tokens

    @cached_property
    def _masks(self) -> dict[int, list[int]]:
        """By page, for pages with media; those lie in the prompt, which is known."""
        pages = _media_by_page(self._request, self._page_tokens)
        return {page: _mask(media, self._page_tokens) for page, media in pages.items()}


def media_refusal(request: Any, *, page_tokens: int, vocab_size: int) -> str | None:
    """Why a request with media cannot be cached; None where it can."""
    if page_tokens * (MARK.bit_length() - 1 - vocab_size.bit_length()) < STRENGTH_BITS:
        return "pages are too short to tell its media apart: use a larger --block-size"
    if not all(_is_digest(feature.identifier) for feature in request.mm_features):
        return "its media are not named by what is in them: by the client (uuid), or by the request since vLLM's caches are off"
    return None


def _is_digest(identifier: object) -> bool:
    """Whether media are named by a digest. Names of clients may mean something else tomorrow."""
    if not isinstance(identifier, str):
        return False
    digest = identifier.rpartition(":")[2]  # after the name of an adapter, where one changes how media are read
    return len(digest) in _DIGEST_CHARS and all(char in hexdigits for char in digest)


def _media_by_page(request: Any, page_tokens: int) -> dict[int, list[tuple[int, int, str, str]]]:
    """What lies in each page that media reach into: where it begins, counted from the page's beginning, its length and name."""
    pages: dict[int, list[tuple[int, int, str, str]]] = {}
    for feature in request.mm_features:
        first, length = int(feature.mm_position.offset), int(feature.mm_position.length)
        for page in range(first // page_tokens, -(-(first + length) // page_tokens)):
            placed = (first - page * page_tokens, length, str(feature.modality), str(feature.identifier))
            pages.setdefault(page, []).append(placed)
    return pages


def _mask(media: Sequence[tuple[int, int, str, str]], page_tokens: int) -> list[int]:
    """Numbers below `MARK`, one for each place of a page, that nobody can choose."""
    drawn = shake_256(b"stepwell-media" + repr(sorted(media)).encode()).digest(4 * page_tokens)
    return [int.from_bytes(drawn[at : at + 4], "little") % MARK for at in range(0, len(drawn), 4)]
