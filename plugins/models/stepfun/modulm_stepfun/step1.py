"""Step 1 (StepFun): Llama's block without rotary positions; scores fall with the root of the
distance, at ALiBi's slopes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch.nn import Module

from modulm.nn import Builder
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)
from modulm_layers.attention import alibi_slopes

__all__ = ["RootSlopes", "Step1Config", "Step1ForCausalLM", "Step1Layer"]


@frozen(kw_only=True)
class Step1Config(DecoderConfig):
    """config.json of Step 1; without `num_attention_groups` all heads share one key head."""

    ALIASES: ClassVar[Mapping[str, str]] = {"num_attention_groups": "num_key_value_heads"}

    num_key_value_heads: int | None = size(1)
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True


class RootSlopes(Module):
    """Score biases by distance: minus the head's slope times the root of the distance.

    table: [heads, positions] fp32.
    """

    def __init__(self, c: Step1Config, b: Builder) -> None:
        super().__init__()
        group = b.shared.mesh.tensor
        slopes = alibi_slopes(c.heads, group.rank, group.size)
        roots = torch.arange(c.max_length, dtype=torch.float32).sqrt()
        self.table = (-slopes[:, None] * roots).to(b.shared.device)


class Step1Layer(PreNormLayer):
    """The pre-norm block."""

    def __init__(self, c: Step1Config, b: Builder, index: int) -> None:
        changes = {"rope": None, "relative": RootSlopes(c, b)}
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, **changes),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class Step1ForCausalLM(DecoderForCausalLM):
    """Step 1 with a language-model head."""

    api = 1
    config_type = Step1Config
    layer = Step1Layer
    oracle = "modulm_stepfun.oracle:WithRoots"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        changes = {"num_attention_groups": 2, "tie_word_embeddings": False}
        table = tiny_config("step1", "Step1ForCausalLM", **changes)
        return {name: value for name, value in table.items() if name != "num_key_value_heads"}
