"""Phi 3.5 with experts (arXiv 2404.14219): layer norms, and two experts by sparse mixing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.nn import Builder, Head, Norm, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    MoE,
    PreNormLayer,
    Rope,
    Routing,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["PhimoeConfig", "PhimoeExperts", "PhimoeForCausalLM", "PhimoeLayer"]


@frozen(kw_only=True)
class PhimoeConfig(DecoderConfig):
    """config.json of Phi 3.5 with experts. Its rotary scaling has factors of cosines and sines for
    sequences up to the trained length and for longer ones.
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(131072)
    rope_theta: float = 1000000.0
    num_local_experts: int = size(16)
    num_experts_per_tok: int = size(2)
    router_jitter_noise: float = 0.01
    lm_head_bias: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_experts_per_tok != 2 or self.num_local_experts < 2:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok}: only 2 of 2 or more"
            )

    def rope_for(self, length: int) -> Rope:
        """Rotary positions for sequences of up to `length` tokens."""
        rope, table = self.rope(), self.rope_parameters or self.rope_scaling or {}
        key = "long_mscale" if length > rope.original else "short_mscale"
        factor = table.get(key)
        if rope.kind == "default" or factor is None:
            return rope
        if not isinstance(factor, int | float):
            raise ValueError(f"{key}: {factor!r} is not a number")
        return evolve(rope, attention_factor=float(factor))


class PhimoeExperts(MoE):
    """SparseMixer routing (Liu et al., arXiv 2409.12136): each choice is weighted by a softmax over
    the experts whose scores are within `noise` of the best remaining one.
    """

    def __init__(self, c: PhimoeConfig, b: Builder) -> None:
        super().__init__(
            b,
            hidden=c.hidden_size,
            inner=c.inner_size,
            experts=c.num_local_experts,
            routing=Routing(c.num_experts_per_tok),
            act=c.hidden_act,
            names=ExpertNames(gate="w1", up="w3", down="w2"),
        )
        self.noise = c.router_jitter_noise

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rest, chosen = logits.float(), []
        for _ in range(self.routing["top_k"]):
            chosen.append(rest.argmax(-1, keepdim=True))
            rest = rest.scatter(-1, chosen[-1], -torch.inf)
        ids = torch.cat(chosen, -1)
        return self.weigh(logits, ids), ids

    def weigh(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Weight each choice among those that are left after the ones before it."""
        scores = rest = logits.float()
        weights = []
        for one in ids.long().split(1, dim=-1):
            best = rest.gather(-1, one)
            far = (best - scores) / scores.abs().clamp(min=best) > 2 * self.noise
            near = rest.masked_fill(far, -torch.inf).softmax(-1)
            weights.append(near.gather(-1, one))
            rest = rest.scatter(-1, one, -torch.inf)
        return torch.cat(weights, -1)


class PhimoeLayer(PreNormLayer):
    """The pre-norm block with layer norms, and experts."""

    def __init__(self, c: PhimoeConfig, b: Builder, index: int) -> None:
        rope = c.rope_for(b.shared.max_length)
        super().__init__(
            b.layer_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, rope=rope),
            b.layer_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            PhimoeExperts(c, b.at("block_sparse_moe")),
        )


class PhimoeForCausalLM(DecoderForCausalLM):
    """Phi 3.5 with experts and a language-model head."""

    api = 1
    config_type = PhimoeConfig
    layer = PhimoeLayer
    #: Files contain the first name; the library's models, and adapters trained on them, the second.
    names = WeightNames(rename=((r"\.mlp\.", ".block_sparse_moe."),))

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("norm", config.hidden_size, config.rms_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied, bias = self.embed if config.tie_word_embeddings else None, config.lm_head_bias
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, bias=bias)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "phimoe",
            "PhimoeForCausalLM",
            num_local_experts=6,
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.3,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 256,
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.3 * i for i in range(8)],
            },
        )
