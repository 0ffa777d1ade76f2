"""Gemma 4 for text (Google, 2026): each layer adds its own per-token vector.

The output of each layer is scaled. Some models have experts in addition to each feed-forward block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding, Head, Rewrite, WeightNames
from modulm_gemma4.attention import SharedKeyValues, attention, shared_names
from modulm_gemma4.config import Gemma4Config
from modulm_gemma4.inputs import LayerInputs
from modulm_layers import (
    DecoderForCausalLM,
    ExpertNames,
    MoE,
    Routing,
    activation,
    standard_mlp,
    tiny_config,
)

__all__ = ["Gemma4Experts", "Gemma4ForCausalLM", "Gemma4Layer"]


class Gemma4Experts(MoE):
    """Experts whose router reads the normed stream and which have a weight per expert."""

    expert_scale: Tensor

    def __init__(self, c: Gemma4Config, b: Builder) -> None:
        experts, hidden = c.num_experts or 0, c.hidden_size
        super().__init__(
            b,
            hidden=hidden,
            inner=c.moe_intermediate_size or 0,
            experts=experts,
            routing=Routing(c.top_k_experts or 0),
            act=c.hidden_activation,
            names=ExpertNames(router="router.proj"),
        )
        self.router_norm = b.rms_norm("router.norm", hidden, c.rms_norm_eps)
        self.router_scale = hidden**-0.5
        self.before = b.rms_norm("pre_feedforward_layernorm_2", hidden, c.rms_norm_eps)
        self.after = b.rms_norm("post_feedforward_layernorm_2", hidden, c.rms_norm_eps)
        name = "router.per_expert_scale"
        b.parameter(name, self, "expert_scale", (experts,), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden], the stream -> [tokens, hidden]."""
        seen = self.ops.scale(self.router_norm(x), self.router_scale)
        weights, ids = self.choose(self.router(seen))
        gate_up, down = self.gate_up, self.down
        mixed = self.fused_experts(
            self.before(x),
            weights,
            ids,
            gate_up.method.experts(gate_up),
            down.method.experts(down),
            **self.gate,
        )
        normed: Tensor = self.after(self.summed(mixed))
        return normed

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super().route(logits)
        return weights * self.expert_scale[ids], ids

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        return super().weigh(logits, ids) * self.expert_scale[ids]


class Gemma4Layer(Module):
    """norm, attention, norm, add; norm, feed-forward, norm, add; then the layer's own vector."""

    scalar: Tensor

    def __init__(self, c: Gemma4Config, b: Builder, index: int) -> None:
        super().__init__()
        hidden, eps, width = c.hidden_size, c.rms_norm_eps, c.hidden_size_per_layer_input
        borrows = index >= c.first_shared
        self.ops = b.ops
        self.attn_norm = b.rms_norm("input_layernorm", hidden, eps)
        self.attn = attention(c, b, index)
        self.attn_post = b.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp_norm = b.rms_norm("pre_feedforward_layernorm", hidden, eps)
        inner = c.inner_size * (2 if borrows and c.use_double_wide_mlp else 1)
        self.mlp = standard_mlp(c, b, inner=inner, act=c.hidden_activation)
        self.mlp_post = b.rms_norm("post_feedforward_layernorm", hidden, eps)
        self.experts = self.dense_post = self.gate = None
        if c.enable_moe_block:
            self.experts = Gemma4Experts(c, b)
            self.dense_post = b.rms_norm("post_feedforward_layernorm_1", hidden, eps)
        if width:
            self.gate = b.linear("per_layer_input_gate", hidden, width, split=False)
            self.widen = b.linear("per_layer_projection", width, hidden, split=False)
            self.own_post = b.rms_norm("post_per_layer_input_norm", hidden, eps)
            self.act = activation(c.hidden_activation, b.ops)
        b.parameter("layer_scalar", self, "scalar", (1,))

    def forward(
        self,
        x: Tensor,
        layer_input: Tensor | None,
        batch: Batch,
        shared: dict[str, SharedKeyValues],
    ) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]; layer_input: [tokens, width] or None."""
        x = self.ops.add(x, self.attn_post(self.attn(self.attn_norm(x), batch, shared)))
        x = self.ops.add(x, self.mlp_post(self._feed_forward(x)))
        if self.gate is not None and layer_input is not None:
            x = self.ops.add(x, self.own_post(self.widen(self.act(self.gate(x)) * layer_input)))
        return x * self.scalar

    def _feed_forward(self, x: Tensor) -> Tensor:
        dense: Tensor = self.mlp(self.mlp_norm(x))
        if self.experts is None or self.dense_post is None:
            return dense
        both: Tensor = self.ops.add(self.dense_post(dense), self.experts(x))
        return both


class Gemma4ForCausalLM(DecoderForCausalLM):
    """Gemma 4 (text) with a language-model head."""

    api = 1
    config_type = Gemma4Config
    layer = Gemma4Layer
    #: Tokens of media inside items; empty if items have no text between them.
    media_tokens: tuple[int, ...] = ()

    def __init__(self, config: Gemma4Config, build: Builder) -> None:
        super().__init__(config, build)
        b = build.at(self.root)
        self.inputs = LayerInputs(config, b) if config.hidden_size_per_layer_input else None
        self.takes_embeds = self.inputs is None

    @classmethod
    def weights(cls, config: Gemma4Config) -> WeightNames:
        kinds = range(config.num_hidden_layers)
        equal = [i for i in kinds if config.attention_k_eq_v and not config.window(i)]
        both = "|".join(map(str, equal)) or "none"
        return WeightNames(
            rename=((r"\.router\.scale$", ".router.norm.weight"),),
            ignore=shared_names(config),
            rewrite=(Rewrite(rf"layers\.({both})\.self_attn\.k_proj\.", _key_and_value),),
        )

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        hidden = config.hidden_size
        return b.embedding("embed_tokens", config.vocab_size, hidden, scale=hidden**0.5)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        cap = config.final_logit_softcapping or 0.0
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, cap=cap)

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.embed(batch)
        layer_inputs = self._layer_inputs(x, batch)
        shared: dict[str, SharedKeyValues] = {}
        for i, layer in enumerate(self.layers):
            x = layer(x, None if layer_inputs is None else layer_inputs[i], batch, shared)
        normed: Tensor = self.norm(x)
        return normed

    def _layer_inputs(self, x: Tensor, batch: Batch) -> tuple[Tensor, ...] | None:
        """Inputs by layer, [tokens, width] each; media tokens use the padding token's row.

        An item's embeddings may include those of text, such as the times of a video's frames.
        """
        if self.inputs is None:
            return None
        tokens, media = batch.tokens, batch.embeds_mask
        if media is not None:
            if self.media_tokens:
                media = media & torch.isin(tokens, tokens.new_tensor(self.media_tokens))
            tokens = tokens.masked_fill(media, self.config.pad_token_id or 0)
        return self.inputs(x, tokens).unbind(1)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "gemma4_text",
            "Gemma4ForCausalLM",
            num_hidden_layers=4,
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            vocab_size_per_layer_input=512,
            hidden_size_per_layer_input=8,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            moe_intermediate_size=32,
            final_logit_softcapping=10.0,
        )


def _key_and_value(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Load one weight as both the key and the value projection."""
    yield name, tensor
    yield name.replace("k_proj", "v_proj"), tensor
