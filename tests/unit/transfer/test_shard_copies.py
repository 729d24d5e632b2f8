"""Host pages hold whole rows, byte for byte the same for any number of ranks; each rank finds its own bytes in them again."""

from __future__ import annotations

import pytest
import torch

from stepwell.base.ids import CACHED_KINDS, JobId, Kind, Tier
from stepwell.base.tasks import Copy, Plan, Purpose, Span
from stepwell.transfer import shard_tables
from stepwell.transfer.shard_copies import pieces
from stepwell.transfer.torch_copy_engine import TorchCopyEngine
from stepwell.transfer.torch_memory import TorchMemory
from unit.transfer.sharded import Ranks, host_memory, run, span, spec


@pytest.mark.parametrize("kind", CACHED_KINDS)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("later", [1, 2, 4])
def test_what_some_ranks_saved_others_load_and_save_again_bit_for_bit(kind: Kind, count: int, later: int) -> None:
    host, again = host_memory(), host_memory()
    whole = torch.randint(0, 256, host.rows(kind).shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    host.rows(kind)[[5, 2]] = whole[[5, 2]]
    first = Ranks(count, host)
    run(first.engines, span(Tier.HOST, kind, 5, 2), span(Tier.DEVICE, kind, 1, 7))
    host.rows(kind)[:] = 0
    run(first.engines, span(Tier.DEVICE, kind, 7, 1), span(Tier.HOST, kind, 3, 4))
    assert torch.equal(host.rows(kind)[[4, 3]], whole[[5, 2]]), "whole rows, whichever rank had them"
    assert int(host.bytes_B.count_nonzero()) == int(whole[[5, 2]].count_nonzero()), "nothing else was written"
    second = Ranks(later, host)
    run(second.engines, span(Tier.HOST, kind, 4, 3), span(Tier.DEVICE, kind, 0, 3))
    moved = Ranks(later, again)
    for ours, theirs in zip(moved.devices, second.devices, strict=True):
        ours.rows(kind)[:] = theirs.rows(kind)
    run(moved.engines, span(Tier.DEVICE, kind, 0, 3), span(Tier.HOST, kind, 0, 1))
    assert torch.equal(again.rows(kind)[[0, 1]], whole[[5, 2]])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_rank_has_the_bytes_that_its_spec_says(count: int) -> None:
    host = host_memory()
    host.rows(Kind.PREFIX)[1] = torch.arange(spec().object_bytes(Kind.PREFIX), dtype=torch.int64).to(torch.uint8)
    ranks = Ranks(count, host)
    run(ranks.engines, span(Tier.HOST, Kind.PREFIX, 1), span(Tier.DEVICE, Kind.PREFIX, 0))
    kv, latent = spec().parts(Kind.PREFIX)
    page = host.rows(Kind.PREFIX)[1]
    for rank, device in enumerate(ranks.devices):
        mine = device.rows(Kind.PREFIX)[0]
        heads = page[: kv.size_bytes].view(kv.layers * kv.rows, 64)[:, 64 // count * rank : 64 // count * (rank + 1)]
        assert torch.equal(mine[: kv.size_bytes // count], heads.reshape(-1))
        assert torch.equal(mine[kv.size_bytes // count :], page[latent.offset :])


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["kv", "latent", "swa", "conv"])
def test_every_byte_is_saved_by_exactly_one_rank(name: str, count: int) -> None:
    state = spec().state(name)
    saved = [at for rank in range(count) for saves, _, bytes_ in pieces(state, rank, count) if saves for at in bytes_]
    assert sorted(saved) == list(range(state.row_bytes))
    for rank in range(count):
        kept = [at for _, _, bytes_ in pieces(state, rank, count) for at in bytes_]
        assert kept == [at for each in state.spans_of(rank, count) for at in each]


def test_a_copy_on_the_device_is_each_ranks_own() -> None:
    ranks = Ranks(2, host_memory())
    for device in ranks.devices:
        device.rows(Kind.POINT)[1] = torch.randint(0, 256, device.rows(Kind.POINT)[1].shape, dtype=torch.uint8)
    run(ranks.engines, span(Tier.DEVICE, Kind.POINT, 1), span(Tier.DEVICE, Kind.POINT, 2))
    for device in ranks.devices:
        assert torch.equal(device.rows(Kind.POINT)[1], device.rows(Kind.POINT)[2])


# ---- as a GPU's engine copies them ----------------------------------------------------------------


def by_tables(ranks: Ranks, host: TorchMemory, source: Span, target: Span) -> None:
    """With the engine that a GPU has: over memory of the CPU it copies the same pieces one by one."""
    plan = Plan(job=JobId(1), purpose=Purpose.SAVE, copies=(Copy(source=source, target=target),))
    for device, engine in zip(ranks.devices, ranks.engines, strict=True):
        TorchCopyEngine({Tier.DEVICE: device, Tier.HOST: host}, shards=engine.pairs).begin(plan)()


@pytest.mark.parametrize("kind", CACHED_KINDS)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("most", [shard_tables.MOST_PIECES, 3])
def test_tables_name_the_bytes_that_are_copied_through_a_buffer(
    kind: Kind, count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a list cannot number all pieces of the memory."""
    monkeypatch.setattr(shard_tables, "MOST_PIECES", most)
    host = host_memory()
    whole = torch.randint(0, 256, host.rows(kind).shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    host.rows(kind)[:] = whole
    buffered, direct = Ranks(count, host), Ranks(count, host)
    run(buffered.engines, span(Tier.HOST, kind, 5, 2), span(Tier.DEVICE, kind, 1, 7))
    by_tables(direct, host, span(Tier.HOST, kind, 5, 2), span(Tier.DEVICE, kind, 1, 7))
    for ours, theirs in zip(direct.devices, buffered.devices, strict=True):
        assert torch.equal(ours.bytes_B, theirs.bytes_B)
    host.bytes_B.zero_()
    by_tables(direct, host, span(Tier.DEVICE, kind, 1, 7), span(Tier.DEVICE, kind, 2, 3))
    by_tables(direct, host, span(Tier.DEVICE, kind, 3, 2), span(Tier.HOST, kind, 3, 4))
    assert torch.equal(host.rows(kind)[[4, 3]], whole[[5, 2]])
    assert int(host.bytes_B.count_nonzero()) == int(whole[[5, 2]].count_nonzero()), "nothing else was written"


@pytest.mark.parametrize("count", [1, 2])
def test_pages_that_are_not_there_are_refused(count: int) -> None:
    host = host_memory()
    ranks = Ranks(count, host)
    beyond = len(host.rows(Kind.PREFIX))
    with pytest.raises(IndexError, match=f"of a memory that has {beyond}"):
        by_tables(ranks, host, span(Tier.HOST, Kind.PREFIX, beyond), span(Tier.DEVICE, Kind.PREFIX, 0))
