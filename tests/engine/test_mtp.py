"""The layer that drafts, compared with the same maths in plain torch: all tokens at once, no pages, nothing absorbed."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from engine.drafted import OWN, engine_for, target, tensors_of
from engine.small import prompt
from stepwell.base.ids import Kind
from stepwell.engine.drafts.own_layer import OwnLayerDraft
from stepwell.engine.passes.batch import Batch
from stepwell.engine.passes.pages import DevicePages
from stepwell.engine.passes.paging import RequestRows

pytest.importorskip("transformers")

EPS = 1e-6


class Plain:
    """DeepSeek-V3's draft layer over a whole text. Axes: N tokens, H heads, D channels."""

    def __init__(self) -> None:
        made = target("deepseek_v3", own_layer=True)
        self.config, self.tensors = made.config, tensors_of(made)
        self.name = f"model.layers.{self.config['num_hidden_layers']}"

    def of(self, name: str) -> torch.Tensor:
        return self.tensors[f"{self.name}.{name}.weight"]

    def norm(self, x_NC: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x_NC, x_NC.shape[-1:], self.of(name), EPS)

    def __call__(self, tokens: list[int], hidden_NC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of tokens 1.., given the model's hidden states of all but the last."""
        embedded_NC = self.of("embed_tokens")[torch.tensor(tokens[1:])]
        x_NC = linear(torch.cat([self.norm(embedded_NC, "enorm"), self.norm(hidden_NC, "hnorm")], dim=-1), self.of("eh_proj"))
        x_NC = x_NC + self.attention(self.norm(x_NC, "input_layernorm"))
        x_NC = x_NC + self.experts(self.norm(x_NC, "post_attention_layernorm"))
        hidden_NC = self.norm(x_NC, "shared_head.norm")
        return hidden_NC, linear(hidden_NC, self.of("shared_head.head"))

    def attention(self, x_NC: torch.Tensor) -> torch.Tensor:
        heads, plain, turned, rank = (
            int(str(self.config[name]))
            for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
        )
        query_NHD = linear(self.norm(linear(x_NC, self.of("self_attn.q_a_proj")), "self_attn.q_a_layernorm"),
                           self.of("self_attn.q_b_proj")).unflatten(1, (heads, -1))  # fmt: skip
        latent_NR, key_ND = linear(x_NC, self.of("self_attn.kv_a_proj_with_mqa")).split((rank, turned), dim=1)
        both = linear(self.norm(latent_NR, "self_attn.kv_a_layernorm"), self.of("self_attn.kv_b_proj")).unflatten(1, (heads, -1))
        key_NHD, value_NHD = both[..., :plain], both[..., plain:]
        query_NHD = torch.cat([query_NHD[..., :plain], self.turn(query_NHD[..., plain:])], dim=-1)
        turned_NHD = self.turn(key_ND[:, None]).expand(-1, heads, -1)
        seen = scaled_dot_product_attention(
            query_NHD.transpose(0, 1), torch.cat([key_NHD, turned_NHD], dim=-1).transpose(0, 1), value_NHD.transpose(0, 1),
            is_causal=True, scale=(plain + turned) ** -0.5,
        )  # fmt: skip
        return linear(seen.transpose(0, 1).flatten(1), self.of("self_attn.o_proj"))

    def turn(self, x_NHD: torch.Tensor) -> torch.Tensor:
        """Channels 0 and 1, 2 and 3 and so on as complex numbers; from position 1 on, as token 0 has no row."""
        theta, width = 10000.0, x_NHD.shape[-1]
        angle = torch.arange(1, len(x_NHD) + 1)[:, None] / theta ** (torch.arange(0, width, 2) / width)
        spun = (
            torch.view_as_complex(x_NHD.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
        )
        return torch.view_as_real(spun).flatten(-2)

    def experts(self, x_NC: torch.Tensor) -> torch.Tensor:
        score_NE = linear(x_NC, self.of("mlp.gate")).sigmoid()
        chosen_NE = score_NE + self.tensors[f"{self.name}.mlp.gate.e_score_correction_bias"]
        groups = int(str(self.config["n_group"]))
        worth_NG = chosen_NE.unflatten(1, (groups, -1)).topk(2, dim=-1).values.sum(-1)
        kept_NG = torch.zeros_like(worth_NG).scatter(1, worth_NG.topk(int(str(self.config["topk_group"]))).indices, 1.0)
        allowed = kept_NG.repeat_interleave(chosen_NE.shape[1] // groups, dim=1) > 0
        top_NX = chosen_NE.masked_fill(~allowed, 0.0).topk(int(str(self.config["num_experts_per_tok"]))).indices
        weight_NX = score_NE.gather(1, top_NX)
        weight_NX = weight_NX / weight_NX.sum(-1, keepdim=True) * float(str(self.config["routed_scaling_factor"]))
        gate_up, down = self.tensors[f"{self.name}.mlp.experts.gate_up_proj"], self.tensors[f"{self.name}.mlp.experts.down_proj"]
        out = torch.zeros_like(x_NC)
        for at, (row, weights) in enumerate(zip(top_NX, weight_NX, strict=True)):
            for expert, weight in zip(row.tolist(), weights, strict=True):
                gate, up = linear(x_NC[at], gate_up[expert]).chunk(2)
                out[at] += weight * linear(silu(gate) * up, down[expert])
        shared = "mlp.shared_experts"
        return out + linear(silu(linear(x_NC, self.of(f"{shared}.gate_proj"))) * linear(x_NC, self.of(f"{shared}.up_proj")),
                            self.of(f"{shared}.down_proj"))  # fmt: skip


@pytest.mark.parametrize("sizes", [[40], [16, 24], [1, 1, 7, 1, 30]])
def test_the_layer_computes_what_plain_torch_does(sizes: list[int]) -> None:
    tokens, generator = prompt(41), torch.Generator().manual_seed(1)
    hidden_NC = torch.randn(40, 64, generator=generator)  # of tokens 0 .. 39
    expected_hidden, expected_logits = Plain()(tokens, hidden_NC)
    with engine_for("deepseek_v3", OWN) as engine:
        drafting = engine._speculation._draft if engine._speculation is not None else None
        assert isinstance(drafting, OwnLayerDraft)
        layer, spec = drafting._layer, drafting._pages.spec
    memory = {Kind.PREFIX: torch.full((8, spec.object_bytes(Kind.PREFIX)), 0xFF, dtype=torch.uint8)}
    pages = DevicePages(spec, memory)
    ids = torch.tensor([5, 2, 7]).numpy().astype("int32")
    pages.clear(Kind.PREFIX, [5])  # the row of token 0
    at, found = 1, []
    for size in sizes:
        segment = RequestRows(tokens=tokens[at : at + size], position=at, prefix_pages=ids)
        batch = Batch([segment], pages, device="cpu", every_token=True, first_seen=1)
        found.append(layer(batch, hidden_NC[at - 1 : at - 1 + size]))
        at += size
    assert expected_logits.std() > 0.3, "a dead layer proves nothing"
    assert torch.allclose(torch.cat([hidden for hidden, _ in found]), expected_hidden, atol=1e-4)
    assert torch.allclose(torch.cat([logits for _, logits in found]), expected_logits, atol=1e-4)
    assert not pages.state_PLRE("draft")[5, :, 0].any(), "token 0 has no row"
