"""Rows in eight bits by Triton, compared with plain torch: the same bytes written, the same numbers read. Interpreted on CPUs."""

from __future__ import annotations

from random import Random

import pytest
import torch

from stepwell.engine.passes.rows import PLAIN, LayerPlaces, Plain, Powers, RowFormat, Rows, Tiled
from stepwell.sparse.places import Places

pytest.importorskip("triton")
from stepwell.engine.ops.guarded import NoKernel
from stepwell.engine.ops.on_triton import gather as triton_gather
from stepwell.engine.ops.on_triton.gather import gather_rows
from stepwell.engine.ops.on_triton.rows import views_of, write_rows
from unit.sparse.far import PAGES, WHICH, spread

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATENT, INDEX, SHARED = Tiled(width=512, exact=64), Tiled(width=128), Powers(width=448, exact=64)
ODD = [Tiled(width=20, exact=6), Tiled(width=132), Powers(width=8, exact=2), Powers(width=516, exact=4)]
FORMATS = [LATENT, INDEX, SHARED, *ODD]
PAGE = 4


def arena(kept: RowFormat, channels: int, pages: int = 9) -> Rows:
    """One layer of three, as an arena has them; unwritten rows are all ones."""
    if isinstance(kept, Plain):
        stored = torch.full((pages, 3, PAGE, channels), torch.nan, device=DEVICE)
    else:
        size = kept.encode(torch.zeros(1, channels)).shape[1]
        stored = torch.full((pages, 3, PAGE, size), 255, dtype=torch.uint8, device=DEVICE)
    return Rows(stored[:, 1], kept, torch.float32)


def some_rows(count: int, channels: int, seed: int) -> torch.Tensor:
    """Rows of all magnitudes, with zeros, ties and powers of two among them."""
    random = torch.Generator().manual_seed(seed)
    x_NC = torch.randn((count, channels), generator=random) * 2.0 ** torch.randint(-30, 30, (count, 1), generator=random)
    x_NC[0] = 0
    x_NC[1] = 1 / 448
    x_NC[2] = (torch.arange(channels) % 449 - 224).float()
    x_NC[3, ::2] *= 1e-3
    return x_NC.to(DEVICE)


def places(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.tensor(Random(seed).sample(range(9 * PAGE), count), device=DEVICE)
    return at // PAGE, at % PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", FORMATS, ids=str)
def test_the_same_bytes_are_written(kept: Tiled | Powers, dtype: torch.dtype) -> None:
    channels = kept.width + kept.exact
    x_NC, (page_N, row_N) = some_rows(8, channels, 0).to(dtype), places(8, 0)
    one, other = arena(kept, channels), arena(kept, channels)
    assert views_of(other) is not None
    one.write(page_N, row_N, x_NC)
    write_rows(other, page_N, row_N, x_NC)
    assert torch.equal(one.stored_PRE, other.stored_PRE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which the interpreter computes with
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kept", [LATENT, INDEX, SHARED], ids=str)
def test_a_tile_with_a_fault_is_read_as_one(kept: Tiled | Powers, broken: float) -> None:
    x_NC, (page_N, row_N) = torch.ones(2, kept.width + kept.exact, device=DEVICE), places(2, 1)
    x_NC[1, 3] = broken
    one, other = arena(kept, x_NC.shape[1]), arena(kept, x_NC.shape[1])
    one.write(page_N, row_N, x_NC)
    write_rows(other, page_N, row_N, x_NC)
    read = other.some(page_N, row_N)
    assert torch.equal(read.isnan(), one.some(page_N, row_N).isnan()) and read[1, :64].isnan().all()


@pytest.fixture(params=["a tile a program", "all tiles a program"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gather, "_MANY_PROGRAMS", 1 if request.param == "all tiles a program" else 1 << 30)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("kept", [PLAIN, *FORMATS], ids=str)
def test_gathered_rows_are_those_of_plain_torch(kept: RowFormat, every: bool) -> None:
    channels = 576 if isinstance(kept, Plain) else kept.width + kept.exact
    rows, random = arena(kept, channels), Random(1)
    page_N, row_N = torch.arange(9 * PAGE, device=DEVICE) // PAGE, torch.arange(9 * PAGE, device=DEVICE) % PAGE
    rows.write(page_N, row_N, some_rows(9 * PAGE, channels, 2))
    table_SP = torch.tensor([random.sample(range(9), 5) for _ in range(3)], device=DEVICE)
    if every:
        made, expected = gather_rows(rows, table_SP), rows.whole(table_SP).flatten(1, 2)
    else:
        position_SK = torch.tensor([[random.randrange(5 * PAGE) for _ in range(11)] for _ in range(3)], device=DEVICE)
        made = gather_rows(rows, table_SP, position_SK)
        expected = rows.some(table_SP.gather(1, position_SK // PAGE), position_SK % PAGE)
    assert torch.equal(made, expected)


def scattered(rows: Rows, seed: int, far: str | None = None) -> Rows:
    """The same rows under prefix pages: a third in pages of their own, the others on the host, some of these in hot slots too.

    Unassigned rows on the device hold no numbers. Some of the pages may lie `far` apart.
    """
    random, (pages, size, width), stored = Random(seed), rows.stored_PRE.shape, rows.stored_PRE
    device = spread((pages + 3, 3, size, width), stored.dtype, far=far == "rows", device=DEVICE)
    device.fill_(255 if stored.dtype == torch.uint8 else torch.nan)
    host = spread((pages, 3, size, width), stored.dtype, far=far == "host", device="pinned" if DEVICE == "cuda" else DEVICE)
    host.copy_(torch.stack([stored] * 3, 1))
    hint_PGR = spread((pages, 2, size), torch.int32, far=far == "hints", device=DEVICE)
    hint_PGR.random_(-(2**31), 2**31 - 1)
    header_P3 = spread((pages, 3), torch.int32, far=far == "headers", device=DEVICE).fill_(-1)
    found = Places(rows_PLRE=device, host_PLRE=host, slot_PGR=hint_PGR, numbers=3, requests=1, header_P3=header_P3)
    own = random.sample(range(pages + 3), pages + 3)
    found.hot_N.copy_(torch.tensor(own[pages:]))
    for page in range(pages):
        if page % 3 == 0:
            found.header_P3[page, 1], device[own[page], 1] = own[page], stored[page]
        else:
            found.header_P3[page, 2], host[page, 1], host[page, ::2] = page, stored[page].cpu(), 0
    for slot, number in enumerate(random.sample([at for at in range(pages * size) if at // size % 3], 3 * size)):
        hint_PGR[number // size, 1, number % size] = slot
        if slot % 4:  # else the slot is another's by now
            found.key_GS[1, slot], device[own[pages + slot // size], 1, slot % size] = (
                number,
                stored[number // size, number % size],
            )
    return Rows(device[:, 1], rows.format, rows.dtype, LayerPlaces(found, 1, 1))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("kept", [PLAIN, *FORMATS], ids=str)
def test_rows_are_gathered_from_wherever_they_are(kept: RowFormat, every: bool) -> None:
    """The same as from pages that hold all of them, and as plain torch looks them up."""
    channels = 576 if isinstance(kept, Plain) else kept.width + kept.exact
    rows, random = arena(kept, channels), Random(3)
    at_N = torch.arange(9 * PAGE, device=DEVICE)
    rows.write(at_N // PAGE, at_N % PAGE, some_rows(9 * PAGE, channels, 4))
    spread = scattered(rows, 5)
    table_SP = torch.tensor([random.sample(range(9), 5) for _ in range(3)], device=DEVICE)
    position_SK = torch.tensor([[random.randrange(5 * PAGE) for _ in range(11)] for _ in range(3)], device=DEVICE)
    given = (table_SP,) if every else (table_SP, position_SK)
    expected = gather_rows(rows, *given)
    assert torch.equal(gather_rows(spread, *given), expected) and not expected.isnan().any()
    plain = spread.whole(table_SP).flatten(1, 2)
    plain = plain if every else plain.gather(1, position_SK[..., None].expand(-1, -1, plain.shape[2]))
    assert torch.equal(plain, expected)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("kept", [PLAIN, LATENT], ids=str)
@pytest.mark.skipif(DEVICE == "cuda", reason="takes gigabytes there: see tests/gpu/test_far_pages_on_cuda.py")
def test_rows_are_gathered_from_pages_beyond_32_bits(kept: RowFormat, which: str) -> None:
    check_gathering_from_far_pages(kept, which)


def check_gathering_from_far_pages(kept: RowFormat, which: str) -> None:
    rows, random = arena(kept, 576, PAGES), Random(3)
    at_N = torch.arange(PAGES * PAGE, device=DEVICE)
    rows.write(at_N // PAGE, at_N % PAGE, some_rows(PAGES * PAGE, 576, 4))
    apart = scattered(rows, 5, far=which)
    table_SP = torch.tensor([random.sample(range(PAGES), PAGES) for _ in range(2)], device=DEVICE)
    position_SK = torch.tensor([random.sample(range(PAGES * PAGE), PAGES * PAGE) for _ in range(2)], device=DEVICE)
    assert torch.equal(gather_rows(apart, table_SP, position_SK), gather_rows(rows, table_SP, position_SK))


def test_a_row_that_is_nowhere_is_gathered_as_no_number() -> None:
    for kept in (PLAIN, LATENT):
        spread = scattered(arena(kept, 576), 1)
        assert spread.places is not None
        spread.places.places.header_P3[:, 1:] = -1
        spread.places.places.key_GS.fill_(-1)
        assert gather_rows(spread, torch.tensor([[0, 1]], device=DEVICE)).isnan().all()


def test_rows_that_begin_anywhere_are_left_to_plain_torch() -> None:
    kept = Tiled(width=5, exact=3)
    x_NC, (page_N, row_N) = some_rows(6, 8, 0), places(6, 0)
    one, other = arena(kept, 8), arena(kept, 8)
    assert views_of(other) is None
    one.write(page_N, row_N, x_NC)
    with pytest.raises(NoKernel, match="layout"):
        write_rows(other, page_N, row_N, x_NC)
    other.write(page_N, row_N, x_NC)
    table_SP = page_N[None, :3]
    torch.testing.assert_close(gather_rows(other, table_SP), one.whole(table_SP).flatten(1, 2), rtol=0, atol=0, equal_nan=True)
