"""Several ranks compute what one does, and keep what it keeps: real processes, every family, small models in fp32."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafted import target, tensors_of
from engine.families import FAMILIES, MAMBA, MOE, SMALL, checkpoint, checkpoint_of, draw_choices, reference
from engine.rank_worker import LIMIT_S, compute
from engine.ranked import RankProcesses, write_checkpoint
from engine.side_by_side import PAGE, TOLERANCE, draw
from stepwell.base.errors import ConfigError
from stepwell.base.spec import ModelSpec
from stepwell.engine.approximate.selectors import Sparse
from stepwell.engine.loading.checkpoint import Checkpoint
from stepwell.engine.loading.safetensors_files import SafetensorsFiles
from stepwell.engine.loading.weights import HeldTensors, Region, TensorSource
from stepwell.engine.models.registry import build_model, spec_of
from stepwell.engine.ranks import ALONE, Ranks, join

pytest.importorskip("transformers")

# What every rank has whole, besides indexes: embeddings, routers, biases of sums, what makes latents, mixes of lanes.
REPLICATED = (
    "embed_tokens.weight", "embeddings.weight", "mlp.gate.weight", "mlp.router.weight",
    "shared_expert_gate.weight", "down_proj_bias",
    "q_a_proj.weight", "kv_a_proj_with_mqa.weight", "f_a_proj.weight", "g_a_proj.weight", "tid2eid", "_hc.fn", "hc_fn",
    "self_attn.kv_proj.weight", "position_bias", "compressor.kv_proj.weight", "compressor.gate_proj.weight",
)  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    made = RankProcesses(2, tmp_path_factory.mktemp("two"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    made = RankProcesses(4, tmp_path_factory.mktemp("four"))
    yield made
    made.close()


def check_shards(ranks: RankProcesses, made: Checkpoint, folder: Path, **job: Any) -> None:
    folder = write_checkpoint(folder, made.config, tensors_of(made))
    alone, shards = compute(folder, ALONE, job), ranks.run(folder, **job)
    whole = spec_of(made.config, dtype="fp32", page_tokens=PAGE)
    assert alone["logits"].std() > 0.3, "a dead model proves nothing"
    for rank, found in enumerate(shards):
        assert found.keys() == alone.keys()
        assert torch.equal(found["answers"], alone["answers"]), "greedy tokens differ"
        for name in alone.keys() - {"answers"}:
            expected = alone[name]
            if name.startswith("state."):
                expected, found[name] = state_of(whole, name, expected, rank, ranks.size), found[name].view(torch.float32)
            else:
                assert torch.equal(found[name], shards[0][name]), f"{name} of ranks 0 and {rank} differ"
            error = (found[name] - expected).abs().nan_to_num().max()
            assert torch.equal(found[name].isnan(), expected.isnan()), f"{name}: other rows were written"
            assert error <= TOLERANCE, f"{name} of rank {rank} differs by {error}"


def state_of(whole: ModelSpec, name: str, bytes_PLRB: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The numbers that a rank keeps of a state, cut out of what one rank keeps of the whole model, as the spec says."""
    name = name.removeprefix("state.")
    state = next((each for each in whole.states if each.name == name), None)
    spans = [range(bytes_PLRB.shape[-1])] if state is None else state.spans_of(rank, ranks)  # a draft's is replicated
    return torch.cat([bytes_PLRB[..., span.start : span.stop] for span in spans], dim=-1).contiguous().view(torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does(two: RankProcesses, family: str, tmp_path: Path) -> None:
    check_shards(two, checkpoint(family), tmp_path)


@pytest.mark.parametrize("family", ["llama", "mamba2", "deepseek_v4"])
def test_two_ranks_in_sixteen_bits_have_the_same_stream(two: RankProcesses, family: str, tmp_path: Path) -> None:
    made = checkpoint(family)
    folder = write_checkpoint(tmp_path, made.config, tensors_of(made))
    alone, shards = compute(folder, ALONE, {"dtype": "bf16"}), two.run(folder, dtype="bf16")
    assert torch.equal(shards[0]["logits"], shards[1]["logits"]) and torch.equal(shards[0]["answers"], shards[1]["answers"])
    error = (shards[0]["logits"] - alone["logits"]).abs().median()
    assert error < 0.1 * alone["logits"].std(), f"logits differ by {error} at the median"


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_two_ranks_draft_what_one_does(two: RankProcesses, family: str, tmp_path: Path) -> None:
    check_shards(two, target(family, own_layer=True), tmp_path, draft=True)


def variant(name: str) -> Checkpoint:
    """Models in which something else is shared, or cannot be."""
    import transformers as hf

    match name:
        case "biases, a tied head and an odd vocabulary":
            odd = SMALL | {"vocab_size": 127, "tie_word_embeddings": True}
            made: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**odd, attention_bias=True, mlp_bias=True))
        case "a tied head":
            made = hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL | {"tie_word_embeddings": True}))
        case "experts":
            made = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL, **MOE, mlp_only_layers=[1]))
        case "one group":
            made = hf.FalconH1ForCausalLM(hf.FalconH1Config(**SMALL, **MAMBA | {"mamba_n_groups": 1}))
        case "one group, normed before the gate":
            normed = MAMBA | {"mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": True}
            made = hf.FalconH1ForCausalLM(hf.FalconH1Config(**SMALL, **normed))
        case "two groups, normed behind the gate":
            normed = MAMBA | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
            made = hf.FalconH1ForCausalLM(hf.FalconH1Config(**SMALL, **normed))
        case _:
            raise AssertionError(name)
    draw(made)
    draw_choices(made)
    return checkpoint_of(name, made.eval().float())


@pytest.mark.parametrize(
    "name",
    [
        "biases, a tied head and an odd vocabulary", "a tied head", "experts", "one group", "one group, normed before the gate",
        "two groups, normed behind the gate",
    ],
)  # fmt: skip
def test_two_ranks_of_other_models(two: RankProcesses, name: str, tmp_path: Path) -> None:
    check_shards(two, variant(name), tmp_path)


def test_two_ranks_of_a_published_checkpoint_with_an_expert_a_tensor(two: RankProcesses, tmp_path: Path) -> None:
    reference("kimi_linear").save_pretrained(tmp_path / "published")
    files = SafetensorsFiles([tmp_path / "published/model.safetensors"])
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in set(files.names())
    check_shards(two, replace(checkpoint("kimi_linear"), source=files), tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "falcon_h1", "mamba2", "deepseek_v32", "kimi_linear"])
def test_four_ranks_where_there_are_two_key_heads_or_groups(four: RankProcesses, family: str, tmp_path: Path) -> None:
    check_shards(four, checkpoint(family), tmp_path)


def test_four_ranks_tell_each_other_the_sums_of_the_group_they_share(four: RankProcesses, tmp_path: Path) -> None:
    check_shards(four, variant("two groups, normed behind the gate"), tmp_path)


def test_a_rank_whose_other_never_comes_stops_waiting(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        join(0, 2, tmp_path / "meeting", backend="gloo", timeout_s=0.5)


def test_ranks_listen_on_the_loopback_interface_alone(two: RankProcesses, tmp_path: Path) -> None:
    two.run(write_checkpoint(tmp_path, checkpoint("llama").config, tensors_of(checkpoint("llama"))))
    addresses = [address for process in two.running for address in listening(process.pid)]
    assert addresses and all(address.startswith(("0100007F:", "0000000000000000FFFF00000100007F:")) for address in addresses), (
        addresses
    )


def listening(pid: int) -> list[str]:
    """Local addresses, in hex as the kernel writes them, of the TCP sockets that a process listens on."""
    if not Path("/proc/self/net/tcp").exists():
        pytest.skip("needs /proc")
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    lines = [line.split() for name in ("tcp", "tcp6") if (table := Path(f"/proc/{pid}/net/{name}")).exists()
             for line in table.read_text().splitlines()[1:]]  # fmt: skip
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in links]


# ---- loading --------------------------------------------------------------------------------------


class Counting:
    """A source that counts what is read of it."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.read_bytes: dict[str, int] = {}

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, region: Region = ()) -> torch.Tensor:
        tensor = self._source.read(name, region)
        self.read_bytes[name] = self.read_bytes.get(name, 0) + tensor.nbytes
        return tensor


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_share_and_no_more(family: str) -> None:
    made, counts = checkpoint(family), []
    for rank in range(2):
        source = Counting(made.source)
        build_model(made.config, source, page_tokens=PAGE, ranks=Ranks(rank=rank, size=2))
        counts.append(source.read_bytes)
    sizes = {name: made.source.read(name).nbytes for name in made.source.names()}
    whole = [name for name, size in sizes.items() if counts[0].get(name) == size and made.source.read(name).ndim > 1]
    others = [name for name in whole if not name.endswith(REPLICATED) and ".indexer." not in name]
    assert not others, f"every rank reads all of {others}"
    for name in sizes.keys() - set(whole):
        if made.source.read(name).ndim > 1 and name in counts[0]:
            assert counts[0][name] + counts[1][name] == sizes[name], name


def test_packed_experts_are_cut_inside_their_groups_too() -> None:
    """96 inner channels are three groups of 32 in four bits: two ranks have 48 each, three have one group each."""
    config, tensors = packed_gpt_oss()
    whole = build_model(config, HeldTensors(tensors), page_tokens=PAGE)
    for size in (2, 4):
        parts = [build_model(config, HeldTensors(tensors), page_tokens=PAGE, ranks=Ranks(rank=r, size=size)) for r in range(size)]
        down = [part.layers[0].mlp.experts.weights.down_ECI for part in parts]  # type: ignore[attr-defined]
        assert torch.cat(down, dim=2).equal(whole.layers[0].mlp.experts.weights.down_ECI)  # type: ignore[attr-defined]


def packed_gpt_oss() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Random bytes in place of the experts of a small model."""
    made, generator = checkpoint("gpt_oss"), torch.Generator().manual_seed(0)
    tensors = tensors_of(made)
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
    return dict(made.config), tensors


# ---- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "size", "says"),
    [
        (
            "llama",
            3,
            r"--tensor-parallel 3: 3 ranks cannot share the 2 parts of state 'kv' equally; .* use 1, 2 or a multiple of 2",
        ),
        ("llama", 8, r"--tensor-parallel 8 does not divide the 4 attention heads of this model; use 1, 2 or 4"),
        ("qwen3_next", 4, r"--tensor-parallel 4 does not divide the 2 key heads of a delta net"),
        ("deepseek_v3", 3, r"--tensor-parallel 3 does not divide the 4 attention heads"),
        ("deepseek_v4", 4, r"--tensor-parallel 4 does not divide the 2 groups of heads \(o_groups\)"),
        ("mamba2", 16, r"--tensor-parallel 16 does not divide the 8 heads of a mixer"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_numbers(family: str, size: int, says: str) -> None:
    made = checkpoint(family)
    with pytest.raises(ConfigError, match=says):
        build_model(made.config, made.source, page_tokens=PAGE, ranks=Ranks(rank=0, size=size))


@pytest.mark.parametrize("selector", ["quest", "clusterkv"])
def test_selectors_that_look_at_all_heads_are_refused(selector: str) -> None:
    made = checkpoint("llama")
    with pytest.raises(ConfigError, match=f"{selector} selects tokens by the keys of all heads"):
        build_model(made.config, made.source, page_tokens=64, sparse=Sparse(selector=selector), ranks=Ranks(rank=0, size=2))


def test_a_rank_beyond_their_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Ranks(rank=2, size=2)


def test_a_rank_whose_other_was_killed_fails_and_does_not_wait(two: RankProcesses, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, checkpoint("llama").config, tensors_of(checkpoint("llama")))
    two.run(folder)
    two.running[1].kill()
    two.running[1].wait()
    assert two.running[0].stdin is not None
    two.running[0].stdin.write(json.dumps({"folder": str(folder)}) + "\n")
    two.running[0].stdin.flush()
    assert two.running[0].wait(timeout=LIMIT_S) != 0
    two.close()
