"""LongCat-Flash (Meituan, arXiv 2509.01322): two attention and two dense blocks per layer, beside
which experts work on the input of the first dense one. Some experts return their input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, MtpLayer
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    GatedMLP,
    LatentAttention,
    MoE,
    PreNormLayer,
    Routing,
    only,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["LongcatConfig", "LongcatFlashForCausalLM", "LongcatLayer"]

_NAMES = ExpertNames(router="router.classifier", choice_bias="router.e_score_correction_bias")
_MTP = "model.mtp.layers.0"


@frozen(kw_only=True)
class LongcatConfig(DecoderConfig):
    """config.json of LongCat-Flash. zero_expert_num: experts that return their input.

    `mla_scale_q_lora` and `mla_scale_kv_lora`: whether the normed compressed vectors are scaled by
    sqrt(hidden_size / their width).
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "moe_topk": "num_experts_per_tok",
    }
    ROPE_NEOX = False

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e7
    max_position_embeddings: int = size(131072)
    q_lora_rank: int = size(1536)
    kv_lora_rank: int = size(512)
    qk_nope_head_dim: int = size(128)
    qk_rope_head_dim: int = size(64)
    v_head_dim: int = size(128)
    n_routed_experts: int = size(512)
    num_experts_per_tok: int = size(12)
    moe_intermediate_size: int = size(2048)
    zero_expert_num: int | None = size(256, least=0)
    zero_expert_type: str = "identity"
    routed_scaling_factor: float = 6.0
    router_bias: bool = False
    mla_scale_q_lora: bool = True
    mla_scale_kv_lora: bool = True
    num_nextn_predict_layers: int = size(1, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, router_bias=(False,), zero_expert_type=("identity",))
        self.routing.check(self.n_routed_experts + (self.zero_expert_num or 0))

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def routing(self) -> Routing:
        """Softmax over all experts; weights are not normalized."""
        return Routing(
            self.num_experts_per_tok, renormalise=False, scale=self.routed_scaling_factor
        )

    def attention(self, b: Builder) -> LatentAttention:
        """Make an attention block at `b`."""
        return LatentAttention(
            b,
            hidden=self.hidden_size,
            heads=self.heads,
            rank=self.kv_lora_rank,
            nope=self.qk_nope_head_dim,
            value=self.v_head_dim,
            rope=self.rope(),
            q_rank=self.q_lora_rank,
            bias=self.attention_bias,
        )


class LongcatLayer(Module):
    """Two pre-norm blocks; the experts' output is added at the end."""

    def __init__(self, c: LongcatConfig, b: Builder, index: int) -> None:
        super().__init__()
        self.ops = b.ops

        def norm(name: str) -> Module:
            made: Module = b.rms_norm(name, c.hidden_size, c.rms_norm_eps)
            return made

        self.blocks = ModuleList(
            PreNormLayer(
                norm(f"input_layernorm.{i}"),
                c.attention(b.at(f"self_attn.{i}")),
                norm(f"post_attention_layernorm.{i}"),
                _dense(c, b.at(f"mlps.{i}")),
            )
            for i in range(2)
        )
        self.experts = MoE(
            b.at("mlp"),
            hidden=c.hidden_size,
            inner=c.moe_intermediate_size,
            experts=c.n_routed_experts,
            identities=c.zero_expert_num or 0,
            routing=c.routing,
            act=c.hidden_act,
            wide_router=True,
            choice_bias=True,
            names=_NAMES,
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        first: Any = self.blocks[0]
        x, residual = first.attn_norm.add(x, residual)
        x, residual = first.mlp_norm.add(first.attn(x, batch), residual)
        chosen = self.experts(x)
        x, residual = self.blocks[1](first.mlp(x), residual, batch)
        return self.ops.add(x, chosen), residual


def _dense(c: LongcatConfig, b: Builder) -> Module:
    return GatedMLP(b, c.hidden_size, c.inner_size, c.hidden_act, bias=c.mlp_bias)


def _draft_layer(c: LongcatConfig, b: Builder) -> PreNormLayer:
    return PreNormLayer(
        b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
        c.attention(b.at("self_attn")),
        b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
        standard_mlp(c, b.at("transformer_layer")),
    )


def _scale(factor: float, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Scale a norm's weight."""
    yield name, tensor.float() * factor


class LongcatFlashForCausalLM(DecoderForCausalLM):
    """LongCat-Flash with a language-model head; an additional dense layer drafts tokens (`mtp`)."""

    api = 1
    config_type = LongcatConfig
    layer = LongcatLayer

    @classmethod
    def weights(cls, config: LongcatConfig) -> WeightNames:
        c = config
        ranks = {"q": c.q_lora_rank, "kv": c.kv_lora_rank}
        scaled = {"q": c.mla_scale_q_lora, "kv": c.mla_scale_kv_lora}
        # transformers writes weights of experts that have none.
        first, last = c.n_routed_experts, c.n_routed_experts + (c.zero_expert_num or 0)
        without = "|".join(map(str, range(first, last))) or "none"
        return WeightNames(
            ignore=(r"^model\.mtp\.", rf"\.mlp\.experts\.({without})\."),
            rewrite=tuple(
                Rewrite(
                    rf"\.{part}_a_layernorm\.weight$",
                    partial(_scale, (c.hidden_size / rank) ** 0.5),
                )
                for part, rank in ranks.items()
                if scaled[part]
            ),
        )

    @classmethod
    def mtp(cls, config: LongcatConfig) -> MtpLayer | None:
        if not config.num_nextn_predict_layers:
            return None
        return MtpLayer(
            layer=lambda b: _draft_layer(config, b),
            at=_MTP,
            hidden=config.hidden_size,
            eps=config.rms_norm_eps,
            embedding_norm=f"{_MTP}.enorm.m",
            hidden_norm=f"{_MTP}.hnorm.m",
            project=f"{_MTP}.eh_proj",
            norm="model.mtp.norm",
            normed=True,
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = dict(
            tiny_config(
                "longcat_flash",
                "LongcatFlashForCausalLM",
                num_layers=2,
                num_key_value_heads=4,
                ffn_hidden_size=96,
                expert_ffn_hidden_size=32,
                q_lora_rank=40,
                kv_lora_rank=32,
                qk_nope_head_dim=24,
                qk_rope_head_dim=16,
                head_dim=16,
                v_head_dim=20,
                n_routed_experts=6,
                zero_expert_num=2,
                moe_topk=3,
                routed_scaling_factor=1.5,
            )
        )
        for key in ("num_hidden_layers", "intermediate_size"):
            del table[key]
        return table
