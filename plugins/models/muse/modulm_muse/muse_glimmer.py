"""Muse Glimmer (Meta, 2026), its text model: normed embeddings, a gate on attention, norms around
branches, and layers without positions among those with a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import Factory, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding, Head, RMSNorm, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    SandwichLayer,
    only,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["MuseGlimmerConfig", "MuseGlimmerForCausalLM", "MuseGlimmerLayer"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PERIOD = 4


def _layer_kinds(config: MuseGlimmerConfig) -> tuple[str, ...]:
    """By default every fourth layer, counted from the last, sees all tokens."""
    layers = config.num_hidden_layers
    return tuple(_SLIDING if (layers - 1 - i) % _PERIOD else _FULL for i in range(layers))


@frozen(kw_only=True)
class MuseGlimmerConfig(DecoderConfig):
    """config.json of Muse Glimmer's text model.

    layer_rope_theta: 0 for layers without positions, by default every fourth from the last.
    post_norm_eps: of the norms at the end of branches. qk_scale_factor multiplies queries,
    output_multiplier the logits before they are bounded.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"hidden_activation": "hidden_act"}

    head_dim: int | None = size(128)
    max_position_embeddings: int = size(131072)
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    sliding_window: int | None = size(2048)
    layer_types: tuple[str, ...] | None = Factory(_layer_kinds, takes_self=True)
    layer_rope_theta: tuple[float, ...] | None = None
    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    final_logit_softcapping: float | None = 20.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, attention_bias=(False,), mlp_bias=(False,))
        thetas, layers = self.layer_rope_theta, self.num_hidden_layers
        if thetas is not None and len(thetas) != layers:
            raise ValueError(f"layer_rope_theta: {len(thetas)} entries for {layers} layers")
        if set(self.layer_types or ()) - {_FULL, _SLIDING}:
            raise ValueError(f"layer_types: known are {_FULL}, {_SLIDING}")

    def rotates(self, index: int) -> bool:
        """Whether layer `index` knows positions."""
        if self.layer_rope_theta is not None:
            return bool(self.layer_rope_theta[index])
        return (self.num_hidden_layers - 1 - index) % _PERIOD != 0


class NormedEmbedding(Module):
    """An embedding whose vectors are normed, without a weight."""

    def __init__(self, c: MuseGlimmerConfig, b: Builder) -> None:
        super().__init__()
        self.table = b.embedding("embed_tokens", c.vocab_size, c.hidden_size)
        self.norm = RMSNorm(b.ops, c.rms_norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        """Embed the batch's tokens: [tokens, hidden]."""
        normed: Tensor = self.norm(self.table(batch))
        return normed


class MuseGlimmerLayer(SandwichLayer):
    """Attention with normed queries and keys and a gate; norms before and after each branch."""

    def __init__(self, c: MuseGlimmerConfig, b: Builder, index: int) -> None:
        def norm(name: str, eps: float) -> RMSNorm:
            return b.rms_norm(name, c.hidden_size, eps, offset=1.0)

        unit = RMSNorm(b.ops, c.rms_norm_eps)
        positions = {} if c.rotates(index) else {"rope": None}
        super().__init__(
            norm("input_layernorm", c.rms_norm_eps),
            standard_attention(
                c,
                b,
                index,
                qk_norm=(unit, unit),
                scale=c.qk_scale_factor * c.head_size**-0.5,
                gate="gate_proj",
                **positions,
            ),
            norm("post_attention_layernorm", c.post_norm_eps),
            norm("pre_feedforward_layernorm", c.rms_norm_eps),
            standard_mlp(c, b),
            norm("post_feedforward_layernorm", c.post_norm_eps),
        )


class MuseGlimmerForCausalLM(DecoderForCausalLM):
    """Muse Glimmer's text model with a language-model head."""

    api = 1
    config_type = MuseGlimmerConfig
    layer = MuseGlimmerLayer
    names = WeightNames(
        rename=((r"^(model\.)?language_model\.", "model."),),
        ignore=(r"^(model\.)?(vision_|perception_)", r"^model\.rotary_emb\."),
    )
    oracle = "modulm_muse.oracle:AsMuseGlimmer"

    def make_embedding(self, config: Any, b: Builder) -> Any:
        return NormedEmbedding(config, b)

    def make_head(self, config: Any, b: Builder) -> Head:
        embedding: Any = self.embed
        return b.head(
            "lm_head",
            config.hidden_size,
            config.vocab_size,
            tied=embedding.table if config.tie_word_embeddings else None,
            scale=config.output_multiplier,
            cap=config.final_logit_softcapping or 0.0,
        )

    def embeddings(self, tokens: Tensor) -> Tensor:
        table: Embedding = self.embed.table
        return table.lookup(tokens)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "muse_glimmer_text",
            "MuseGlimmerForCausalLM",
            num_hidden_layers=5,
            head_dim=24,
            sliding_window=12,
        )
