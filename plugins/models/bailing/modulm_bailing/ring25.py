"""Ring and Ling 2.5 (inclusionAI, 2026): lightning attention in most layers, latent attention in
the others, and experts in groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, StateSpec
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    DecoderForCausalLM,
    LatentAttention,
    PreNormLayer,
    Rope,
    RoutedConfig,
    only,
    parse_rope,
    routed_experts,
    size,
    standard_mlp,
    tiny_config,
    without_drafts,
)
from modulm_layers.attention import alibi_slopes

__all__ = ["BailingMoeV25Config", "BailingMoeV25ForCausalLM", "BailingMoeV25Layer"]


@frozen(kw_only=True)
class BailingMoeV25Config(RoutedConfig):
    """config.json of Ring 2.5. The last layer of each `layer_group_size` has latent attention, the
    others lightning attention, whose heads have `head_dim` dimensions, of which
    `partial_rotary_factor` are rotated. `group_norm_size` is how many parts its output is normed
    in.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "linear_silu": "use_linear_silu",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    }

    kv_lora_rank: int = size(512)
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size(128)
    qk_rope_head_dim: int = size(64)
    v_head_dim: int = size(128)
    rope_theta: float = 6e5
    layer_group_size: int = size(1)
    group_norm_size: int = size(1)
    linear_rope: bool = True
    use_linear_silu: bool = False
    use_qk_norm: bool = False
    use_bias: bool = False
    use_qkv_bias: bool = False
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    moe_shared_expert_intermediate_size: int | None = size(None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            moe_router_enable_expert_bias=(True,),
            moe_shared_expert_intermediate_size=(None, self.moe_intermediate_size),
            score_function=("sigmoid",),
            use_bias=(False,),
        )
        if self.heads % self.group_norm_size:
            raise ValueError(f"group_norm_size: {self.group_norm_size} parts of {self.heads} heads")

    def linear(self, index: int) -> bool:
        """Whether layer `index` has lightning attention."""
        return (index + 1) % self.layer_group_size != 0

    def latent_rope(self) -> Rope:
        """Return the positions of latent attention, which rotates all of `qk_rope_head_dim`."""
        table = dict(self.rope_scaling or self.rope_parameters or {})
        table.setdefault("rope_theta", self.rope_theta)
        return parse_rope(
            {**table, "partial_rotary_factor": 1.0},
            head_size=self.qk_rope_head_dim,
            max_positions=self.max_position_embeddings,
            neox=False,
        )


class RotatedLightningAttention(Module):
    """Lightning attention (arXiv 2401.04658) between rotated queries and keys.

    For each token, a head's state is multiplied by exp(-slope), gains the outer product of key and
    value, and is read by the query: a selective scan with step size one. Slopes are ALiBi's,
    smaller in later layers. The result is normed, then gated by the layer's input.
    """

    weight: Tensor

    def __init__(self, c: BailingMoeV25Config, b: Builder, index: int) -> None:
        super().__init__()
        width, ranks = c.heads * c.head_size, b.shared.mesh.tensor
        if c.group_norm_size % ranks.size:
            raise UnsupportedError(
                f"tensor_parallel_size: {ranks.size}: the output of lightning attention is normed "
                f"in {c.group_norm_size} parts (group_norm_size), which ranks cannot split"
            )
        self.parts, self.heads = c.group_norm_size // ranks.size, b.share(c.heads)
        self.ops, self.size, self.silu = b.ops, c.head_size, c.use_linear_silu
        self.qkv = b.pieces(
            "query_key_value", c.hidden_size, [width] * 3, c.head_size, bias=c.use_qkv_bias
        )
        self.q_norm, self.k_norm = None, None
        if c.use_qk_norm:
            self.q_norm = b.rms_norm("query_layernorm", c.head_size, c.rms_norm_eps)
            self.k_norm = b.rms_norm("key_layernorm", c.head_size, c.rms_norm_eps)
        self.rotation = b.rope(c.rope()) if c.linear_rope else None
        self.gate = b.linear("g_proj", c.hidden_size, width)
        b.cut_parameter("g_norm.weight", self, "weight", (b.shard(width),))
        self.eps = c.rms_norm_eps
        self.out = b.row_linear("dense", width, c.hidden_size)
        depth = 1 - index / max(c.num_hidden_layers - 1, 1) + 1e-5
        slopes = depth * alibi_slopes(c.heads, ranks.rank, ranks.size)
        self.log_slopes = slopes.log().unsqueeze(1).to(b.shared.device)
        self.none = torch.zeros(self.heads, device=b.shared.device)
        state = ("state", (self.heads, c.head_size, c.head_size), "float32")
        self.cache = b.cache(StateSpec((state,)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        states, plan = batch.caches[self.cache]["state"], batch.plan(self.cache)
        qkv, gate = self.qkv(x), self.gate(x)
        if self.silu:
            qkv = self.ops.activate(qkv, act="silu")
        shape = (x.shape[0], self.heads, self.size)
        q, k, v = (part.reshape(shape) for part in qkv.chunk(3, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            self.ops.rotary(q, k, batch.positions, self.rotation.cos_sin, True)
        # The bounds force the step size to one.
        scan = (v, gate[:, : self.heads], self.log_slopes, k, q, self.none, states, plan)
        read = self.ops.selective_scan(*scan, limit=(1.0, 1.0)) * self.size**-0.5
        return self._project_out(read.flatten(1), gate)

    def _project_out(self, read: Tensor, gate: Tensor) -> Tensor:
        """Norm the parts of read [tokens, width], scale them by the gate's sigmoid, project."""
        parts = torch.unflatten(read.float(), -1, (self.parts, -1))
        normed = torch.nn.functional.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(1)
        gated = normed * self.weight.float() * gate.float().sigmoid()
        mixed: Tensor = self.out(gated.to(gate.dtype))
        return mixed


def _latent(c: BailingMoeV25Config, b: Builder) -> LatentAttention:
    return LatentAttention(
        b,
        hidden=c.hidden_size,
        heads=c.heads,
        rank=c.kv_lora_rank,
        nope=c.qk_nope_head_dim,
        value=c.v_head_dim,
        rope=c.latent_rope(),
        q_rank=c.q_lora_rank,
        eps=c.rms_norm_eps,
    )


class BailingMoeV25Layer(PreNormLayer):
    """Lightning or latent attention, then experts; the first layers have none."""

    def __init__(self, c: BailingMoeV25Config, b: Builder, index: int) -> None:
        at, linear = b.at("attention"), c.linear(index)
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            RotatedLightningAttention(c, at, index) if linear else _latent(c, at),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b),
        )


class BailingMoeV25ForCausalLM(DecoderForCausalLM):
    """Ring and Ling 2.5 with a language-model head."""

    api = 1
    config_type = BailingMoeV25Config
    layer = BailingMoeV25Layer
    oracle = "modulm_bailing.ring25_oracle:AsDeepseekV3"

    @classmethod
    def weights(cls, config: BailingMoeV25Config) -> WeightNames:
        latent = [i for i in range(config.num_hidden_layers) if not config.linear(i)]
        layers = "|".join(map(str, latent)) or "none"
        return evolve(
            without_drafts(config),
            rename=(
                (r"^model\.word_embeddings\.", "model.embed_tokens."),
                (rf"^(model\.layers\.(?:{layers})\.attention)\.dense\.", r"\1.o_proj."),
                (r"\.(gate|experts)\.expert_bias$", ".gate.e_score_correction_bias"),
                (r"\.experts\.e_score_correction_bias$", ".gate.e_score_correction_bias"),
            ),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "bailing_moe_linear",
            "BailingMoeV2_5ForCausalLM",
            num_key_value_heads=4,
            head_dim=16,
            partial_rotary_factor=0.5,
            q_lora_rank=40,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=20,
            num_experts=8,
            num_shared_experts=1,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            layer_group_size=3,
            group_norm_size=2,
            use_qk_norm=True,
            use_qkv_bias=True,
        )
