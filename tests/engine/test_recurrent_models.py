"""Qwen3-Next, Qwen3.5, Falcon-H1 and Mamba-2 compared with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from engine.side_by_side import PAGE, Memory, Pair, check_pair
from stepwell.base.ids import Kind
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models.registry import build_model

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
FALCON = {
    "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 32,
    "num_hidden_layers": 3,
}  # fmt: skip
MULTIPLIERS = {
    "embedding_multiplier": 1.7, "lm_head_multiplier": 0.6, "mlp_multipliers": [0.8, 1.3], "key_multiplier": 0.7,
    "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.2, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.85,
}  # fmt: skip


def qwen3_next(**more: object) -> torch.nn.Module:
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SMALL | DELTA | EXPERTS | more))


def qwen3_5() -> torch.nn.Module:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SMALL | DELTA))


def falcon_h1(**more: object) -> torch.nn.Module:
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**SMALL | FALCON | MULTIPLIERS | more))


def test_qwen3_next_with_experts() -> None:
    check_pair(Pair(qwen3_next()))


def test_qwen3_next_with_experts_in_some_layers_and_shares_that_do_not_add_up() -> None:
    check_pair(Pair(qwen3_next(mlp_only_layers=[0, 3], norm_topk_prob=False, attention_bias=True)))


def test_qwen3_next_ignores_its_next_token_prediction_layers() -> None:
    reference = qwen3_next()
    tensors = dict(reference.state_dict()) | {"mtp.fc.weight": torch.zeros(4)}
    assert build_model(reference.config.to_dict(), HeldTensors(tensors)).vocab_size == SMALL["vocab_size"]


def test_qwen3_5() -> None:
    check_pair(Pair(qwen3_5()))


def test_qwen3_5_with_experts() -> None:
    sizes = {name: size for name, size in SMALL.items() if name != "intermediate_size"}
    check_pair(Pair(transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**sizes | DELTA | EXPERTS))))


def test_qwen3_5_inside_a_model_that_also_sees() -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
    config = transformers.Qwen3_5Config(text_config=SMALL | DELTA, vision_config=vision, tie_word_embeddings=True)
    check_pair(Pair(transformers.Qwen3_5ForConditionalGeneration(config)))


def test_falcon_h1_with_every_multiplier() -> None:
    check_pair(Pair(falcon_h1()))


@pytest.mark.parametrize("before", [True, False])
def test_falcon_h1_with_a_norm_behind_its_mixer(before: bool) -> None:
    more = {"mamba_rms_norm": True, "mamba_norm_before_gate": before}
    check_pair(Pair(falcon_h1(**more, mamba_proj_bias=True, projectors_bias=True, mlp_bias=True, attention_bias=True)))


class MambaPair(Pair):
    """Its reference does not list the embedded tokens among the streams."""

    def layer_outputs(self, tokens: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        ours, _ = super().layer_outputs(tokens)
        with torch.no_grad():
            states = self.reference(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
        return ours, [state[0].float() for state in states[: len(ours)]]


def mamba2(*, bias: bool = True) -> torch.nn.Module:
    config = transformers.Mamba2Config(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, num_heads=8, head_dim=16, state_size=24, n_groups=2, chunk_size=32,
        use_bias=bias, use_conv_bias=bias, time_step_limit=(0.05, 0.8),
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


@pytest.mark.parametrize("bias", [True, False])
def test_mamba2(bias: bool) -> None:
    pair = MambaPair(mamba2(bias=bias))
    assert not pair.spec.parts(Kind.PREFIX)
    check_pair(pair)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bf16
@pytest.mark.parametrize("make", [qwen3_5, falcon_h1, mamba2])
def test_sixteen_bit_models_keep_their_states_in_thirty_two(make: Callable[[], torch.nn.Module]) -> None:
    pair = Pair(make())
    tokens = pair.tokens(40)
    expected = pair.expected(tokens)
    tensors = HeldTensors(dict(pair.reference.state_dict()))
    pair.model = build_model(pair.reference.config.to_dict(), tensors, dtype="bf16", page_tokens=PAGE)
    memory = Memory(pair.spec)
    assert memory.pages.state_PLRE("ssm").dtype == torch.float32
    assert memory.pages.state_PLRE("conv").dtype == torch.bfloat16
    for sizes in ([40], [33, 1]):
        assert (pair.in_chunks(tokens, sizes) - expected).abs().mean() < 0.05 * expected.std()
