"""What vLLM calls the pages that the cache's feed tells of: its own block hashes. Imports no vLLM.

A request brings both names of its pages: its tokens give our keys, and it has vLLM's hashes. They are noted when it arrives and
as its answer grows.

    held       pages that are in host memory: as long as they are
    noted      pages of requests that are not there yet, and pages that have left: the latest, so many at most

A page whose names are not known any more is passed over: whoever listens then does not hear of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepwell.base.prompt import TOKEN_BYTES, PageKey, pack, page_keys

MOST_NOTED = 65_536  # pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PageName:
    """One page in vLLM's words."""

    hashes: tuple[bytes, ...]  # of its hash blocks, in order
    parent: bytes | None  # of the hash block before it
    tokens: bytes  # packed
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(slots=True, kw_only=True)
class Path:
    """How far the pages of one request are noted."""

    namespace: PageKey  # its digest
    lora_id: int | None = None
    lora_name: str | None = None
    num_pages: int = 0
    last: PageKey | None = None  # the key of the last of them


@dataclass(slots=True, kw_only=True)
class PageNames:
    """Names of pages by their keys. One thread."""

    page_tokens: int
    hash_tokens: int  # of a hash block; divides a page
    most_noted: int = MOST_NOTED
    _held: dict[PageKey, PageName] = field(default_factory=dict)
    _noted: OrderedDict[PageKey, PageName] = field(default_factory=OrderedDict)

    def note(self, path: Path, tokens: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Notes whole pages of a request that are new since the last call. Raises BadTokens."""
        per_page = self.page_tokens // self.hash_tokens
        upto = min(len(tokens) // self.page_tokens, len(hashes) // per_page)
        if upto <= path.num_pages:
            return
        first, size = path.num_pages, self.page_tokens * TOKEN_BYTES
        packed = pack(tokens[first * self.page_tokens : upto * self.page_tokens])
        for at, key in enumerate(page_keys(path.last or path.namespace, packed, size)):
            start = (first + at) * per_page
            name = PageName(
                hashes=tuple(hashes[start : start + per_page]), parent=hashes[start - 1] if start else None,
                tokens=packed[at * size : (at + 1) * size], lora_id=path.lora_id, lora_name=path.lora_name,
            )  # fmt: skip
            path.last = key
            if key not in self._held:
                self._remember(key, name)
        path.num_pages = upto

    def stored(self, key: PageKey) -> PageName | None:
        """A page is in host memory now."""
        name = self._noted.pop(key, None) or self._held.get(key)
        if name is not None:
            self._held[key] = name
        return name

    def evicted(self, key: PageKey) -> PageName | None:
        """A page has left host memory."""
        name = self._held.pop(key, None)
        if name is not None:
            self._remember(key, name)
        return name

    def get(self, key: PageKey) -> PageName | None:
        return self._held.get(key) or self._noted.get(key)

    def _remember(self, key: PageKey, name: PageName) -> None:
        self._noted[key] = name
        self._noted.move_to_end(key)
        if len(self._noted) > self.most_noted:
            self._noted.popitem(last=False)
