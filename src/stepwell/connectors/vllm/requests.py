"""vLLM's requests as the scheduler's side sees them: namespaces, tokens, and names of their pages. Imports no vLLM.

Media are part of the prompt, by content and position:

    tokens        12  7  ##  ##  ##  ##   9   3   5 ...      ## stands for one image or another: the same ids
    pages        |---- has media ----|-- has media --|--- none ---|
    the cache's  |  marked, by what is where         | as they are |

Two images have the same placeholder ids but different keys and values. In pages that media reach into, all ids are therefore
replaced by marked ids, which depend on the id, its place in the page, and the media in the page. Marked ids are outside of every
vocabulary, so text is never taken for media. Ids of an answer in such a page are replaced in the same way, because the next
prompt of a conversation contains them. `STRENGTH_BITS` bounds the chance that pages with different media get equal ids.

`PageNames` maps pages of the cache's feed to vLLM's block hashes. A request supplies both: its tokens give our keys, and it has
vLLM's hashes. Names are recorded when a request arrives and as its answer grows, and kept while a request or host memory has the
page; of the others, the most recent ones are kept. A page without a name is not published.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from hashlib import shake_256
from string import hexdigits
from typing import Any

from stepwell.base.errors import BadTokens
from stepwell.base.meters import Counters
from stepwell.base.prompt import TOKEN_BYTES, Namespace, PageKey, pack, page_keys
from stepwell.cache.explain import Cause
from stepwell.connectors.vllm.scheduler_side import Computing, TrackedRequest
from stepwell.connectors.weight_files import Adapters

EXPLAIN, STORE = "stepwell_explain", "stepwell_store"  # keys of a request's kv_transfer_params


class NotCached(Enum):
    """Why a request is not cached: counted, and returned to a request that asks for an explanation."""

    EMBEDDINGS = "it has prompt embeddings, which its tokens do not identify"
    MEDIA = "its media cannot be identified"
    POOLING = "it is a pooling request"
    RESUMABLE = "its input is streamed: tokens change while it runs, and later ones may bring media"
    ADAPTER = "its adapter cannot be read, or its files have changed since it was loaded"


class Requests:
    """The engine's open requests. The scheduler's thread."""

    def __init__(
        self, base: Namespace, *, explains: bool, page_tokens: int, vocab_size: int, counters: Counters
    ) -> None:  # fmt: skip
        """`base` is the namespace of requests without adapter and salt. `explains` permits explanations."""
        self._base = base
        self._explains = explains
        self._page_tokens, self._vocab_size = page_tokens, vocab_size
        self._counters = counters
        self._adapters = Adapters()
        self._open: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._open.values())

    def add(self, request: Any) -> TrackedRequest:
        self._open[request.request_id] = request
        asked = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        namespace, why_not = self._namespace(request)
        return TrackedRequest(
            tokens=RequestTokens(request, page_tokens=self._page_tokens, vocab_size=self._vocab_size),
            namespace=namespace,
            why_not=why_not,
            may_read=not request.skip_reading_prefix_cache,
            wants_explanation=asked.get(EXPLAIN) is True and self._explains,
            explanation_refused=asked.get(EXPLAIN) is True and not self._explains,
            may_store=asked.get(STORE) is not False,
        )

    def remove(self, request: Any) -> None:
        self._open.pop(request.request_id, None)

    def rename_model(self, model: str) -> bool:
        """Renames the model for further requests. True if the name changed."""
        is_other = self._base.model != model
        self._base = replace(self._base, model=model)
        return is_other

    def _namespace(self, request: Any) -> tuple[Namespace | None, str | None]:
        """The namespace of a request; None, with the reason, if it must not be cached."""
        lora, adapter = request.lora_request, None
        if request.prompt_embeds is not None:
            return None, self._refused(NotCached.EMBEDDINGS)
        if request.pooling_params is not None:
            return None, self._refused(NotCached.POOLING)
        if request.resumable:
            return None, self._refused(NotCached.RESUMABLE)
        if request.mm_features:
            why = media_refusal(request, page_tokens=self._page_tokens, vocab_size=self._vocab_size)
            if why is not None:
                return None, self._refused(NotCached.MEDIA, why)
        if lora is not None:
            digest = self._adapters.digest(lora.lora_int_id, lora.lora_path)
            if digest is None:
                return None, self._refused(NotCached.ADAPTER)
            adapter = f"{lora.lora_name} {digest}"
        return replace(self._base, adapter=adapter, salt=request.cache_salt), None

    def _refused(self, cause: NotCached, more: str | None = None) -> str:
        self._counters.add(f"not_cached_{cause.name.lower()}")
        return f"{cause.value}: {more}" if more is not None else cause.value

    def computing(self, num_scheduled_tokens: Mapping[str, int], state: Any) -> list[tuple[Any, Computing]]:
        """What a step computes for each request. `state` is vLLM's block state, valid during the call only."""
        return [
            (self._open[name], _computing(self._open[name], tokens, state))
            for name, tokens in num_scheduled_tokens.items()
            if name in self._open
        ]


def explanation_for(seen: TrackedRequest | None) -> dict[str, object] | None:
    """The explanation to return with the answer of a request that asked for one; None for others.

    Does not reveal what is stored for other adapters.
    """
    if seen is not None and seen.explanation_refused:
        says = 'explanations are disabled: the operator can enable them with "explain": true in kv_connector_extra_config'
        return {"stepwell": {"says": says}}
    if seen is None or not seen.wants_explanation:
        return None
    why = seen.explanation
    if why is not None and why.cause is Cause.OTHER_NAMESPACE:
        why = replace(why, cause=Cause.NEVER_STORED)
    if why is None:
        cause = seen.why_not or "it has tokens outside of the vocabulary, or ended early"
        return {"stepwell": {"says": f"computed without the cache: {cause}"}}
    return {
        "stepwell": {
            "says": str(why), "cause": why.cause.name.lower(), "prompt_tokens": why.prompt_tokens,
            "known_tokens": why.known_tokens, "restore_tokens": why.restore_tokens, "store_tokens": why.store_tokens,
            "states": list(why.states), "tier": why.tier.label if why.tier is not None else None,
        }
    }  # fmt: skip


def _computing(request: Any, tokens: int, state: Any) -> Computing:
    name, computed = request.request_id, request.num_computed_tokens
    offered = {(group, boundary): block for group, block, boundary in state.boundary_state_offloads.get(name, ())}
    return Computing(
        request=name, computed=computed, upto=computed + tokens, known=request.num_tokens,
        table=lambda: state.get_block_ids(name), offered=offered,
    )  # fmt: skip


MARK = 1 << 30  # marked ids start here, above every vocabulary
STRENGTH_BITS = 128
_DIGEST_CHARS = (64, 128)  # lengths of vLLM's digests of media: BLAKE3, SHA-256, SHA-512


class RequestTokens:
    """One request's known tokens, prompt and answer. The scheduler's thread."""

    def __init__(self, request: Any, *, page_tokens: int, vocab_size: int) -> None:
        self._request, self._page_tokens, self._vocab_size = request, page_tokens, vocab_size

    def __call__(self, start: int) -> list[int]:
        """The tokens from `start` on. Raises BadTokens for ids outside of the vocabulary, which could equal marked ids."""
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
        """Masks of the pages with media, which are all in the prompt."""
        pages = _media_by_page(self._request, self._page_tokens)
        return {page: _mask(media, self._page_tokens) for page, media in pages.items()}


def media_refusal(request: Any, *, page_tokens: int, vocab_size: int) -> str | None:
    """Why a request with media cannot be cached; None if it can."""
    if page_tokens * (MARK.bit_length() - 1 - vocab_size.bit_length()) < STRENGTH_BITS:
        return "pages are too short to identify its media: use a larger --block-size"
    if not all(_is_digest(feature.identifier) for feature in request.mm_features):
        return (
            "its media are not named by their content, but by the client (uuid), or by the request because vLLM's caches are off"
        )
    return None


def _is_digest(identifier: object) -> bool:
    """Whether an identifier is a digest. Names chosen by clients may change their meaning."""
    if not isinstance(identifier, str):
        return False
    digest = identifier.rpartition(":")[2]  # the name of an adapter may precede it
    return len(digest) in _DIGEST_CHARS and all(char in hexdigits for char in digest)


def _media_by_page(request: Any, page_tokens: int) -> dict[int, list[tuple[int, int, str, str]]]:
    """The media in each page: offset from the start of the page, length, modality and name."""
    pages: dict[int, list[tuple[int, int, str, str]]] = {}
    for feature in request.mm_features:
        first, length = int(feature.mm_position.offset), int(feature.mm_position.length)
        for page in range(first // page_tokens, -(-(first + length) // page_tokens)):
            placed = (first - page * page_tokens, length, str(feature.modality), str(feature.identifier))
            pages.setdefault(page, []).append(placed)
    return pages


def _mask(media: Sequence[tuple[int, int, str, str]], page_tokens: int) -> list[int]:
    """Unpredictable numbers below `MARK`, one for each place of a page."""
    drawn = shake_256(b"stepwell-media" + repr(sorted(media)).encode()).digest(4 * page_tokens)
    return [int.from_bytes(drawn[at : at + 4], "little") % MARK for at in range(0, len(drawn), 4)]


MOST_UNUSED = 65_536  # named pages without a request or host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PageName:
    """One page under vLLM's names."""

    hashes: tuple[bytes, ...]  # hashes of its hash blocks, in order
    parent: bytes | None  # hash of the hash block before it
    tokens: bytes  # packed
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(slots=True, kw_only=True)
class Path:
    """The recorded pages of one request."""

    namespace: PageKey  # its digest
    tokens: Callable[[int], list[int]]  # tokens from an index on, as the cache sees them
    lora_id: int | None = None
    lora_name: str | None = None
    keys: list[PageKey] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class PageNames:
    """Names of pages by key. One thread."""

    page_tokens: int
    hash_tokens: int  # tokens of a hash block; divides a page
    most_unused: int = MOST_UNUSED
    _names: dict[PageKey, PageName] = field(default_factory=dict)
    _held: set[PageKey] = field(default_factory=set)  # in host memory
    _users: Counter[PageKey] = field(default_factory=Counter)  # number of requests, plus one for host memory
    _unused: OrderedDict[PageKey, None] = field(default_factory=OrderedDict)  # without users, oldest first

    def note(self, path: Path, tokens: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Records the new whole pages of a request. Raises BadTokens."""
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

    def release(self, path: Path) -> None:
        """Ends the request of a path."""
        for key in path.keys:
            self._drop_user(key)
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
        self._drop_user(key)
        return name

    def clear_held(self) -> None:
        """Host memory was emptied, or its contents are unknown."""
        held, self._held = self._held, set()
        for key in held:
            self._drop_user(key)

    def get(self, key: PageKey) -> PageName | None:
        return self._names.get(key)

    def _use(self, key: PageKey) -> None:
        self._users[key] += 1
        self._unused.pop(key, None)

    def _drop_user(self, key: PageKey) -> None:
        self._users[key] -= 1
        if self._users[key]:
            return
        del self._users[key]
        self._unused[key] = None
        if len(self._unused) > self.most_unused:
            del self._names[self._unused.popitem(last=False)[0]]
