"""DFlash and DSpark heads with the layers of a model family: Laguna, Gemma 4, Kimi K3."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from attrs import Factory, evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding, Head, Rewrite, WeightNames
from modulm.nn.embedding import softcap
from modulm_layers import LatentAttention, Rope, standard_mlp
from modulm_layers.config import only, size
from modulm_speculator_dflash.backbone import (
    BlockAttention,
    BlockLayer,
    DFlashConfig,
    DFlashHead,
)
from modulm_speculator_dflash.selectors import MarkovHead

__all__ = ["FAMILY_HEADS", "GemmaMarkovHead", "LagunaHead", "LatentMarkovHead"]


@frozen(kw_only=True)
class LagunaConfig(DFlashConfig):
    """config.json of a head for Laguna. gating: true or "per-head", "per-element", or false."""

    gating: Any = True
    num_attention_heads_per_layer: tuple[int, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, gating=(True, False, "per-head", "per-element"))
        if "sparse" in (self.mlp_layer_types or ()):
            raise ValueError("mlp_layer_types: not supported yet in drafters: 'sparse'")

    def heads_of(self, index: int) -> int:
        """Return the query heads of layer `index`."""
        layers = self.num_attention_heads_per_layer
        return self.heads if layers is None else layers[index]


class _LagunaAttention(BlockAttention):
    """Attention whose output is scaled by softplus gates, one per head or per number."""

    def __init__(self, c: LagunaConfig, b: Builder, index: int) -> None:
        heads = c.heads_of(index)
        super().__init__(c, b, index, heads=heads)
        self.gates: Module | None = None
        if c.gating:
            per_head = c.gating is True or c.gating == "per-head"
            count = heads if per_head else heads * c.head_size
            self.gates = b.linear("g_proj", c.hidden_size, count, split=False)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        if self.gates is not None:
            gates = F.softplus(self.gates(x).float()).to(out.dtype)
            out = out * gates.view(*out.shape[:2], -1)
        return super().project_out(out, x)


class _LagunaLayer(BlockLayer):
    """Laguna's dense layer; the text's states also go through its first norm."""

    def make_attention(self, c: Any, b: Builder, index: int) -> Module:
        return _LagunaAttention(c, b, index)

    def context(self, contexts: Tensor) -> Tensor:
        normed: Tensor = self.attn_norm(contexts)
        return normed


class LagunaHead(DFlashHead):
    """DFlash for Laguna: each of the target's states has a norm of its own."""

    config_type: ClassVar[type] = LagunaConfig
    layer = _LagunaLayer

    def __init__(self, config: LagunaConfig, build: Builder) -> None:
        super().__init__(config, build)
        width = config.target_hidden_size or config.hidden_size
        self.state_norms = ModuleList(
            build.rms_norm(f"aux_hidden_norms.{i}", width, config.rms_norm_eps)
            for i in range(config.aux)
        )

    def combined(self, states: Any) -> Tensor:
        pairs = zip(self.state_norms, states, strict=True)
        return super().combined([norm(state) for norm, state in pairs])


@frozen(kw_only=True)
class LatentConfig(DFlashConfig):
    """config.json of a DSpark head with DeepSeek's attention."""

    rope_theta: float = 50000.0
    kv_lora_rank: int = size()
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size()
    qk_rope_head_dim: int = size()
    v_head_dim: int = size()
    mla_use_nope: bool = False
    mla_use_output_gate: bool = False
    mla_use_qk_norm: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        names = ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm")
        only(self, **dict.fromkeys(names, (False,)))

    @property
    def head_size(self) -> int:
        return self.qk_rope_head_dim

    def rope(self, layer_type: str = "") -> Rope:
        return evolve(super().rope(layer_type), neox=False)


class _LatentBlockAttention(LatentAttention):
    """Latent attention whose tokens may see those after them, up to the end of their block."""

    def __init__(self, b: Builder, *, causal: bool, **settings: Any) -> None:
        self.causal = causal
        super().__init__(b, **settings)

    def make_cache(self, b: Builder, spec: AttentionSpec) -> None:
        super().make_cache(b, evolve(spec, causal=self.causal))


class _LatentLayer(BlockLayer):
    """A dense layer with DeepSeek's attention."""

    def make_attention(self, c: Any, b: Builder, index: int) -> Module:
        return _LatentBlockAttention(
            b,
            causal=c.is_causal_layer(index),
            hidden=c.hidden_size,
            heads=c.heads,
            rank=c.kv_lora_rank,
            nope=c.qk_nope_head_dim,
            value=c.v_head_dim,
            rope=c.rope(),
            q_rank=c.q_lora_rank,
            eps=c.rms_norm_eps,
        )


class LatentMarkovHead(MarkovHead):
    """DSpark for Kimi K3."""

    config_type: ClassVar[type] = LatentConfig
    layer = _LatentLayer
    names = evolve(
        MarkovHead.names,
        rename=(
            *MarkovHead.names.rename,
            (r"^context_proj\.", "fc."),
            (r"^context_norm\.", "hidden_norm."),
            (r"^final_norm\.", "norm."),
        ),
    )


@frozen(kw_only=True)
class GemmaConfig(DFlashConfig):
    """config.json of a DSpark head for Gemma 4; see that family's package for the keys."""

    head_dim: int | None = size(256)
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_k_eq_v: bool = False
    global_head_dim: int = size(512)
    num_global_key_value_heads: int | None = size(None)
    per_layer_config: dict[str, dict[str, Any]] = Factory(dict)

    def heads_of(self, index: int) -> tuple[int, int]:
        """Return the key heads of layer `index`, and the dimensions of one head."""
        settings = self.per_layer_config.get(str(index), {})
        kv_heads, width = self.kv_heads, self.head_size
        if self.layer_type(index) == "full_attention" and not self.per_layer_config:
            width = self.global_head_dim
            if self.attention_k_eq_v:
                kv_heads = self.num_global_key_value_heads or kv_heads
        return settings.get("num_key_value_heads", kv_heads), settings.get("head_dim", width)

    def shares_values(self, index: int) -> bool:
        """Return whether one weight gives keys and values of layer `index`."""
        return self.attention_k_eq_v and self.layer_type(index) == "full_attention"

    def rotation(self, index: int) -> Rope:
        """Return the rotary positions: "proportional" ones turn the first part of a head."""
        kind, width = self.layer_type(index), self.heads_of(index)[1]
        full = kind == "full_attention"
        settings: Mapping[str, Any] = (self.rope_parameters or {}).get(kind, {})
        table = {"rope_theta": 1e6 if full else 1e4, **settings}
        theta = float(table["rope_theta"])
        if table.get("rope_type", "default") == "default":
            return Rope(size=width, theta=theta)
        if table["rope_type"] != "proportional":
            raise ValueError(f"rope_parameters: not supported yet: {table['rope_type']!r}")
        turning = int(table.get("partial_rotary_factor", 1.0) * width // 2)
        slower = float(table.get("factor", 1.0))
        factors = (slower,) * turning + (math.inf,) * (width // 2 - turning)
        return Rope(
            size=width, theta=theta, kind="longrope", short_factors=factors, long_factors=factors
        )

    def rope(self, layer_type: str = "") -> Rope:
        return Rope(size=self.head_size)


class _GemmaAttention(BlockAttention):
    """Attention with norms of queries, keys and values, and a scale of 1."""

    def __init__(self, c: GemmaConfig, b: Builder, index: int) -> None:
        kv_heads, width = c.heads_of(index)
        changes = {"kv_heads": kv_heads, "head_dim": width, "rope": c.rotation(index)}
        super().__init__(c, b, index, scale=1.0, **changes)
        self.eps, self.fusable = c.rms_norm_eps, False

    def _project(
        self, qkv: Tensor, positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(qkv, positions, table)
        wide = v.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return q, k, (wide * scale).to(v.dtype)


class _GemmaLayer(BlockLayer):
    """Gemma 4's dense layer: norms before and after both branches, and a scalar."""

    scalar: Tensor

    def make_attention(self, c: Any, b: Builder, index: int) -> Module:
        return _GemmaAttention(c, b, index)

    def make_rest(self, c: Any, b: Builder) -> None:
        hidden, eps = c.hidden_size, c.rms_norm_eps
        self.mlp = standard_mlp(c, b, act=c.hidden_activation)
        self.attn_norm = b.rms_norm("input_layernorm", hidden, eps)
        self.attn_post = b.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp_norm = b.rms_norm("pre_feedforward_layernorm", hidden, eps)
        self.mlp_post = b.rms_norm("post_feedforward_layernorm", hidden, eps)
        b.parameter("layer_scalar", self, "scalar", (1,))

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch, block: int) -> Any:
        if not block:
            self.attend(x, batch)
            return x, None
        x = x + self.attn_post(self.attend(self.attn_norm(x), batch))
        x = x + self.mlp_post(self.mlp(self.mlp_norm(x)))
        return x * self.scalar, None


class GemmaMarkovHead(MarkovHead):
    """DSpark for Gemma 4, with its scaled embedding and soft-capped logits."""

    config_type: ClassVar[type] = GemmaConfig
    layer = _GemmaLayer

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        hidden = config.hidden_size
        return b.embedding("embed_tokens", config.vocab_size, hidden, scale=hidden**0.5)

    def make_head(self, config: Any, b: Builder) -> Head:
        cap = config.final_logit_softcapping or 0.0
        return b.head("lm_head", config.hidden_size, self.vocabulary, cap=cap)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        shared = [str(i) for i in range(config.num_hidden_layers) if config.shares_values(i)]
        pattern = rf"^layers\.({'|'.join(shared) or 'none'})\.self_attn\.k_proj\."
        return evolve(names, rewrite=(Rewrite(pattern, _key_and_value), *names.rewrite))

    def scaled(self, bias: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        return softcap(bias, cap) if cap else bias


def _key_and_value(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Load one weight as both the key and the value projection."""
    yield name, tensor
    yield name.replace("k_proj", "v_proj"), tensor


#: By the architecture of a head.
FAMILY_HEADS: Mapping[str, type[DFlashHead]] = {
    "DFlashLagunaForCausalLM": LagunaHead,
    "Gemma4DSparkModel": GemmaMarkovHead,
    "K3DSparkModel": LatentMarkovHead,
}
