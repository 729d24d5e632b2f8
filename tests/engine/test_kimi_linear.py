"""Kimi-Linear compared with transformers."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.families import KIMI, draw_choices
from engine.side_by_side import PAGE, Memory, Pair, check_pair
from stepwell.base.errors import ConfigError
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.families.layers import LAYER_TYPES, Layer, keeping
from stepwell.base.spec.families.recurrent import kimi_schedule
from stepwell.engine.loading.checkpoint import open_checkpoint
from stepwell.engine.loading.weights import HeldTensors
from stepwell.engine.models.registry import build_model

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4


def kimi(**more: object) -> Any:
    made = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**KIMI | more))
    draw_choices(made)
    return made


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(kimi())


def test_kimi_linear(pair: Pair) -> None:
    check_pair(pair)


def test_kimi_linear_over_several_chunks_of_tokens(pair: Pair) -> None:
    tokens = pair.tokens(200)
    expected = pair.expected(tokens)
    for sizes in ([200], [130, 70]):
        assert (pair.in_chunks(tokens, sizes) - expected).abs().max() <= TOLERANCE


def test_kimi_linear_in_another_order_with_low_rank_queries() -> None:
    kinds = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    more = {
        "num_hidden_layers": 4, "layer_types": kinds, "q_lora_rank": 24, "attention_bias": True, "n_group": 1,
        "norm_topk_prob": False, "mlp_layer_types": ["sparse", "dense", "dense", "sparse"], "linear_conv_kernel_dim": 3,
        "linear_num_heads": 3,
    }  # fmt: skip
    check_pair(Pair(kimi(**more)))


def test_strong_decays_are_those_of_the_reference_token_by_token() -> None:
    """Its own chunks sum decays up in fp32 and are off by 4e-4 here; ours are not."""
    reference = kimi()
    pair = Pair(reference)
    with torch.no_grad():
        for name, tensor in reference.named_parameters():
            if name.endswith(".A_log"):
                tensor.add_(5.0)
    pair.model = build_model(reference.config.to_dict(), HeldTensors(dict(reference.state_dict())), page_tokens=PAGE)
    tokens, past = pair.tokens(100), transformers.DynamicCache(config=reference.config)
    with torch.no_grad():
        expected = torch.cat([reference(torch.tensor([[each]]), past_key_values=past).logits[0] for each in tokens])
    assert (pair.one_shot(tokens) - expected).abs().max() <= TOLERANCE


def test_published_checkpoints_have_other_names_and_a_nested_config(pair: Pair, tmp_path: Path) -> None:
    pair.reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kinds = config.pop("layer_types")
    config["linear_attn_config"] = {
        "kda_layers": [at + 1 for at, kind in enumerate(kinds) if kind == "linear_attention"],
        "full_attn_layers": [at + 1 for at, kind in enumerate(kinds) if kind == "full_attention"],
        "num_heads": config.pop("linear_num_heads"),
        "head_dim": config.pop("linear_head_dim"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(tmp_path))
    names = set(checkpoint.source.names())
    assert {"model.layers.0.self_attn.q_conv1d.weight", "model.layers.1.block_sparse_moe.experts.0.w1.weight"} <= names
    assert checkpoint.max_context == KIMI["max_position_embeddings"]
    again, tokens = copy(pair), pair.tokens(50)
    again.model = build_model(checkpoint.config, checkpoint.source, page_tokens=PAGE)
    assert again.one_shot(tokens).equal(pair.one_shot(tokens))


def test_a_newer_model_of_the_same_fields_is_the_same_model(pair: Pair) -> None:
    again, tokens, tensors = copy(pair), pair.tokens(20), HeldTensors(dict(pair.reference.state_dict()))
    nested = pair.reference.config.to_dict() | {"model_type": "kimi_k3"}
    again.model = build_model({"model_type": "kimi_k3", "text_config": nested}, tensors, page_tokens=PAGE)
    assert again.one_shot(tokens).equal(pair.one_shot(tokens))


def test_rows_in_eight_bits_answer_nearly_the_same(pair: Pair) -> None:
    tokens, tensors = pair.tokens(60), HeldTensors(dict(pair.reference.state_dict()))
    small = copy(pair)
    small.model = build_model(pair.reference.config.to_dict(), tensors, page_tokens=PAGE, kv_dtype="fp8")
    assert Memory(small.spec).pages.state_PLRE("kv").shape[-1] == 32 + 4 + 2 * 8
    expected = pair.expected(tokens)
    for sizes in ([60], [33, 1]):
        assert (small.in_chunks(tokens, sizes) - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bf16
def test_a_sixteen_bit_model_keeps_its_states_in_thirty_two() -> None:
    pair = Pair(kimi(mlp_layer_types=["dense"] * 5))  # rounding changes which experts are chosen
    tokens = pair.tokens(40)
    expected, tensors = pair.expected(tokens), HeldTensors(dict(pair.reference.state_dict()))
    pair.model = build_model(pair.reference.config.to_dict(), tensors, dtype="bf16", page_tokens=PAGE)
    memory = Memory(pair.spec)
    assert memory.pages.state_PLRE("ssm").dtype == torch.float32 and memory.pages.state_PLRE("conv").dtype == torch.bfloat16
    assert (pair.in_chunks(tokens, [33, 1]) - expected).abs().mean() < 0.05 * expected.std()


# ---- configs --------------------------------------------------------------------------------------


def test_the_schedule_has_the_order_of_the_lists() -> None:
    lists = {"kda_layers": [4, 1, 2], "full_attn_layers": [3, 5]}
    kept = kimi_schedule(Fields(values={"num_hidden_layers": 5, "linear_attn_config": lists}))
    assert kept == keeping([Layer.LINEAR, Layer.LINEAR, Layer.FULL, Layer.LINEAR, Layer.FULL])


def test_without_lists_the_schedule_is_that_of_transformers() -> None:
    meant = transformers.KimiLinearConfig(**KIMI | {"num_hidden_layers": 12}).layer_types
    kept = kimi_schedule(Fields(values={"num_hidden_layers": 12}))
    assert kept == keeping(LAYER_TYPES[kind] for kind in meant)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, r"linear_attn_config\.gate_lower_bound"),
        ({"num_expert_group": 3}, "num_expert_group must divide the 8 experts"),
        ({"num_expert_group": 8, "topk_group": 2}, "topk_group 2 leaves 2 experts to a token that visits 3"),
        ({"use_grouped_topk": False}, "use_grouped_topk is false"),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1]}},
            r"linear_attn_config\.kda_layers must be a list",
        ),
        ({"qk_rope_head_dim": 4}, r"q_proj\.weight.*\[80, 64\], but its config says \[64, 64\]"),
        ({"attention_bias": True}, r"no tensor .*kv_a_proj_with_mqa\.bias"),
    ],
)
def test_what_is_not_known_is_refused(pair: Pair, more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_model(pair.reference.config.to_dict() | more, HeldTensors(dict(pair.reference.state_dict())))


@pytest.mark.parametrize(
    "name", ["k_proj", "b_proj", "g_a_proj", "g_b_proj", "forget_gate.f_a_proj", "forget_gate.f_b_proj", "o_norm"]
)
def test_a_tensor_of_another_size_is_refused(pair: Pair, name: str) -> None:
    tensors = dict(pair.reference.state_dict())
    longer = f"model.layers.0.self_attn.{name}.weight"
    tensors[longer] = torch.cat([tensors[longer], tensors[longer][:2]])
    with pytest.raises(ConfigError, match=rf"{longer}.*but its config says"):
        build_model(pair.reference.config.to_dict(), HeldTensors(tensors))
