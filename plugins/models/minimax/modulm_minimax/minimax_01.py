"""MiniMax-01 and M1 (arXiv 2501.08313): lightning attention in most layers, experts in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, StateSpec
from modulm.nn import Builder, Norm, Rewrite, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    MoE,
    Rope,
    Routing,
    activation,
    size,
    split_heads,
    standard_attention,
    tiny_config,
)

__all__ = ["LightningAttention", "MiniMaxConfig", "MiniMaxForCausalLM", "MiniMaxLayer"]

_KINDS = ("linear_attention", "full_attention")


@frozen(kw_only=True)
class MiniMaxConfig(DecoderConfig):
    """config.json of MiniMax-01, with the key names of transformers or of the first files.

    `attn_type_list` has 0 for lightning attention and 1 for full attention. A branch is multiplied
    by its beta and added to the normed stream, which is multiplied by alpha.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_experts": "num_local_experts",
        "layernorm_full_attention_alpha": "full_attn_alpha_factor",
        "layernorm_full_attention_beta": "full_attn_beta_factor",
        "layernorm_linear_attention_alpha": "linear_attn_alpha_factor",
        "layernorm_linear_attention_beta": "linear_attn_beta_factor",
        "layernorm_mlp_alpha": "mlp_alpha_factor",
        "layernorm_mlp_beta": "mlp_beta_factor",
    }

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(131072)
    rope_theta: float = 1000000.0
    rotary_dim: int | None = size(None)
    num_local_experts: int = size(8)
    num_experts_per_tok: int = size(2)
    attn_type_list: tuple[int, ...] | None = None
    postnorm: bool = True
    shared_intermediate_size: int = field(default=0)
    full_attn_alpha_factor: float = 1.0
    full_attn_beta_factor: float = 1.0
    linear_attn_alpha_factor: float = 1.0
    linear_attn_beta_factor: float = 1.0
    mlp_alpha_factor: float = 1.0
    mlp_beta_factor: float = 1.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} of {self.num_local_experts}"
            )
        if self.attn_type_list is not None and len(self.attn_type_list) != self.num_hidden_layers:
            raise ValueError(
                f"attn_type_list: {len(self.attn_type_list)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        unknown = {self.layer_type(i) for i in range(self.num_hidden_layers)} - set(_KINDS)
        if unknown:
            raise ValueError(f"layer_types: kinds are {_KINDS}, got {sorted(unknown)}")
        if not self.postnorm:
            raise ValueError("postnorm: not supported: false (in no published model)")
        if self.shared_intermediate_size:
            raise ValueError("shared_intermediate_size: shared experts are not supported")

    def layer_type(self, index: int) -> str:
        """The file's type of a layer; by default the types alternate, full attention first."""
        if self.attn_type_list is not None:
            return _KINDS[bool(self.attn_type_list[index])]
        if self.layer_types is not None:
            return self.layer_types[index]
        return _KINDS[(index + 1) % 2]

    def window(self, index: int) -> int | None:
        return self.sliding_window or None

    def rope(self, layer_type: str = "") -> Rope:
        rope = super().rope(layer_type)
        return rope if self.rotary_dim is None else evolve(rope, size=self.rotary_dim)


class LightningAttention(Module):
    """Linear attention with a decay rate per head (arXiv 2401.04658).

    For each token, a head's state is multiplied by exp(-slope), gains the outer product of key and
    value, and is read by the query: a selective scan with step size one. Slopes are ALiBi's,
    smaller in later layers. The result is normed and gated by the layer's input.
    """

    def __init__(self, c: MiniMaxConfig, b: Builder, index: int) -> None:
        super().__init__()
        width = c.heads * c.head_size
        head_shard, self.group = b.shard(c.heads), b.shared.mesh.tensor
        self.heads, self.ops, self.act = head_shard.size, b.ops, activation(c.hidden_act, b.ops)
        self.qkv = b.pieces("qkv_proj", c.hidden_size, [width] * 3, c.head_size)
        self.gate = b.linear("output_gate", c.hidden_size, width)
        self.norm = b.rms_norm("norm", width, 1e-6)
        self.out = b.row_linear("out_proj", width, c.hidden_size)
        depth = 1 - index / (c.num_hidden_layers - 1 + 1e-5) + 1e-5
        slopes = torch.tensor([2 ** (-8 * (head + 1) / c.heads) * depth for head in range(c.heads)])
        slopes = slopes[head_shard.start : head_shard.start + head_shard.size]
        device = b.shared.device
        self.log_slopes = slopes.log().unsqueeze(1).to(device)
        self.none = torch.zeros(self.heads, device=device)
        state = ("state", (self.heads, c.head_size, c.head_size), "float32")
        self.cache = b.cache(StateSpec((state,)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        states, plan = batch.caches[self.cache]["state"], batch.plan(self.cache)
        qkv, gate = self.act(self.qkv(x)), self.gate(x)
        q, k, v = (torch.unflatten(part, -1, (self.heads, -1)) for part in qkv.chunk(3, -1))
        # The bounds force the step size to one.
        scan = (v, gate[:, : self.heads], self.log_slopes, k, q, self.none, states, plan)
        read = self.ops.selective_scan(*scan, limit=(1.0, 1.0))
        normed = self._normed(self.ops.cast(read.flatten(1), x.dtype))
        mixed: Tensor = self.out(self.ops.multiply(normed, gate, act="sigmoid"))
        return mixed

    def _normed(self, read: Tensor) -> Tensor:
        """Apply the norm over all heads, including those of other ranks."""
        ranks = self.group
        if ranks.size == 1:
            normed: Tensor = self.norm(read)
            return normed
        return (
            self.norm(ranks.all_gather(read)).tensor_split(ranks.size, -1)[ranks.rank].contiguous()
        )


class MiniMaxLayer(Module):
    """Pre-norm branches, added to the normed inputs."""

    def __init__(self, c: MiniMaxConfig, b: Builder, index: int) -> None:
        super().__init__()
        self.ops, at = b.ops, b.at("self_attn")
        self.attn_norm = b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps)
        if c.layer_type(index) == "linear_attention":
            self.attn: Module = LightningAttention(c, at, index)
            self.attn_weights = (c.linear_attn_alpha_factor, c.linear_attn_beta_factor)
        else:
            self.attn = standard_attention(c, b, index, bias=False, out_bias=False)
            self.attn_weights = (c.full_attn_alpha_factor, c.full_attn_beta_factor)
        self.mlp_norm = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp_weights = (c.mlp_alpha_factor, c.mlp_beta_factor)
        self.mlp = MoE(
            b.at("block_sparse_moe"),
            hidden=c.hidden_size,
            inner=c.inner_size,
            experts=c.num_local_experts,
            routing=Routing(c.num_experts_per_tok),
            act=c.hidden_act,
            names=ExpertNames(gate="w1", up="w3", down="w2"),
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x = self._normed(self.attn_norm, x, residual)
        x = self._normed(self.mlp_norm, *self._weighed(self.attn(x, batch), x, self.attn_weights))
        return self._weighed(self.mlp(x), x, self.mlp_weights)

    def _normed(self, norm: Norm, x: Tensor, residual: Tensor | None) -> Tensor:
        return norm.add(x, residual)[0]

    def _weighed(
        self, branch: Tensor, stream: Tensor, weights: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """The branch times beta and the stream times alpha; the next norm adds them."""
        alpha, beta = weights
        return self.ops.scale(branch, beta), self.ops.scale(stream, alpha)


class MiniMaxForCausalLM(DecoderForCausalLM):
    """MiniMax-01 with a language-model head; stored decay tables are ignored and recomputed."""

    api = 1
    config_type = MiniMaxConfig
    layer = MiniMaxLayer

    @classmethod
    def weights(cls, config: MiniMaxConfig) -> WeightNames:
        apart = split_heads(config.heads, config.heads)
        return WeightNames(
            rename=((r"\.mlp\.", ".block_sparse_moe."),),
            ignore=(r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$",),
            rewrite=(Rewrite(r"\.qkv_proj\.", apart),),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "minimax",
            "MiniMaxForCausalLM",
            head_dim=24,
            intermediate_size=32,
            num_local_experts=6,
            block_size=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_attn_alpha_factor=1.4,
            full_attn_alpha_factor=1.3,
            mlp_alpha_factor=1.2,
            mlp_beta_factor=0.9,
        )
