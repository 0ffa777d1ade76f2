"""ChatGLM 2 and 3, and the first files of GLM 4 (arXiv 2406.12793): GLM 4 under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import field, frozen

from modulm.nn import Builder, WeightNames
from modulm_glm.glm import GlmConfig, GlmForCausalLM
from modulm_layers import (
    AttentionNames,
    PreNormLayer,
    Rope,
    only,
    parse_rope,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = ["ChatGLMConfig", "ChatGLMForCausalLM", "ChatGLMLayer"]


@frozen(kw_only=True)
class ChatGLMConfig(GlmConfig):
    """config.json of ChatGLM; `rope_ratio` multiplies the rotary base.

    Without `multi_query_attention` each query head has a key head.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "padded_vocab_size": "vocab_size",
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "multi_query_group_num": "num_key_value_heads",
        "seq_length": "max_position_embeddings",
        "layernorm_epsilon": "rms_norm_eps",
        "add_qkv_bias": "attention_bias",
    }

    rms_norm_eps: float = 1e-5
    multi_query_attention: bool = True
    rope_ratio: float = 1.0
    add_bias_linear: bool = False
    apply_residual_connection_post_layernorm: bool = False
    post_layer_norm: bool = True
    rmsnorm: bool = True
    original_rope: bool = True
    pre_seq_len: int | None = size(None)
    vision_config: dict[str, Any] | None = field(default=None)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            add_bias_linear=(False,),
            apply_residual_connection_post_layernorm=(False,),
            post_layer_norm=(True,),
            rmsnorm=(True,),
            original_rope=(True,),
            pre_seq_len=(None,),
        )
        if self.vision_config:
            raise ValueError("vision_config: not supported yet: images (GLM-4V in its first files)")

    @property
    def kv_heads(self) -> int:
        return super().kv_heads if self.multi_query_attention else self.num_attention_heads

    def rope(self, layer_type: str = "") -> Rope:
        table = {
            "rope_theta": self.rope_theta * self.rope_ratio,
            "partial_rotary_factor": self.partial_rotary_factor,
        }
        return parse_rope(
            table,
            head_size=self.head_size,
            max_positions=self.max_position_embeddings,
            neox=self.ROPE_NEOX,
        )


class ChatGLMLayer(PreNormLayer):
    """The pre-norm block; queries, keys and values are stored as one tensor, gate and up as
    another.
    """

    def __init__(self, c: ChatGLMConfig, b: Builder, index: int) -> None:
        names = AttentionNames(out="dense", qkv="query_key_value")
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, at="self_attention", out_bias=False, names=names),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b, fused="dense_h_to_4h", down="dense_4h_to_h"),
        )


class ChatGLMForCausalLM(GlmForCausalLM):
    """ChatGLM with a language-model head."""

    config_type = ChatGLMConfig
    layer = ChatGLMLayer
    oracle = "modulm_glm.oracle:ChatGLMAsGlm"
    names = WeightNames(
        rename=(
            (r"^transformer\.embedding\.word_embeddings\.", "model.embed_tokens."),
            (r"^transformer\.encoder\.final_layernorm\.", "model.norm."),
            (r"^transformer\.encoder\.", "model."),
            (r"^transformer\.output_layer\.", "lm_head."),
        ),
        ignore=(r"rotary_pos_emb\.inv_freq$",),
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        common = tiny_config("chatglm", "ChatGLMModel")
        kept = ("architectures", "model_type", "hidden_size", "num_attention_heads")
        return {
            **{key: common[key] for key in kept},
            "padded_vocab_size": 512,
            "num_layers": 3,
            "ffn_hidden_size": 96,
            "kv_channels": 24,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 256,
            "layernorm_epsilon": 1e-5,
            "add_qkv_bias": True,
            "rope_ratio": 3.0,
        }
