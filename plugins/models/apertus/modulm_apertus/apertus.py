"""Apertus (Swiss AI, arXiv 2509.14233): normed queries and keys, a learned activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from attrs import evolve, field, frozen, validators
from torch import Tensor
from torch.nn import Module

from modulm.nn import Builder, WeightNames
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    Rope,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["ApertusConfig", "ApertusForCausalLM", "ApertusLayer", "ApertusMLP"]

_BETA = 0.5
#: Default rotary scaling of its models, if the file has no rotary keys.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@frozen(kw_only=True)
class ApertusConfig(DecoderConfig):
    """config.json of Apertus."""

    hidden_act: str = field(default="xielu", validator=validators.in_(("xielu",)))
    max_position_embeddings: int = size(65536)
    rms_norm_eps: float = 1e-5
    rope_theta: float = 12000000.0

    def rope(self, layer_type: str = "") -> Rope:
        if not (self.rope_parameters or self.rope_scaling):
            return evolve(self, rope_parameters=_ROPE).rope(layer_type)
        return super().rope(layer_type)


class ApertusMLP(Module):
    """down(xielu(up(x))); the activation's two curvatures are stored before softplus."""

    alpha_p: Tensor
    alpha_n: Tensor

    def __init__(self, c: ApertusConfig, b: Builder) -> None:
        super().__init__()
        self.ops, self.constants = b.ops, (0.0, 0.0)
        self.up = b.linear("up_proj", c.hidden_size, c.inner_size)
        self.down = b.row_linear("down_proj", c.inner_size, c.hidden_size)
        b.parameters("act_fn", self, alpha_p=(1,), alpha_n=(1,))
        b.after(self, self._take_constants)

    def _take_constants(self) -> None:
        up, down = (F.softplus(x.double()).item() for x in (self.alpha_p, self.alpha_n))
        self.constants = (up, _BETA + down)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        out: Tensor = self.down(self.ops.activate(self.up(x), "xielu", self.constants))
        return out


def _attention(c: ApertusConfig, b: Builder, index: int) -> Attention:
    at = b.at("self_attn")
    norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in ("q_norm", "k_norm"))
    return standard_attention(c, b, index, qk_norm=norms)


class ApertusLayer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: ApertusConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("attention_layernorm", c.hidden_size, c.rms_norm_eps),
            _attention(c, b, index),
            b.rms_norm("feedforward_layernorm", c.hidden_size, c.rms_norm_eps),
            ApertusMLP(c, b.at("mlp")),
        )


class ApertusForCausalLM(DecoderForCausalLM):
    """Apertus with a language-model head. The file also holds the activation's constants."""

    api = 1
    config_type = ApertusConfig
    layer = ApertusLayer
    names = WeightNames(ignore=(r"act_fn\.(beta|eps)$",))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("apertus", "ApertusForCausalLM")
