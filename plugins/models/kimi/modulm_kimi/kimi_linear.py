"""Kimi Linear (Moonshot AI, arXiv 2510.26692): delta rule with per-channel decay.

Some layers have latent attention without positions; most have experts plus a shared one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import Factory, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, StateSpec
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    CausalConv,
    DecoderForCausalLM,
    ExpertNames,
    LatentAttention,
    PreNormLayer,
    Rope,
    RoutedConfig,
    recur,
    routed_experts,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["KimiDeltaAttention", "KimiLinearConfig", "KimiLinearForCausalLM", "KimiLinearLayer"]

_KINDS = {"full_attention", "linear_attention"}
_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


@frozen(kw_only=True)
class KimiLinearConfig(RoutedConfig):
    """config.json of Kimi Linear. `linear_attn_config`, a table in its own files, lists the
    delta-rule layers, counted from 1.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    }

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(1048576)
    kv_lora_rank: int = size(512)
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size(128)
    qk_rope_head_dim: int = size(64)
    v_head_dim: int = size(128)
    n_routed_experts: int = size(256)
    n_shared_experts: int | None = size(1)
    num_experts_per_tok: int = size(8)
    moe_intermediate_size: int = size(1024)
    routed_scaling_factor: float = 2.446
    first_k_dense_replace: int = size(1, least=0)
    linear_attn_config: dict[str, Any] = Factory(dict)
    linear_head_dim: int = size(128)
    linear_num_heads: int = size(32)
    linear_conv_kernel_dim: int = size(4, least=2)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        unknown = {self.layer_type(i) for i in range(self.num_hidden_layers)} - _KINDS
        if unknown:
            raise ValueError(f"layer_types: kinds are {sorted(_KINDS)}, got {sorted(unknown)}")
        if any(type(n) is not int or n < 1 for n in self.delta):
            raise ValueError(f"linear_attn_config: {self.delta!r} must be counts")

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def delta(self) -> tuple[int, int, int]:
        """(heads, head size, convolution width) of a delta rule."""
        settings = self.linear_attn_config
        return (
            settings.get("num_heads", self.linear_num_heads),
            settings.get("head_dim", self.linear_head_dim),
            settings.get("short_conv_kernel_size", self.linear_conv_kernel_dim),
        )

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        listed = self.linear_attn_config.get("full_attn_layers")
        full = bool(index) and index % 4 == 0 if listed is None else index + 1 in listed
        return "full_attention" if full else "linear_attention"


class KimiDeltaAttention(Module):
    """A matrix from keys to values per head, whose rows decay at individual rates.

    Each token decays the matrix, reads the value stored for its key and moves it towards its own
    value. Prompts are processed token by token.
    """

    a_log: Tensor
    dt_bias: Tensor

    def __init__(self, c: KimiLinearConfig, b: Builder) -> None:
        super().__init__()
        heads, self.size, width = c.delta
        hidden, inner, head_shard = c.hidden_size, heads * self.size, b.shard(heads)
        self.heads, self.rank_heads = (
            head_shard.size,
            slice(head_shard.start, head_shard.start + head_shard.size),
        )
        sizes = {f"{n}_proj": inner for n in "qkv"}
        self.qkv = b.linear("qkv_proj", hidden, sizes, least=self.size)
        self.convs = ModuleList(
            CausalConv(b, f"{n}_conv1d", inner, width, bias=False, act=c.hidden_act) for n in "qkv"
        )
        narrow = {"f_a_proj": self.size, "g_a_proj": self.size, "b_proj": heads}
        self.parts = list(narrow.values())
        self.narrow = b.linear("narrow_proj", hidden, narrow, split=False)
        self.fade, self.gate = (b.linear(f"{n}_b_proj", self.size, inner) for n in ("f", "g"))
        b.cut_parameter("A_log", self, "a_log", (head_shard,), dtype=torch.float32)
        b.cut_parameter("dt_bias", self, "dt_bias", (b.shard(inner),), dtype=torch.float32)
        self.norm = b.rms_norm("o_norm", self.size, c.rms_norm_eps)
        self.out = b.row_linear("o_proj", inner, hidden)
        conv_states = (
            (f"conv_{n}", conv.state, b.dtype) for n, conv in zip("qkv", self.convs, strict=True)
        )
        state = ("state", (self.heads, self.size, self.size), "float32")
        self.cache = b.cache(StateSpec((*conv_states, state)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan = batch.caches[self.cache], batch.plan(self.cache)
        shape = (x.shape[0], self.heads, self.size)
        q, k, v = (
            conv(part, cache[f"conv_{n}"], plan).float().view(shape)
            for n, conv, part in zip("qkv", self.convs, self.qkv(x).chunk(3, -1), strict=True)
        )
        q, k = _unit(q) * self.size**-0.5, _unit(k)
        fade, gate, beta = (part.contiguous() for part in self.narrow(x).split(self.parts, -1))
        step = F.softplus(self.fade(fade).float() + self.dt_bias).view(shape)
        decays, moved = (
            (-self.a_log.exp().unsqueeze(-1) * step).exp(),
            beta[:, self.rank_heads].float().sigmoid(),
        )

        def move(state: Tensor, at: Tensor) -> Tensor:
            state.mul_(decays[at].unsqueeze(-1))
            key = k[at].unsqueeze(2)
            change = (v[at].unsqueeze(2) - key @ state) * moved[at][..., None, None]
            state += key.transpose(2, 3) @ change
            seen: Tensor = (q[at].unsqueeze(2) @ state).squeeze(2)
            return seen

        y = torch.empty_like(v)
        recur(cache["state"], plan, move, y)
        y = self.norm(y.to(x.dtype)) * self.gate(gate).float().sigmoid().view(shape)
        mixed: Tensor = self.out(y.to(x.dtype).flatten(1))
        return mixed


def _attention(c: KimiLinearConfig, b: Builder) -> LatentAttention:
    """Latent attention without rotation: infinite factors disable every pair of dimensions."""
    still = (math.inf,) * (c.qk_rope_head_dim // 2)
    rope = Rope(c.qk_rope_head_dim, kind="longrope", short_factors=still, long_factors=still)
    return LatentAttention(
        b,
        hidden=c.hidden_size,
        heads=c.heads,
        rank=c.kv_lora_rank,
        nope=c.qk_nope_head_dim,
        value=c.v_head_dim,
        rope=rope,
        q_rank=c.q_lora_rank,
        bias=c.attention_bias,
    )


class KimiLinearLayer(PreNormLayer):
    """Delta rule or latent attention, then experts; the first layers have none."""

    def __init__(self, c: KimiLinearConfig, b: Builder, index: int) -> None:
        at = b.at("self_attn")
        full = c.layer_type(index) == "full_attention"
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, at) if full else KimiDeltaAttention(c, at),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            routed_experts(c, b.at("mlp"), names=_NAMES) if c.sparse(index) else standard_mlp(c, b),
        )


def _flat(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Flatten to one value per head."""
    yield name, tensor.flatten()


class KimiLinearForCausalLM(DecoderForCausalLM):
    """Kimi Linear with a language-model head."""

    api = 1
    config_type = KimiLinearConfig
    layer = KimiLinearLayer
    names = WeightNames(
        rename=((r"\.block_sparse_moe\.", ".mlp."),), rewrite=(Rewrite(r"\.A_log$", _flat),)
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        # For the norm of the delta rule's output, see Qwen3-Next.
        return tiny_config(
            "kimi_linear",
            "KimiLinearForCausalLM",
            rms_norm_eps=1e-3,
            num_key_value_heads=4,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=20,
            num_local_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_head_dim=16,
            linear_num_heads=4,
        )


def _unit(x: Tensor) -> Tensor:
    """Normalize vectors to length 1."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
