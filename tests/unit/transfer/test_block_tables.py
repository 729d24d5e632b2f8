"""Pages that an engine keeps in blocks of several layers and groups: every byte goes where the spec says, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stepwell import CacheConfig, ConfigError, Kind, ModelSpec, Point, Prefix, StateSpec, Tier
from stepwell.base.ids import JobId
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.cache.build import layouts_for
from stepwell.transfer.block_tables import BlockTables, LayerBlocks
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import TorchMemory

SPEC = ModelSpec(
    name="blocks", page_tokens=4,
    states=(
        StateSpec(name="a", shape=Prefix(), layers=2, row_bytes=8, dtype="u8"),  # two blocks of two tokens
        StateSpec(name="b", shape=Prefix(), layers=1, row_bytes=4, dtype="u8"),  # one block of four
        StateSpec(name="s", shape=Point(), layers=1, row_bytes=24, dtype="u8"),
    ),
)  # fmt: skip


class BlocksRig:
    def __init__(self) -> None:
        (layout,) = layouts_for(SPEC, CacheConfig(device_bytes=None, host_bytes=1 << 20)).values()
        self.host = TorchMemory(SPEC, layout)
        sizes = {("a", 0): (16, 2), ("a", 1): (16, 2), ("b", 0): (16, 1), ("s", 0): (24, 1)}
        self.wholes = {key: torch.randint(1, 256, (9, size + 8), dtype=torch.uint8) for key, (size, _) in sizes.items()}
        self.rows = {key: self.wholes[key][:, :size] for key, (size, _) in sizes.items()}  # with eight bytes between blocks
        self.layers = [
            LayerBlocks(state=state, layer=layer, rows_NB=self.rows[state, layer], blocks_per_page=count)
            for (state, layer), (_, count) in sizes.items()
        ]
        self.engine = TorchCopyEngine({Tier.HOST: self.host}, blocks=BlockTables(SPEC, self.layers))

    def copy(self, kind: Kind, pages: list[int], blocks: list[list[int]], *, loads: bool) -> None:
        host = Span(tier=Tier.HOST, kind=kind, ids=np.array(pages, np.int32))
        there = Span(tier=Tier.ENGINE, kind=kind, ids=np.array(blocks, np.int32))
        copy = Copy(source=host, target=there) if loads else Copy(source=there, target=host)
        self.engine.begin(Plan(job=JobId(1), purpose=Purpose.LOAD if loads else Purpose.SAVE, copies=(copy,)))()


def test_a_page_is_its_blocks_layer_by_layer() -> None:
    rig = BlocksRig()
    rig.copy(Kind.PREFIX, [3], [[7, 2, 5]], loads=False)
    wanted = torch.cat([rig.rows["a", 0][7], rig.rows["a", 0][2], rig.rows["a", 1][7], rig.rows["a", 1][2], rig.rows["b", 0][5]])
    assert torch.equal(rig.host.rows(Kind.PREFIX)[3], wanted)


def test_what_was_saved_is_loaded_into_other_blocks_and_nothing_else_is_touched() -> None:
    rig = BlocksRig()
    saved = {key: rows.clone() for key, rows in rig.rows.items()}
    rig.copy(Kind.PREFIX, [0, 1], [[1, 2, 1], [3, 4, 2]], loads=False)
    before = {key: whole.clone() for key, whole in rig.wholes.items()}
    rig.copy(Kind.PREFIX, [1, 0], [[7, 8, 7], [5, 6, 5]], loads=True)
    for layer in (0, 1):
        assert torch.equal(rig.rows["a", layer][5:9], saved["a", layer][1:5])
    assert torch.equal(rig.rows["b", 0][[5, 7]], saved["b", 0][1:3])
    for key, written in {("a", 0): [5, 6, 7, 8], ("a", 1): [5, 6, 7, 8], ("b", 0): [5, 7], ("s", 0): []}.items():
        size = rig.rows[key].shape[1]
        before[key][written, :size] = rig.wholes[key][written, :size]
        assert torch.equal(rig.wholes[key], before[key]), f"{key}: bytes outside the blocks were written"


def test_block_zero_is_nobodys() -> None:
    rig = BlocksRig()
    rig.host.rows(Kind.PREFIX)[2] = 9
    rig.copy(Kind.PREFIX, [2], [[0, 2, 5]], loads=False)
    page = rig.host.rows(Kind.PREFIX)[2]
    assert not page[:16].any() and not page[32:48].any(), "old bytes of another request's page were left in place"
    before = rig.wholes["a", 0].clone()
    rig.copy(Kind.PREFIX, [2], [[0, 3, 0]], loads=True)
    assert torch.equal(rig.wholes["a", 0][0], before[0]) and torch.equal(rig.rows["a", 0][3], rig.rows["a", 0][2])


@pytest.mark.parametrize("blocks", [[[1, 2]], [[1, 2, 9]], [[1, -1, 2]]])
def test_names_that_are_none_copy_nothing(blocks: list[list[int]]) -> None:
    rig = BlocksRig()
    before = {key: whole.clone() for key, whole in rig.wholes.items()}
    with pytest.raises(IndexError):
        rig.copy(Kind.PREFIX, [0], blocks, loads=True)
    assert all(torch.equal(rig.wholes[key], before[key]) for key in before)


def test_layers_that_do_not_fit_the_spec_are_refused() -> None:
    rig = BlocksRig()
    with pytest.raises(ConfigError, match="has 2 layer"):
        BlockTables(SPEC, [layer for layer in rig.layers if (layer.state, layer.layer) != ("a", 1)])
    with pytest.raises(ConfigError, match="24 bytes in a layer"):
        BlockTables(SPEC, [*rig.layers[:3], LayerBlocks(state="s", layer=0, rows_NB=rig.rows["b", 0], blocks_per_page=1)])
