"""What vLLM calls the pages that the cache's feed tells of: its own block hashes. Imports no vLLM.

A request brings both names of its pages: its tokens give our keys, and it has vLLM's hashes. They are noted when it arrives and
as its answer grows, and kept for as long as a request has the page, or host memory. Of the rest the latest are kept, so many at
most. A page whose names are not known any more is passed over: whoever listens then does not hear of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepwell.base.prompt import TOKEN_BYTES, PageKey, pack, page_keys

MOST_UNUSED = 65_536  # pages that no request has, nor host memory


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
    """The pages of one request, as far as they are noted."""

    namespace: PageKey  # its digest
    tokens: Callable[[int], list[int]]  # from one on, as the cache sees them
    lora_id: int | None = None
    lora_name: str | None = None
    keys: list[PageKey] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class PageNames:
    """Names of pages by their keys. One thread."""

    page_tokens: int
    hash_tokens: int  # of a hash block; divides a page
    most_unused: int = MOST_UNUSED
    _names: dict[PageKey, PageName] = field(default_factory=dict)
    _held: set[PageKey] = field(default_factory=set)  # in host memory
    _users: Counter[PageKey] = field(default_factory=Counter)  # requests that have it, and one more for host memory
    _unused: OrderedDict[PageKey, None] = field(default_factory=OrderedDict)  # named and without users, oldest first

    def note(self, path: Path, tokens: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Notes whole pages of a request that are new since the last call. Raises BadTokens."""
        per_page = self.page_tokens // self.hash_tokens
        upto = min(len(tokens) // self.page_tokens, len(hashes) // per_page)
        first, size = len(path.keys), self.page_tokens * TOKEN_BYTES
        if upto <= first:
            return
        start, end = first * self.page_tokens, upto * self.page_tokens
        packed, cached = pack(tokens[start:end]), pack(path.tokens(start)[: end - start])
        for at, key in enumerate(page_keys(path.keys[-1] if first else path.namespace, cached, size)):
            block = (first + at) * per_page
            name = PageName(
                hashes=tuple(hashes[block : block + per_page]), parent=hashes[block - 1] if block else None,
                tokens=packed[at * size : (at + 1) * size], lora_id=path.lora_id, lora_name=path.lora_name,
            )  # fmt: skip
            self._names.setdefault(key, name)
            self._use(key)
            path.keys.append(key)

    def let_go(self, path: Path) -> None:
        """The request of a path has ended."""
        for key in path.keys:
            self._leave(key)
        path.keys = []

    def stored(self, key: PageKey) -> PageName | None:
        """A page is in host memory now."""
        if key in self._names and key not in self._held:
            self._held.add(key)
            self._use(key)
        return self._names.get(key)

    def evicted(self, key: PageKey) -> PageName | None:
        """A page has left host memory."""
        name = self._names.get(key)
        if key not in self._held:
            return None
        self._held.remove(key)
        self._leave(key)
        return name

    def nothing_held(self) -> None:
        """What is in host memory is not known any more, or nothing is."""
        held, self._held = self._held, set()
        for key in held:
            self._leave(key)

    def get(self, key: PageKey) -> PageName | None:
        return self._names.get(key)

    def _use(self, key: PageKey) -> None:
        self._users[key] += 1
        self._unused.pop(key, None)

    def _leave(self, key: PageKey) -> None:
        self._users[key] -= 1
        if self._users[key]:
            return
        del self._users[key]
        self._unused[key] = None
        if len(self._unused) > self.most_unused:
            del self._names[self._unused.popitem(last=False)[0]]
