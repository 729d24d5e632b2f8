"""Windows, entries and sinks by Triton, compared with plain torch: on the CPU in Triton's interpreter."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from engine.paged import Scene, Shape
from stepwell.engine.ops.compression import Entries, Index, attend_shared
from stepwell.engine.passes.groups import Seen
from stepwell.engine.passes.rows import PLAIN, Powers, RowFormat, Rows, Tiled

pytest.importorskip("triton")
from stepwell.engine.ops.on_triton.selection import TritonSelect
from stepwell.engine.ops.on_triton.shared import TritonShared

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, RATIO, ENTRY_ROWS, INDEX = 24, 4, 3, 16
BATCHES = [((0, 7, 50), (1, 1, 9)), ((33, 90), (1, 1)), ((0,), (13,)), ((2,), (1,)), ((61, 3), (5, 6))]


def kept_as(stored: torch.Tensor, kept: RowFormat) -> Rows:
    if kept is PLAIN:
        return Rows(stored, PLAIN, torch.float32)
    return Rows(kept.encode(stored.flatten(0, 1)).unflatten(0, stored.shape[:2]), kept, torch.float32)


class Compressed(Scene):
    """A scene with entries: one for every `RATIO` tokens before and among those of the pass, in pages of their own."""

    def entries(self, kept: RowFormat, *, indexed: int | None) -> Entries:
        random, parts = Random(self.seed), []
        stored, key = self.made(40, ENTRY_ROWS, WIDTH), self.made(40, ENTRY_ROWS, INDEX)
        for part in self.paging.parts:
            looks = [look for look in self.paging.looks if part.start <= look.start < part.stop]
            most = max(-(-(look.end // RATIO) // ENTRY_ROWS) for look in looks)
            table = [random.sample(range(40), most) for _ in looks]
            counts = [[(at + 1) // RATIO for at in range(look.position, look.end)] for look in looks]
            table_SP = torch.tensor(table, dtype=torch.int64, device=DEVICE).view(len(looks), most)
            count_ST = torch.tensor(counts, device=DEVICE)
            parts.append(Seen(start=part.start, stop=part.stop, table_SP=table_SP, rows=ENTRY_ROWS, count_ST=count_ST))
        index = None
        if indexed is not None:
            index = Index(
                query_NID=self.made(self.num_tokens, 5, INDEX),
                weight_NI=self.made(self.num_tokens, 5),
                keys=kept_as(key, PLAIN if kept is PLAIN else Tiled(width=INDEX)),
                count=indexed,
            )
        return Entries(groups=SimpleNamespace(seen=tuple(parts)), rows=kept_as(stored, kept), index=index)


@pytest.mark.parametrize("kept", [PLAIN, Powers(width=16, exact=8)], ids=str)
@pytest.mark.parametrize("looks_at", ["window", "all", "picked"])
@pytest.mark.parametrize(("contexts", "lengths"), BATCHES)
def test_every_query_sees_what_plain_torch_shows_it(
    contexts: tuple[int, ...], lengths: tuple[int, ...], looks_at: str, kept: RowFormat
) -> None:
    window = Random(len(looks_at)).choice([7, 40])
    shape = Shape(kv_heads=1, width=WIDTH // 2, page=4, window=window, contexts=contexts, lengths=lengths)
    scene = Compressed(shape, 5, device=DEVICE)
    scene.clear_unwritten()
    query_NHD, sinks_H = scene.made(scene.num_tokens, 5, WIDTH), scene.made(5)
    entries = None if looks_at == "window" else scene.entries(kept, indexed=4 if looks_at == "picked" else None)
    rows = kept_as(scene.rows.stored_PRE, kept)
    expected = attend_shared(query_NHD, rows, scene.paging, entries, scale=0.3, sinks_H=sinks_H)
    made = TritonShared(TritonSelect())(query_NHD, rows, scene.paging, entries, scale=0.3, sinks_H=sinks_H)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_the_real_width_in_eight_bits() -> None:
    kept = Powers(width=448, exact=64)
    scene = Scene(Shape(kv_heads=1, width=256, page=16, window=128, contexts=(150, 10), lengths=(1, 3)), device=DEVICE)
    scene.clear_unwritten()
    query_NHD, sinks_H = scene.made(scene.num_tokens, 17, 512), scene.made(17)
    rows = kept_as(scene.rows.stored_PRE, kept)
    expected = attend_shared(query_NHD, rows, scene.paging, None, scale=0.05, sinks_H=sinks_H)
    made = TritonShared(TritonSelect())(query_NHD, rows, scene.paging, None, scale=0.05, sinks_H=sinks_H)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
