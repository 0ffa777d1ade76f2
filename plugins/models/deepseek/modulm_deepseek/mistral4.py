"""Mistral Large 3 and Small 4 (Mistral, 2025 and 2026): DeepSeek's block with softmax routing, and
queries that grow with positions beyond the trained length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor

from modulm.contracts.model import Batch
from modulm.nn import Builder
from modulm_deepseek.deepseek_v2 import (
    DeepseekConfig,
    DeepseekForCausalLM,
    DeepseekLayer,
    latent_settings,
    tiny_deepseek,
)
from modulm_layers import LatentAttention, Rope, Routing, parse_rope, size

__all__ = ["Mistral4Config", "Mistral4ForCausalLM", "Mistral4Layer"]

_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@frozen(kw_only=True)
class Mistral4Config(DeepseekConfig):
    """config.json of Mistral Small 4; `llama_4_scaling_beta` is one of the rotary keys."""

    CHOICE_BIAS: ClassVar[bool] = False

    kv_lora_rank: int = size(256)
    qk_nope_head_dim: int = size(64)
    qk_rope_head_dim: int = size(64)
    v_head_dim: int = size(128)
    n_routed_experts: int = size(128)
    n_shared_experts: int | None = size(1)
    num_experts_per_tok: int = size(4)
    moe_intermediate_size: int = size(2048)
    max_position_embeddings: int = size(1048576)
    rope_parameters: dict[str, Any] | None = Factory(lambda: dict(_ROPE))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not isinstance(self.growth, int | float):
            raise ValueError(f"llama_4_scaling_beta: {self.growth!r} is not a number")

    @property
    def growth(self) -> float:
        """The growth factor of queries."""
        beta: float = (self.rope_parameters or {}).get("llama_4_scaling_beta", 0.0)
        return beta

    @property
    def routing(self) -> Routing:
        """Softmax over all experts; a group is scored by its two best ones."""
        return evolve(super().routing, scoring="softmax")

    def rope(self, layer_type: str = "") -> Rope:
        """Rotate all of `qk_rope_head_dim`; files state its part of a whole head."""
        table = dict(self.rope_scaling or self.rope_parameters or {})
        table.setdefault("rope_theta", self.rope_theta)
        if self.original_max_position_embeddings is not None:
            table["original_max_position_embeddings"] = self.original_max_position_embeddings
        return parse_rope(
            {**table, "partial_rotary_factor": 1.0},
            head_size=self.qk_rope_head_dim,
            max_positions=self.max_position_embeddings,
            neox=not self.rope_interleave,
        )


class GrowingLatentAttention(LatentAttention):
    """Latent attention whose queries are scaled by 1 + growth * log(1 + preceding spans)."""

    def __init__(self, c: Mistral4Config, b: Builder) -> None:
        super().__init__(b, **latent_settings(c))
        self.growth, self.span = c.growth, c.rope().original

    def attend(self, q: Tensor, k: Tensor, x: Tensor, compressed: Tensor, batch: Batch) -> Tensor:
        if self.growth:
            factor = 1 + self.growth * torch.log1p((batch.positions // self.span).float())
            q = q * factor[:, None, None].to(q.dtype)
        return super().attend(q, k, x, compressed, batch)


class Mistral4Layer(DeepseekLayer):
    """DeepSeek's pre-norm block."""

    def __init__(self, c: Mistral4Config, b: Builder, index: int) -> None:
        super().__init__(c, b, index, GrowingLatentAttention(c, b.at("self_attn")))


class Mistral4ForCausalLM(DeepseekForCausalLM):
    """Mistral Large 3 or Small 4 (text) with a language-model head."""

    api = 1
    config_type = Mistral4Config
    layer = Mistral4Layer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        rope = {**_ROPE, "factor": 16.0, "original_max_position_embeddings": 16}
        return tiny_deepseek(
            "mistral4",
            "Mistral4ForCausalLM",
            q_lora_rank=40,
            routed_scaling_factor=1.5,
            rope_parameters={**rope, "llama_4_scaling_beta": 0.3},
        )
