"""Blocks of vLLM's attention backends may have their dimensions in any order in memory; two orders never share values."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
from toy_runs import Make, computed_by, text

from stepwell import ConfigError
from stepwell.base.ids import Kind
from stepwell.connectors.vllm.groups import Group
from stepwell.connectors.vllm.worker_side import geometry, rows_of

BLOCKS, SHAPE = 5, (2, 16, 8)  # heads, tokens, numbers
BLOCK_BYTES = 2 * 16 * 8 * 2
GROUP = Group(number=0, kind=Kind.PREFIX, layers=("a",), block_tokens=16, block_bytes=BLOCK_BYTES, dtype="bfloat16")


def permuted(order: tuple[int, ...], *, padding: int = 0) -> torch.Tensor:
    """Blocks of `SHAPE` whose dimensions lie in memory in this order, with numbers between blocks that belong to none."""
    lying = [SHAPE[each] for each in order]
    whole = torch.arange(BLOCKS * (BLOCK_BYTES // 2 + padding), dtype=torch.int16).view(BLOCKS, -1)
    blocks = whole[:, : BLOCK_BYTES // 2].view(BLOCKS, *lying)
    back = [order.index(dimension) + 1 for dimension in range(len(SHAPE))]
    return blocks.permute(0, *back)


@pytest.mark.parametrize("padding", [0, 24])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_block_is_its_bytes_in_memory_whatever_the_order_of_its_dimensions(order: tuple[int, ...], padding: int) -> None:
    tensor = permuted(order, padding=padding)
    assert tensor.shape == (BLOCKS, *SHAPE)
    rows = rows_of(tensor, GROUP)
    assert rows.shape == (BLOCKS, BLOCK_BYTES) and rows.data_ptr() == tensor.data_ptr()
    for number, row in enumerate(rows):
        first = number * (BLOCK_BYTES // 2 + padding)
        assert row.view(torch.int16).tolist() == list(range(first, first + BLOCK_BYTES // 2))


def test_what_a_row_is_given_the_block_has() -> None:
    source, target = permuted((1, 0, 2)), torch.zeros(BLOCKS, 16, 2, 8, dtype=torch.int16).permute(0, 2, 1, 3)
    assert target.stride() == source.stride()
    rows_of(target, GROUP).copy_(rows_of(source, GROUP))
    assert torch.equal(target, source)


def test_the_layout_of_flash_attention_is_accepted() -> None:
    tensor = torch.zeros(3, 16, 2, 128, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    assert tensor[0].shape == (2, 16, 128) and tensor[0].stride() == (128, 256, 1)
    group = Group(number=0, kind=Kind.PREFIX, layers=("a",), block_tokens=16, block_bytes=8192, dtype="bfloat16")
    assert rows_of(tensor, group).shape == (3, 8192)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(BLOCKS, 2, 16, 9, dtype=torch.int16)[..., :8],
        torch.zeros(BLOCKS, 2, 17, 8, dtype=torch.int16)[:, :, :16],
        torch.zeros(2, BLOCKS, 16, 8, dtype=torch.int16).transpose(0, 1),
        torch.zeros(BLOCKS, 1, 16, 8, dtype=torch.int16).expand(BLOCKS, *SHAPE),
        torch.zeros(BLOCKS, 2, 16, 8, dtype=torch.int16).as_strided((BLOCKS, *SHAPE), (1, 128, 8, 1)),
        torch.zeros(BLOCKS, 2, 16, 4, dtype=torch.int16),
    ],
    ids=["gap in rows", "gap in heads", "halves apart", "heads that are one", "blocks that overlap", "other size"],
)
def test_blocks_with_gaps_and_blocks_that_overlap_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=f"one run of {BLOCK_BYTES} bytes.*choose another KV cache"):
        rows_of(tensor, GROUP)


def test_each_order_of_dimensions_is_another_geometry_and_padding_is_none() -> None:
    seen = [geometry([GROUP], {"a": permuted(order)}) for order in permutations(range(3))]
    assert len(set(seen)) == 6
    assert geometry([GROUP], {"a": permuted((0, 1, 2), padding=24)}) == seen[0]
    one_head = torch.zeros(BLOCKS, 1, 16, 16)
    strided = one_head.as_strided(one_head.shape, (256, 7, 16, 1))  # the stride of one head is never used
    assert geometry([GROUP], {"a": strided}) == geometry([GROUP], {"a": one_head})


def test_engines_of_two_layouts_over_one_store_find_nothing_of_each_other(make: Make, tmp_path: Path) -> None:
    prompt, store = text(1, 45), {"store": f"log:{tmp_path / 'log'}", "store_budget": "64MiB", "prefetch": "wait_complete"}

    def halves(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(len(tensor), 2, -1)

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return halves(tensor).transpose(1, 2)

    took = []
    for seen_as in (turned, turned, halves, halves):
        engine = make("all", seen_as=seen_as, **store)
        took.append(computed_by(engine, prompt))
        engine.close()
    assert took == [49, 5, 49, 5]
