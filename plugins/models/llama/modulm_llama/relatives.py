"""Models with Llama's computation under other names: InternLM 1 and 3, IQuest-Coder, TeleChat 3,
fairseq2's Llama.

Aquila and XVERSE are aliases of `LlamaForCausalLM`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder, WeightNames
from modulm_layers import PreNormLayer, Rope, only, parse_rope, standard_attention, standard_mlp
from modulm_llama.llama import LlamaConfig, LlamaForCausalLM

__all__ = [
    "Fairseq2LlamaForCausalLM",
    "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM",
    "InternLMForCausalLM",
    "TeleChat3ForCausalLM",
]

_TELECHAT_YARN = "telechat3-yarn"


@frozen(kw_only=True)
class InternLMConfig(LlamaConfig):
    """config.json of InternLM 1: `bias` is that of all projections in attention."""

    ALIASES: ClassVar[Mapping[str, str]] = {"bias": "attention_bias"}

    attention_bias: bool = True


class InternLMForCausalLM(LlamaForCausalLM):
    """InternLM 1 with a language-model head."""

    config_type = InternLMConfig


@frozen(kw_only=True)
class InternLM3Config(LlamaConfig):
    """config.json of InternLM 3.

    `qkv_bias` is that of queries, keys and values; `bias` that of all other projections.
    transformers calls them `attention_bias` and `mlp_bias`.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}

    rms_norm_eps: float = 1e-5


class InternLM3Layer(PreNormLayer):
    """The pre-norm block; the output projection of attention has the bias of the others."""

    def __init__(self, c: InternLM3Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, out_bias=c.mlp_bias),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class InternLM3ForCausalLM(LlamaForCausalLM):
    """InternLM 3 with a language-model head."""

    config_type = InternLM3Config
    layer = InternLM3Layer


@frozen(kw_only=True)
class Fairseq2LlamaConfig(LlamaConfig):
    """config.json of Llama in fairseq2's files, whose heads rotate neighbouring dimensions."""

    ROPE_NEOX = False


class Fairseq2LlamaForCausalLM(LlamaForCausalLM):
    """Llama in fairseq2's files with a language-model head."""

    config_type = Fairseq2LlamaConfig
    names = WeightNames(
        rename=(
            (r"^decoder_frontend\.embed\.", "model.embed_tokens."),
            (r"^decoder\.layer_norm\.", "model.norm."),
            (r"^decoder\.", "model."),
            (r"^final_proj\.", "lm_head."),
            (r"\.self_attn_layer_norm\.", ".input_layernorm."),
            (r"\.ffn_layer_norm\.", ".post_attention_layernorm."),
            (r"\.self_attn\.output_proj\.", ".self_attn.o_proj."),
            (r"\.ffn\.gate_proj\.", ".mlp.gate_proj."),
            (r"\.ffn\.inner_proj\.", ".mlp.up_proj."),
            (r"\.ffn\.output_proj\.", ".mlp.down_proj."),
        )
    )
    oracle = "modulm_llama.oracle:FromFairseq2"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["Fairseq2LlamaForCausalLM"], "rope_scaling": None}
        return {**super().tiny(), **names}


@frozen(kw_only=True)
class IQuestCoderConfig(LlamaConfig):
    """config.json of IQuest-Coder. Files name settings that no published model uses; those are
    rejected.
    """

    rms_norm_eps: float = 1e-5
    clip_qkv: float | None = None
    use_sliding_window: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, clip_qkv=(None,), use_sliding_window=(False,))

    def window(self, index: int) -> int | None:
        return None


class IQuestCoderForCausalLM(LlamaForCausalLM):
    """IQuest-Coder with a language-model head."""

    config_type = IQuestCoderConfig


@frozen(kw_only=True)
class TeleChat3Config(LlamaConfig):
    """config.json of TeleChat 3, whose YaRN scales cosines and sines by 1 + 0.07 ln(factor)."""

    def rope(self, layer_type: str = "") -> Rope:
        table = dict(self.rope_scaling or self.rope_parameters or {})
        kind = table.get("rope_type", table.get("type"))
        if kind != _TELECHAT_YARN:
            return super().rope(layer_type)
        factor = table.get("factor")
        if not isinstance(factor, int | float) or factor <= 0:
            raise ValueError(f"factor: a number above zero is needed, got {factor!r}")
        grown = 1 + 0.07 * math.log(factor) if factor > 1 else 1.0
        yarn = {"rope_theta": self.rope_theta, **table, "rope_type": "yarn"}
        return parse_rope(
            {**yarn, "attention_factor": grown * table.get("attn_factor", 1.0)},
            head_size=self.head_size,
            max_positions=self.max_position_embeddings,
        )


class TeleChat3ForCausalLM(LlamaForCausalLM):
    """TeleChat 3 with a language-model head."""

    config_type = TeleChat3Config
