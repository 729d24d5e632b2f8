"""What a cache ought to answer, by definition and by brute force. Shares no code with the tree or the match.

    B is a restore point  <=>  B is a multiple of the page and of every align, at least one token comes after it,
                               every page of [0, B) can be read in some tier, and, if a state has window or point shape,
                               one tier has every window page of B and the point at exactly B.

`Oracle` applies that to reported facts (what was committed, what was cleared): nothing may be lost.
`justified` applies it to a ledger of page contents: nothing may be claimed that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ledger import TOKEN, Content, Ledger

from stepwell import Kind, ModelSpec, Point, Tier, Window
from stepwell.policy.placement import PlacementRules

Space = tuple[str | None, ...]


@lru_cache(maxsize=4096)
def boundaries(spec: ModelSpec, prompt_tokens: int) -> tuple[int, ...]:
    """Every legal boundary of a prompt, deepest first, 0 left out."""
    every = [spec.page_tokens, *(state.align for state in spec.states)]
    return tuple(at for at in range(prompt_tokens - 1, 0, -1) if all(at % step == 0 for step in every))


def needs_checkpoint(spec: ModelSpec, boundary: int) -> bool:
    """Whether resuming at `boundary` takes more than prefix pages: a required window, or a point that has rows there."""
    return any(
        (isinstance(state.shape, Window) and state.required)
        or (isinstance(state.shape, Point) and state.shape.rows_at(boundary) > 0)
        for state in spec.states
    )


def deepest(
    spec: ModelSpec, prompt_tokens: int, *, limit: int, has_page: Callable[[int], bool], has_checkpoint: Callable[[int], bool]
) -> int:
    """The deepest restore point by definition; `has_page(i)` and `has_checkpoint(B)` are the facts."""
    for boundary in boundaries(spec, prompt_tokens):
        pages = range(boundary // spec.page_tokens)
        stands = not needs_checkpoint(spec, boundary) or has_checkpoint(boundary)
        if boundary <= limit and stands and all(has_page(page) for page in pages):
            return boundary
    return 0


# ---- the upper bound: nothing is claimed that does not exist ------------------------------------------


def page_tiers(spec: ModelSpec, ledger: Ledger, space: Space, tokens: bytes, page: int) -> set[Tier]:
    """The tiers in which a page can be read. Rows that may spill may be in another one."""
    content = Content(space, tokens[: (page + 1) * spec.page_tokens * TOKEN])
    tiers = ledger.tiers_with(Kind.PREFIX, content)
    if spec.spill is not None and not ledger.rows_are_somewhere(content):
        tiers.discard(Tier.DEVICE)
    return tiers


def has_rows_on_device(spec: ModelSpec, ledger: Ledger, space: Space, tokens: bytes, page: int) -> bool:
    """Whether a page's rows are on the device; they are its own where they cannot spill."""
    content = Content(space, tokens[: (page + 1) * spec.page_tokens * TOKEN])
    return spec.spill is None or Tier.DEVICE in ledger.rows_are_somewhere(content)


def window_contents(spec: ModelSpec, space: Space, tokens: bytes, boundary: int) -> list[Content]:
    """What the window pages of a checkpoint hold: all that overlap the longest required window before `boundary`, in order."""
    longest = max((s.shape.tokens for s in spec.states if isinstance(s.shape, Window) and s.required), default=0)
    size = spec.window_page_tokens
    ends = [end for end in range(size, boundary + 1, size) if longest and end > boundary - longest]
    return [Content(space, tokens[: end * TOKEN]) for end in ends]


def checkpoint_tiers(spec: ModelSpec, ledger: Ledger, space: Space, tokens: bytes, boundary: int) -> set[Tier]:
    """The tiers that hold every page of a checkpoint at `boundary`."""
    tiers = {Tier.DEVICE, Tier.HOST}
    for content in window_contents(spec, space, tokens, boundary):
        tiers &= ledger.tiers_with(Kind.WINDOW, content)
    if spec.parts(Kind.POINT):
        tiers &= ledger.tiers_with(Kind.POINT, Content(space, tokens[: boundary * TOKEN]))
    return tiers


def justified(spec: ModelSpec, ledger: Ledger, space: Space, tokens: bytes, boundary: int) -> str | None:
    """None when the ledger's contents allow a restore at `boundary`; else what is missing."""
    if boundary == 0:
        return None
    if boundary not in boundaries(spec, len(tokens) // TOKEN):
        return f"{boundary} is not a legal boundary of {len(tokens) // TOKEN} tokens"
    for page in range(boundary // spec.page_tokens):
        if not page_tiers(spec, ledger, space, tokens, page):
            return f"prefix page {page} of this path can be read nowhere"
    if needs_checkpoint(spec, boundary) and not checkpoint_tiers(spec, ledger, space, tokens, boundary):
        return f"no tier holds a whole checkpoint at {boundary}"
    return None


# ---- the lower bound: nothing is lost without a reason ------------------------------------------------


@dataclass(eq=False)
class Kept:
    """A checkpoint: who left it, and whether anybody else has a use for it."""

    uses: int = 0
    answers: int = 0  # whose last checkpoint it is


class Oracle:
    """Facts of a cache with space for everything: what was offered, less what was cleared or left behind by an answer."""

    def __init__(self, spec: ModelSpec, placement: PlacementRules) -> None:
        self._spec = spec
        self._placement = placement
        self.step = next(
            at for at in range(1, 10_000) if at % spec.page_tokens == 0 and all(at % s.align == 0 for s in spec.states)
        )
        self._pages: set[Content] = set()
        self._checkpoints: dict[Content, Kept] = {}
        self._unsure: set[Content] = set()  # checkpoints left behind while a request may have been reading them
        self._trails: dict[int, tuple[Content, Kept]] = {}

    # ---- reports to it ----------------------------------------------------------------------------

    def committed(self, number: int, space: Space, tokens: bytes, *, prompt_tokens: int, checkpoint: bool, quiet: bool) -> None:
        """Request `number` committed all of `tokens`, and a checkpoint at their end if it was asked to leave one.

        `quiet` says that nothing is pinned and no copy runs, so that no request can be reading a checkpoint.
        """
        size = self._spec.page_tokens * TOKEN
        for end in range(size, len(tokens) + 1, size):
            self._pages.add(Content(space, tokens[:end]))
        if not checkpoint:
            return
        here, in_answer = Content(space, tokens), len(tokens) // TOKEN >= prompt_tokens
        kept = self._checkpoints.get(here)
        if kept is None:
            kept = self._checkpoints[here] = Kept()
            self._unsure.discard(here)
        elif not (in_answer and kept.answers):  # another request left the same one: now both use it
            kept.uses += 1
        if in_answer:
            self._leave_trail(number, here, kept, quiet=quiet)

    def used(self, space: Space, tokens: bytes) -> None:
        """A request resumed at the end of `tokens`."""
        kept = self._checkpoints.get(Content(space, tokens))
        if kept is not None:
            kept.uses += 1

    def cleared(self, space: Space) -> None:
        self._pages = {content for content in self._pages if content.space != space}
        self._checkpoints = {content: kept for content, kept in self._checkpoints.items() if content.space != space}
        self._unsure = {content for content in self._unsure if content.space != space}

    # ---- what it answers --------------------------------------------------------------------------

    def asked(self, stops: tuple[int, ...], prompt_tokens: int, upto: int, *, last: bool) -> bool:
        """Whether a commit of `upto` tokens must leave a checkpoint."""
        if not upto or upto % self.step or not needs_checkpoint(self._spec, upto):
            return False
        if last or upto in stops:
            return True
        every = self.rounded(self._placement.decode_interval_tokens)
        return upto >= prompt_tokens and every > 0 and upto % every == 0

    def known(self, space: Space, tokens: bytes) -> int:
        """How many tokens of a prompt are known, in whole pages, up to its deepest boundary."""
        page, limit = self._spec.page_tokens, max(boundaries(self._spec, len(tokens) // TOKEN), default=0)
        known = 0
        while known < limit and Content(space, tokens[: (known + page) * TOKEN]) in self._pages:
            known += page
        return known

    def restore(self, space: Space, tokens: bytes, *, limit: int | None = None) -> range:
        """The least and the most tokens at which a prompt may resume; they differ only where checkpoints are unsure."""
        sure = set(self._checkpoints)
        low, high = (self._deepest(space, tokens, limit, among) for among in (sure, sure | self._unsure))
        return range(low, high + 1)

    def _deepest(self, space: Space, tokens: bytes, limit: int | None, checkpoints: set[Content]) -> int:
        size = self._spec.page_tokens * TOKEN
        return deepest(
            self._spec,
            len(tokens) // TOKEN,
            limit=len(tokens) if limit is None else limit,
            has_page=lambda page: Content(space, tokens[: (page + 1) * size]) in self._pages,
            has_checkpoint=lambda boundary: Content(space, tokens[: boundary * TOKEN]) in checkpoints,
        )

    # ---- inside -----------------------------------------------------------------------------------

    def _leave_trail(self, number: int, here: Content, kept: Kept, *, quiet: bool) -> None:
        """Only the last of an answer's checkpoints stays, besides used ones, the last of other answers and absolute multiples."""
        before = self._trails.get(number)
        self._trails[number] = (here, kept)
        kept.answers += 1
        if before is None:
            return
        content, earlier = before
        earlier.answers -= 1
        every = self.rounded(self._placement.interval_tokens)
        milestone = every > 0 and (len(content.tokens) // TOKEN) % every == 0
        if self._checkpoints.get(content) is earlier and not (earlier.uses or earlier.answers or milestone):
            del self._checkpoints[content]
            if not quiet:
                self._unsure.add(content)

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.step) * self.step
