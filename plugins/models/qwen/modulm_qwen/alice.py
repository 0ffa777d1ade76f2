"""Alice AI Foundation (Yandex, 2026): Kimi's delta rule beside Qwen3-Next's gated attention, and
layers that choose among the outputs of earlier blocks of layers instead of adding all of them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, MtpLayer
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Norm, Rewrite, WeightNames
from modulm_layers import (
    DecoderForCausalLM,
    GatedMLP,
    KimiDeltaRule,
    MoE,
    Routing,
    flatten,
    only,
    size,
)
from modulm_qwen.qwen3_next import (
    Qwen3NextConfig,
    gated_attention,
    offset_norm,
    split_gate,
    tiny_delta,
)

__all__ = ["AliceAIConfig", "AliceAIForCausalLM", "AliceAILayer"]


@frozen(kw_only=True)
class AliceAIConfig(Qwen3NextConfig):
    """config.json of Alice AI; `block_attn_res_block_size` layers are one source for later ones."""

    block_attn_res_block_size: int = size()

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            linear_num_value_heads=(self.linear_num_key_heads,),
            linear_value_head_dim=(self.linear_key_head_dim,),
            mlp_only_layers=((),),
            decoder_sparse_step=(1,),
            use_sliding_window=(False,),
        )


class Mixture(Module):
    """A sum of vectors, weighted by a softmax over the products of their norms with a weight."""

    norm_weight: Tensor
    query: Tensor

    def __init__(self, c: AliceAIConfig, b: Builder, name: str) -> None:
        super().__init__()
        self.eps = c.rms_norm_eps
        b.parameter(f"{name}_norm_weight", self, "norm_weight", (c.hidden_size,))
        b.parameter(f"{name}_proj.weight", self, "query", (1, c.hidden_size))

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        """sources: each [tokens, hidden] -> [tokens, hidden]."""
        values = torch.stack(list(sources), dim=1).float()
        normed = torch.nn.functional.rms_norm(values, values.shape[-1:], eps=self.eps)
        weights = normed @ (self.norm_weight.float() * self.query[0].float())
        mixed = (weights.softmax(-1).unsqueeze(-1) * values).sum(1)
        return mixed.to(sources[0].dtype)


class AliceExperts(Module):
    """Experts scored by sigmoids, with a bias for the choice, and a shared one with a gate."""

    def __init__(self, c: AliceAIConfig, b: Builder) -> None:
        super().__init__()
        inner, self.ops = c.shared_expert_intermediate_size, b.ops
        self.experts = MoE(
            b,
            hidden=c.hidden_size,
            inner=c.moe_intermediate_size,
            experts=c.num_experts,
            routing=Routing(c.num_experts_per_tok, scoring="sigmoid", renormalise=c.norm_topk_prob),
            act=c.hidden_act,
            choice_bias=True,
        )
        self.shared = GatedMLP(b.at("shared_expert"), c.hidden_size, inner, c.hidden_act)
        self.gate = b.linear("shared_expert_gate", c.hidden_size, 1, split=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        mixed: Tensor = self.ops.add(self.experts(x), self.shared(x), self.gate(x))
        return mixed


class AliceAILayer(Module):
    """Delta rule or gated attention, then experts, each on a mixture of the blocks so far."""

    def __init__(self, c: AliceAIConfig, b: Builder, index: int) -> None:
        super().__init__()
        self.attn_mixture = Mixture(c, b, "attn_res") if index else None
        self.mlp_mixture = Mixture(c, b, "mlp_res")
        self.starts_block = index > 0 and index % c.block_attn_res_block_size == 0
        self.attn_norm = offset_norm(c, b, "input_layernorm")
        self.attn: Module = gated_attention(c, b, index) if not c.recurrent(index) else _delta(c, b)
        self.mlp_norm = offset_norm(c, b, "post_attention_layernorm")
        self.mlp = AliceExperts(c, b.at("mlp"))

    def forward(self, blocks: list[Tensor], partial: Tensor | None, batch: Batch) -> Tensor:
        """Return the sum of this block's layers so far.

        blocks: the embedding and the sums of earlier blocks; partial: this block's sum. All of them
        are [tokens, hidden].
        """
        if self.starts_block and partial is not None:
            blocks.append(partial)
            partial = None
        before = [] if partial is None else [partial]
        x = blocks[0] if self.attn_mixture is None else self.attn_mixture([*blocks, *before])
        x = self.attn(self.attn_norm(x), batch)
        partial = x if partial is None else partial + x
        x = self.mlp(self.mlp_norm(self.mlp_mixture([*blocks, partial])))
        return partial + x


def _delta(c: AliceAIConfig, b: Builder) -> KimiDeltaRule:
    return KimiDeltaRule(
        b.at("linear_attn"),
        hidden=c.hidden_size,
        heads=c.linear_num_key_heads,
        head_dim=c.linear_key_head_dim,
        width=c.linear_conv_kernel_dim,
        eps=c.rms_norm_eps,
        act=c.hidden_act,
    )


class AliceAIForCausalLM(DecoderForCausalLM):
    """Alice AI Foundation with a language-model head."""

    api = 1
    config_type = AliceAIConfig
    layer = AliceAILayer
    oracle = "modulm_qwen.alice_oracle:AsQwen3Next"

    def __init__(self, config: AliceAIConfig, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline parallelism: not supported yet: AliceAIForCausalLM, whose layers read "
                "all earlier blocks; use --tensor-parallel-size"
            )
        super().__init__(config, build)
        self.mixture = Mixture(config, build.at(self.root).at("attnres_final"), "res")

    @classmethod
    def weights(cls, config: AliceAIConfig) -> WeightNames:
        gates = evolve(split_gate(config.heads), pattern=r"\.self_attn\.q_proj\.")
        return WeightNames(
            rename=((r"\.linear_attn\.a_log_bias$", ".linear_attn.A_log"),),
            ignore=(r"^mtp\.",),
            rewrite=(gates, Rewrite(r"\.A_log$", flatten)),
        )

    @classmethod
    def mtp(cls, config: AliceAIConfig) -> MtpLayer | None:
        return None

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return offset_norm(config, b, "norm")

    def _run(
        self,
        batch: Batch,
        captured: dict[int, Tensor] | None = None,
        selected: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Tensor | None]:
        blocks, partial = [self.embed(batch)], None
        for index, layer in enumerate(self.layers):
            partial = layer(blocks, partial, batch)
            if index in selected and captured is not None:
                captured[index] = partial
        return self.mixture([*blocks, partial]), None

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = tiny_delta(
            "alice_ai",
            "AliceAIForCausalLM",
            num_hidden_layers=5,
            block_attn_res_block_size=2,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        )
        linear, full = "linear_attention", "full_attention"
        kinds = [linear, full, linear, linear, full]
        sizes = {"linear_num_key_heads": 4, "linear_key_head_dim": 16}
        return {**table, **sizes, "layer_types": kinds}
