"""Pages of an arena whose offsets need more than 32 bits: the bits of every operation are those over pages nearby.

Takes up to 32 GiB of the device, and 9 GiB of pinned host memory.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from engine.kernels import test_triton_rows as gathering  # noqa: E402
from engine.paged import Scene, Shape, far_apart  # noqa: E402
from gpu.test_latent_on_cuda import LATENT_ROWS, SCALE, in_eight_bits, library, picks, scene_of  # noqa: E402, F401
from gpu.test_sparse_on_cuda import check, right_rows, whole  # noqa: E402
from not_run import NO_CUDA  # noqa: E402
from stepwell.engine.ops.on_triton import pointwise as fast  # noqa: E402
from stepwell.engine.passes.rows import PLAIN, RowFormat, Rows  # noqa: E402
from stepwell.sparse import triton_fetch, triton_read, triton_resolve  # noqa: E402
from unit.sparse.far import PAGES, WHICH, spread  # noqa: E402

HAS_ROOM = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 40 << 30
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.skipif(torch.cuda.is_available() and not HAS_ROOM, reason="less than 40 GiB of the device are free"),
]


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 70, 5)])
def test_keys_and_values(lengths: tuple[int, ...]) -> None:
    pytest.importorskip("flashinfer")
    from stepwell.engine.ops.on_flashinfer.attention import FlashInferAttention

    shape = Shape(heads=8, kv_heads=2, width=128, page=16, contexts=(300, 40, 7), lengths=lengths)
    scene = Scene(shape, 3, dtype=torch.bfloat16, device="cuda")
    scene.clear_unwritten()
    query_NHD, attend = scene.made(scene.num_tokens, 8, 128), FlashInferAttention(torch.device("cuda"))
    near, far = (
        attend(query_NHD, rows, scene.paging, heads=2, key_dim=128, scale=0.1) for rows in (scene.rows, far_apart(scene.rows))
    )
    assert torch.equal(near, far)


def test_keys_and_values_are_written() -> None:
    shape = Shape(heads=8, kv_heads=2, width=128, page=16, contexts=(300, 40, 7), lengths=(1, 70, 5))
    scene = Scene(shape, 3, dtype=torch.bfloat16, device="cuda")
    scene.clear_unwritten()
    both, qkv_NX = (Rows(scene.rows.stored_PRE.clone(), PLAIN, torch.bfloat16), far_apart(scene.rows)), scene.made(76, 12 * 128)
    for rows in both:
        fast.write_keys_values(qkv_NX, rows, scene.paging, heads=8, kv_heads=2, norms=None, angles=None)
    assert torch.equal(both[0].stored_PRE, both[1].stored_PRE) and not torch.equal(both[0].stored_PRE, scene.rows.stored_PRE)


@pytest.mark.parametrize("kind", ["plain", "eight bits"])
@pytest.mark.parametrize("picked", [False, True], ids=["all", "picked"])
def test_latents(kind: str, picked: bool, library) -> None:  # noqa: F811
    from stepwell.engine.ops.on_flashinfer import latent as flashinfer_latent

    scene = scene_of(5, heads=64, contexts=[600, 200, 90], lengths=[1, 1, 30], page=16)
    rows = in_eight_bits(scene.rows, LATENT_ROWS) if kind == "eight bits" else scene.rows
    query_NHC, selection = scene.made(scene.num_tokens, 64, 576), picks(scene, 100)
    made = []
    for each in (rows, far_apart(rows)):
        if picked:
            made.append(library.attend_selected(query_NHC, each, scene.paging, selection, rank=512, scale=SCALE))
        else:
            made.append(library(query_NHC, each, scene.paging, rank=512, scale=SCALE))
    assert kind == "eight bits" or not flashinfer_latent.within_reach(far_apart(rows))
    assert (made[0].float() - made[1].float()).abs().max() < 0.01, "they may be copied first, and then cut otherwise"


# ---- rows on the host: `WHICH` says what lies far apart -------------------------------------------------


@pytest.mark.parametrize("which", WHICH)
def test_rows_on_the_host_are_found_fetched_and_read(which: str) -> None:
    """Rows have an odd number of bytes, so that offsets count bytes."""
    shape = (PAGES, 2, 64, 655)
    host, rows = (spread(shape, far=which == name, device=where) for name, where in (("host", "pinned"), ("rows", "cuda")))
    host.copy_(torch.randint(0, 255, shape, dtype=torch.uint8))
    places, plan, wanted = whole(host, rows, count=500, far=which)
    at = wanted.position_XK[0].long()
    given = at // places.page_rows, at % places.page_rows, 0
    for layer in range(2):
        assert torch.equal(triton_read.read(places, layer, *given).cpu(), right_rows(places, wanted, layer)), "on the host"
    triton_resolve.resolve(places, 0, wanted, plan)
    for layer in range(2):
        triton_fetch.fetch(places, layer, plan)
    check(places, wanted, 2)
    for layer in range(2):
        assert torch.equal(triton_read.read(places, layer, *given).cpu(), right_rows(places, wanted, layer)), "in slots"


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("kept", [PLAIN, gathering.LATENT], ids=str)
def test_rows_on_the_host_are_gathered(kept: RowFormat, which: str) -> None:
    gathering.check_gathering_from_far_pages(kept, which)
