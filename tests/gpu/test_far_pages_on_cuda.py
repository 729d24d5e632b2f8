"""Pages of an arena whose offsets need more than 32 bits: the bits of every operation are those over pages nearby.

Takes up to 32 GiB of the device.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from engine.paged import Scene, Shape, far_apart  # noqa: E402
from gpu.test_latent_on_cuda import LATENT_ROWS, SCALE, in_eight_bits, library, picks, scene_of  # noqa: E402, F401
from not_run import NO_CUDA  # noqa: E402
from stepwell.engine.ops import triton_pointwise as fast  # noqa: E402
from stepwell.engine.passes.rows import PLAIN, Rows  # noqa: E402

HAS_ROOM = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 40 << 30
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA),
    pytest.mark.skipif(torch.cuda.is_available() and not HAS_ROOM, reason="less than 40 GiB of the device are free"),
]


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 70, 5)])
def test_keys_and_values(lengths: tuple[int, ...]) -> None:
    pytest.importorskip("flashinfer")
    from stepwell.engine.ops.flashinfer_attention import FlashInferAttention

    def never(*args: object, **more: object) -> None:
        raise AssertionError("this was for FlashInfer")

    shape = Shape(heads=8, kv_heads=2, width=128, page=16, contexts=(300, 40, 7), lengths=lengths)
    scene = Scene(shape, 3, dtype=torch.bfloat16, device="cuda")
    scene.clear_unwritten()
    query_NHD, attend = scene.made(scene.num_tokens, 8, 128), FlashInferAttention(torch.device("cuda"), never)
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
    from stepwell.engine.ops import flashinfer_latent

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
