"""gpt-oss (arXiv 2508.10925): attention sinks, alternating windows, experts with a clamped SwiGLU.

Files store experts as [expert, inputs, outputs] with gate and up in alternating columns, which are
transposed during loading. In MXFP4, which has its own quantization method, they store rows of
blocks and scales, with gate and up alternating too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    Gate,
    MoE,
    PreNormLayer,
    Routing,
    size,
    standard_attention,
    tiny_config,
    transpose,
)

__all__ = ["GptOssConfig", "GptOssForCausalLM", "GptOssLayer"]

_NAMES = ExpertNames(
    router="router",
    gate_up_bias="experts.gate_up_proj_bias",
    down_bias="experts.down_proj_bias",
)


@frozen(kw_only=True)
class GptOssConfig(DecoderConfig):
    """config.json of gpt-oss; without layer types even layers have the window."""

    rms_norm_eps: float = 1e-5
    head_dim: int | None = size(64)
    attention_bias: bool = True
    sliding_window: int | None = size(128)
    max_position_embeddings: int = size(131072)
    num_local_experts: int = size()
    num_experts_per_tok: int = size(4)
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def layer_type(self, index: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[index]
        return "full_attention" if index % 2 else "sliding_attention"


class GptOssLayer(PreNormLayer):
    """The pre-norm block with sinks and experts."""

    def __init__(self, c: GptOssConfig, b: Builder, index: int) -> None:
        experts = MoE(
            b.at("mlp"),
            hidden=c.hidden_size,
            inner=c.intermediate_size,
            experts=c.num_local_experts,
            routing=Routing(c.num_experts_per_tok),
            act=Gate("clamped_swiglu", c.swiglu_alpha, c.swiglu_limit),
            router_bias=True,
            names=_NAMES,
        )
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, sinks=True),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            experts,
        )


def _part_pairs(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Split alternating rows into gate and up."""
    yield name, torch.cat([tensor[:, ::2], tensor[:, 1::2]], dim=1)


def _turn_pairs(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Split alternating columns into gate and up, transposed."""
    return _part_pairs(name, tensor.transpose(-1, -2))


class GptOssForCausalLM(DecoderForCausalLM):
    """gpt-oss with a language-model head."""

    api = 1
    config_type = GptOssConfig
    layer = GptOssLayer
    names = WeightNames(
        rename=((r"_(blocks|scales)$", r".\1"),),
        rewrite=(
            Rewrite(r"experts\.gate_up_proj$", _turn_pairs),
            Rewrite(r"experts\.gate_up_proj(_bias|\.blocks|\.scales)$", _part_pairs),
            Rewrite(r"experts\.down_proj$", transpose),
        ),
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "gpt_oss",
            "GptOssForCausalLM",
            head_dim=16,
            sliding_window=12,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        )
