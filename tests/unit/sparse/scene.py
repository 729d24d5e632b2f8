"""Requests whose pages spill, grow, share and go, over plain tensors; what every row must be is known from elsewhere.

    truth     a row encodes the text it is of, its layer and its number, so that any wrong row shows
    policy    a dict and a list: which rows are in which slots after a pass, by the rules in words

Freed pages are filled with what no row is, and prefix pages come to use with anything in their hints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf, isfinite
from random import Random

import numpy as np
import torch

from stepwell.memory.row_pages import ABSENT, Changes
from stepwell.sparse.places import Places, Read
from stepwell.sparse.resolve import Fetch, Plan, Resolve, Wanted

POISON = 0xEE
R = 4  # rows of a page
LAYERS, GROUP_OF = 3, (0, 0, 1)  # two layers share a selection


@dataclass(eq=False)
class Request:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    hot: list[int] = field(default_factory=list)


class Slots:
    """What is in which hot slot of one group, kept by a dict and lists. Rows are prefix page x R + row."""

    def __init__(self) -> None:
        self.at: dict[int, int] = {}  # row -> slot
        self.row: dict[int, int] = {}  # slot -> row; an empty slot has none
        self.used: dict[int, int] = {}

    def forget_rows(self, page: int) -> None:
        """The page is another one now. What its rows left behind in slots stays there, and belongs to no page."""
        for row in range(page * R, page * R + R):
            self.at.pop(row, None)

    def forget_slots(self, number: int) -> None:
        for slot in range(number * R, number * R + R):
            row = self.row.pop(slot, None)
            if row is not None and self.at.get(row) == slot:
                del self.at[row]

    def resolve(
        self, asked: list[list[int]], hot: list[list[int]], now: int, score_of: Callable[[int, int], float]
    ) -> list[tuple[int, int]]:
        """`asked` are rows away of each request, in order; `score_of` says what a request gives to a row. Returns rows and the
        slots that take them.
        """
        hit = {self.at[row] for rows in asked for row in rows if row in self.at}
        self.used.update((slot, now) for slot in hit)
        here, seen, fetched = set(self.at), set(), []
        for request, (rows, numbers) in enumerate(zip(asked, hot, strict=True)):
            own = [number * R + k for number in numbers for k in range(R)]
            new = [row for row in dict.fromkeys(rows) if row not in here and row not in seen] if own else []
            seen.update(new)
            empty = [slot for slot in own if slot not in self.row]
            score = {slot: score_of(request, self.row[slot]) for slot in own if slot in self.row and self.used[slot] < now}
            idle = empty + by_score(score)
            for row, slot in zip(new, sorted(idle[: len(new)], key=own.index), strict=False):
                old = self.row.get(slot)
                if old is not None and self.at.get(old) == slot:
                    del self.at[old]
                self.row[slot], self.at[row], self.used[slot] = row, slot, now
                fetched.append((row, slot))
        return fetched


def by_score(score: dict[int, float]) -> list[int]:
    """Slots in the order in which they are replaced: the lowest score first. inf is level with the highest number, -inf with the
    lowest of several, unless rounding puts that into the bin before the last.
    """
    known = [each for each in score.values() if isfinite(each)]
    low, high = (min(known), max(known)) if known else (-inf, inf)
    span = np.float32(high - low)
    least = low if known and high > low and span * (np.float32(253) / span) >= 253 else -inf
    return sorted(score, key=lambda slot: least if score[slot] == -inf else min(score[slot], high))


class Scene:
    def __init__(
        self, seed: int, *, resolve: Resolve, fetch: Fetch, device: str = "cpu", pages: int = 40, hosts: int = 60,
        row_bytes: int = 24, read: Read = Places.read, scored: bool = False,
    ) -> None:  # fmt: skip
        """With `scored`, selections come with scores, by which slots are replaced."""
        self.random, self.device = Random(seed), device
        self.resolve, self.fetch, self.read, self.scored = resolve, fetch, read, scored
        host = torch.full((hosts, LAYERS, R, row_bytes), POISON, dtype=torch.uint8)
        self.host = host.pin_memory() if device == "cuda" else host
        rows = torch.full((pages, LAYERS, R, row_bytes), POISON, dtype=torch.uint8, device=device)
        # prefix pages as they lie: index keys, then hints, then the header
        memory = torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, (pages, 5 + 2 * R + 3), np.int32))
        memory = memory.to(device)
        self.places = Places(
            rows_PLRE=rows, host_PLRE=self.host, slot_PGR=memory[:, 5 : 5 + 2 * R].unflatten(1, (2, R)),
            header_P3=memory[:, 5 + 2 * R :], numbers=pages, requests=8,
        )  # fmt: skip
        self.free = {
            kind: list(range(count)) for kind, count in (("prefix", pages), ("rows", pages), ("host", hosts), ("hot", pages))
        }
        self.references = [0] * pages
        self.text = [-1] * pages  # what a prefix page is of
        self.rows_of, self.host_of, self.ordinal = {}, {}, {}
        self.hot_rows: dict[int, int] = {}
        self.fresh, self.changed, self.lent = [], set(), set()
        self.requests: list[Request] = []
        self.oracle = {group: Slots() for group in set(GROUP_OF)}
        self.now, self.texts = 0, 0
        self.plan = Plan(8 * 64, torch.device(device))

    # ---- what a cache would do ------------------------------------------------------------------

    def truth(self, page: int) -> torch.Tensor:
        """`[L, R, E]` of a prefix page."""
        made = np.random.default_rng(self.text[page]).integers(0, POISON, self.host.shape[1:], np.uint8)
        return torch.from_numpy(made)

    def take(self, kind: str) -> int:
        return self.free[kind].pop(self.random.randrange(len(self.free[kind])))

    def admit(self, *, num_pages: int, hot: int, like: Request | None = None, shared: int = 0) -> Request:
        request = Request(pages=list(like.pages[:shared]) if like else [])
        for page in request.pages:
            self.references[page] += 1
        while len(request.pages) < num_pages:
            page, rows = self.take("prefix"), self.take("rows")
            self.texts += 1
            self.text[page], self.references[page] = self.texts, 1
            self.rows_of[page], self.ordinal[page] = rows, len(request.pages)
            self.places.rows_PLRE[rows] = self.truth(page).to(self.device)
            self.fresh.append(page)
            self.changed.add(page)
            request.pages.append(page)
        request.length = num_pages * R - self.random.randrange(R)
        self.lend(request, hot)
        self.requests.append(request)
        return request

    def lend(self, request: Request, count: int) -> None:
        for _ in range(count):
            number, rows = self.take("hot"), self.take("rows")
            self.hot_rows[number] = rows
            self.lent.add(number)
            request.hot.append(number)

    def shed(self, page: int) -> None:
        if page in self.rows_of:
            self.host_of[page] = host = self.take("host")
            self.host[host] = self.truth(page)
            self.free_rows(self.rows_of.pop(page))
            self.changed.add(page)

    def free_rows(self, rows: int) -> None:
        self.places.rows_PLRE[rows] = POISON
        self.free["rows"].append(rows)

    def finish(self, request: Request) -> None:
        self.requests.remove(request)
        for number in request.hot:
            self.free_rows(self.hot_rows.pop(number))
            self.free["hot"].append(number)
            self.lent.add(number)
        for page in request.pages:
            self.references[page] -= 1
            if not self.references[page]:
                self.free_page(page)

    def free_page(self, page: int) -> None:
        """Frees the page, and another request writes to it."""
        if page in self.rows_of:
            self.free_rows(self.rows_of.pop(page))
        if page in self.host_of:
            host = self.host_of.pop(page)
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.host[host] = POISON
            self.free["host"].append(host)
        self.changed.discard(page)
        self.fresh = [each for each in self.fresh if each != page]
        slots = max(self.places.slots, 1)
        junk = [self.random.choice((self.random.randrange(slots), self.random.randrange(-(2**31), 2**31))) for _ in range(2 * R)]
        self.places.slot_PGR[page] = torch.tensor(junk, dtype=torch.int32).view(2, R).to(self.device)
        self.places.header_P3[page] = torch.tensor([self.random.randrange(-3, 10**6) for _ in range(3)], dtype=torch.int32).to(
            self.device
        )
        self.free["prefix"].append(page)

    def changes(self) -> Changes:
        pages = sorted(self.changed)
        changes = Changes(
            new=_ids(self.fresh), pages=_ids(pages),
            header_N3=np.array(
                [(self.ordinal[page], self.rows_of.get(page, ABSENT), self.host_of.get(page, ABSENT)) for page in pages], np.int32
            ).reshape(-1, 3),
            numbers=_ids(sorted(self.lent)), hot_pages=_ids(self.hot_rows.get(number, ABSENT) for number in sorted(self.lent)),
        )  # fmt: skip
        for oracle in self.oracle.values():
            for page in self.fresh:
                oracle.forget_rows(page)
            for number in self.lent:
                oracle.forget_slots(number)
        self.fresh, self.changed, self.lent = [], set(), set()
        return changes

    # ---- a pass -----------------------------------------------------------------------------------

    def select(self, count: int, most_rows: int = 1) -> tuple[Wanted, list[list[int]]]:
        """Random selections of a batch of some requests; and the positions that each asks for, in order."""
        batch = self.random.sample(self.requests, self.random.randint(1, len(self.requests)))
        owner, last, position, asked = [], [], [], []
        for number, request in enumerate(batch):
            asked.append([])
            queries = self.random.randint(1, most_rows)
            for query in range(queries):
                seen = max(request.length - (queries - query), 0)
                some = self.random.sample(range(seen + 1), min(count, seen + 1))
                some += [self.random.choice((-1, seen + 1, 10**6)) for _ in range(count - len(some))]
                some = [-1 if self.random.random() < 0.1 else at for at in some]
                owner.append(number)
                last.append(seen)
                position.append(some)
                asked[-1] += [at for at in some if 0 <= at <= seen]
        pages, hot = max(len(each.pages) for each in batch), max(len(each.hot) for each in batch)
        wanted = Wanted.of(
            self.tensor(position), last_X=self.tensor(last), owner_X=self.tensor(owner),
            table_BP=self.tensor([each.pages + each.pages[:1] * (pages - len(each.pages)) for each in batch]),
            hot_BQ=self.tensor([each.hot + [ABSENT] * (hot - len(each.hot)) for each in batch]).view(len(batch), hot),
            score_XT=self.scores(len(owner), pages * R) if self.scored else None,
        )  # fmt: skip
        return wanted, [[batch[b].pages[at // R] * R + at % R for at in each] for b, each in enumerate(asked)]

    def tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def scores(self, queries: int, positions: int) -> torch.Tensor:
        """Few distinct numbers, so that different ones never share a bin, some not finite; of all positions, or of some."""
        length = self.random.randint(1, positions)
        drawn = [[self.random.choice((self.random.randint(0, 100), self.random.randint(0, 9))) for _ in range(length)]
                 for _ in range(queries)]  # fmt: skip
        score_XT = torch.tensor(drawn, dtype=torch.float32)
        for odd in (-inf, inf, float("nan")):
            score_XT[self.random.randrange(queries), self.random.randrange(length)] = odd
        return score_XT.to(self.device)

    def run(self, count: int, most_rows: int = 1) -> None:
        """One pass over all layers, with every row checked."""
        self.places.apply(self.changes())
        self.now += 1
        for group in set(GROUP_OF):
            wanted, asked = self.select(count, most_rows)
            self.resolve(self.places, group, wanted, self.plan)
            self.check_policy(group, wanted, asked)
            for layer in (layer for layer in range(LAYERS) if GROUP_OF[layer] == group):
                self.fetch(self.places, layer, self.plan)
                self.check_rows(layer, group, asked)

    def check_rows(self, layer: int, group: int, asked: list[list[int]]) -> None:
        rows = sorted({row for each in asked for row in each})
        if rows:
            number = self.tensor(rows)
            found = self.read(self.places, layer, number // R, number % R, group).cpu()
            right = torch.stack([self.truth(row // R)[layer, row % R] for row in rows])
            assert torch.equal(found, right), [row for row, a, b in zip(rows, found, right, strict=True) if not torch.equal(a, b)]

    def score_of(self, wanted: Wanted) -> Callable[[int, int], float]:
        """The highest score that any query row of a request gives to a row, by the number of its page in a prompt."""
        if wanted.score_XT is None:
            return lambda request, row: -inf
        score_XT = wanted.score_XT.nan_to_num(nan=inf, posinf=inf, neginf=-inf).tolist()
        owners, ordinals = wanted.owner_X.tolist(), self.places.header_P3[:, 0].tolist()

        def score(request: int, row: int) -> float:
            at = ordinals[row // R] * R + row % R
            mine = [score_T for score_T, owner in zip(score_XT, owners, strict=True) if owner == request]
            return max(score_T[at] for score_T in mine) if 0 <= at < len(mine[0]) else -inf

        return score

    def check_policy(self, group: int, wanted: Wanted, asked: list[list[int]]) -> None:
        oracle, away = self.oracle[group], [[row for row in rows if row // R not in self.rows_of] for rows in asked]
        hot = [[number for number in numbers if number >= 0] for numbers in wanted.hot_BQ.tolist()]
        fetched = oracle.resolve(away, hot, self.now, self.score_of(wanted))
        count = int(self.plan.count_1)
        planned = sorted(zip(self.plan.source_M[:count].tolist(), self.plan.target_M[:count].tolist(), strict=True))
        assert planned == sorted(
            (self.host_of[row // R] * R + row % R, self.hot_rows[slot // R] * R + slot % R) for row, slot in fetched
        )
        keys = self.places.key_GS[group].tolist()
        assert {slot: key for slot, key in enumerate(keys) if key >= 0} == oracle.row
        every = self.tensor([page * R + row for page, held in enumerate(self.references) if held for row in range(R)])
        slot, hit = self.places.hot_slot(every // R, every % R, group)
        assert dict(zip(every[hit].tolist(), slot[hit].tolist(), strict=True)) == {
            row: at for row, at in oracle.at.items() if self.references[row // R]
        }


def _ids(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int32)


def live(scene: Scene, *, count: int, hot: int, passes: int, most_rows: int = 1) -> None:
    """Requests come, share, spill and go at random; every pass is checked."""
    random = scene.random
    for _ in range(passes):
        for _ in range(random.randint(0, 3)):
            deed = random.random()
            if (deed < 0.4 and len(scene.requests) < 4) or not scene.requests:
                like = random.choice(scene.requests) if scene.requests and random.random() < 0.6 else None
                shared = random.randint(0, len(like.pages)) if like else 0
                some = max(shared, random.randint(2, 6))
                if min(len(scene.free[kind]) for kind in ("prefix", "rows", "host")) > some + hot:
                    scene.admit(num_pages=some, hot=random.choice((hot, hot, 0)), like=like, shared=shared)
            elif deed < 0.8:
                for page in random.choice(scene.requests).pages[: random.randint(0, 5)]:
                    scene.shed(page)
            elif deed < 0.9:
                scene.finish(random.choice(scene.requests))
        if scene.requests:
            scene.run(count, most_rows)


# ---- larger batches: only their tables are compared ----------------------------------------------------


def random_pass(
    seed: int, *, scored: bool = False, device: str = "cpu", requests: int = 3, pages: int = 12, count: int = 24, hot: int = 9,
    rows: int = R, queries: int = 2,
) -> tuple[Places, Iterator[Wanted], Plan]:  # fmt: skip
    """Requests that share half of their pages, most pages on the host; and selections of one pass after another."""
    random = torch.Generator().manual_seed(seed)
    total = requests * pages

    def number(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.int32, generator=random)

    host = number(0, 255, total, 2, rows, 16).to(torch.uint8)
    places = Places(
        rows_PLRE=torch.full((total + requests * hot, 2, rows, 16), POISON, dtype=torch.uint8, device=device),
        host_PLRE=host.pin_memory() if device == "cuda" else host, numbers=requests * hot, requests=requests,
        slot_PGR=number(-5, 50, total, 2, rows).to(device), header_P3=torch.zeros(total, 3, dtype=torch.int32, device=device),
    )  # fmt: skip
    ids = np.arange(total, dtype=np.int32)
    bound = (number(0, 8, total) == 0).numpy()
    places.apply(
        Changes(
            new=ids, pages=ids, header_N3=np.stack([ids % pages, np.where(bound, ids, -1), np.where(bound, -1, ids)], 1),
            numbers=np.arange(requests * hot, dtype=np.int32), hot_pages=total + np.arange(requests * hot, dtype=np.int32)[::-1],
        )
    )  # fmt: skip
    places.rows_PLRE[:total] = places.host_PLRE.to(device)
    table = torch.from_numpy(ids).view(requests, pages).clone()
    table[1:, : pages // 2] = table[:1, : pages // 2]
    hot_BQ = torch.arange(requests * hot, dtype=torch.int32).view(requests, hot)
    hot_BQ[0, hot // 2 :] = ABSENT

    def selections() -> Iterator[Wanted]:
        while True:
            context = pages * rows
            position = torch.stack([torch.randperm(context, generator=random)[:count] for _ in range(requests * queries)]).int()
            score = torch.randn(requests * queries, context, generator=random)
            score[:, ::7], score[:, ::11] = -torch.inf, torch.nan
            yield Wanted.of(
                position.masked_fill(number(0, 9, *position.shape) == 0, -1).to(device), table_BP=table.to(device),
                last_X=number(context // 2, context, len(position)).to(device), hot_BQ=hot_BQ.to(device),
                owner_X=torch.arange(requests, dtype=torch.int32).repeat_interleave(queries).to(device),
                score_XT=score.to(device) if scored else None,
            )  # fmt: skip

    return places, selections(), Plan(requests * queries * count, torch.device(device))


def tables_of(places: Places, _: object, plan: Plan) -> dict[str, object]:
    """All that a pass leaves behind; requests stand in the plan in any order."""
    count = int(plan.count_1)
    return {
        "fetched": sorted(zip(plan.source_M[:count].tolist(), plan.target_M[:count].tolist(), strict=True)),
        "keys": places.key_GS.tolist(), "stamps": places.stamp_GS.tolist(), "hints": places.slot_PGR.tolist(),
        "counts": places.counts.tally_GBC.tolist(),
    }  # fmt: skip
