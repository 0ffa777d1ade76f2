"""TeleChat 1 and 2 (China Telecom, arXiv 2401.03804): Llama's block with biases on outputs.

Keys and values are one tensor, ordered by head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from attrs import evolve, frozen
from torch import Tensor

from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    Rope,
    only,
    size,
    standard_attention,
    standard_mlp,
)

__all__ = ["TeleChat2Config", "TeleChat2ForCausalLM", "TeleChat2Layer"]


@frozen(kw_only=True)
class TeleChat2Config(DecoderConfig):
    """config.json of TeleChat 1 and 2.

    If the model was trained on longer texts (`training_seqlen`) than its base (`base_seqlen`), the
    rotary base and the scores grow for all positions. Longer texts would have other angles, so
    `training_seqlen` is the maximum length.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps",
        "seq_length": "max_position_embeddings",
    }

    max_position_embeddings: int = size(8192)
    rms_norm_eps: float = 1e-5
    base_seqlen: int | None = size(None)
    training_seqlen: int | None = size(None)
    apply_residual_connection_post_layernorm: bool = False
    embed_layernorm: bool = False
    logn: bool = False

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            apply_residual_connection_post_layernorm=(False,),
            embed_layernorm=(False,),
            logn=(False,),
        )

    def rope(self, layer_type: str = "") -> Rope:
        rope = super().rope(layer_type)
        growth = (self.training_seqlen or 1) / (self.base_seqlen or self.training_seqlen or 1)
        if growth <= 1:
            return rope
        stretch = max(2 ** math.ceil(math.log2(growth) + 1) - 1, 1)
        theta = rope.theta * stretch ** (rope.size / (rope.size - 2))
        return evolve(rope, theta=theta, attention_factor=1 + 0.1 * math.log(growth))

    @property
    def max_length(self) -> int:
        return min(super().max_length, self.training_seqlen or self.max_position_embeddings)


class TeleChat2Layer(PreNormLayer):
    """The pre-norm block; only the output projections have biases."""

    def __init__(self, c: TeleChat2Config, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_attention(c, b, index, out_bias=True),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b, down_bias=True),
        )


def _split(heads: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split keys and values that are stored head by head."""
    both = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    for index, part in enumerate(("k_proj", "v_proj")):
        yield name.replace("key_value", part), both[:, index].reshape(-1, *tensor.shape[1:])


class TeleChat2ForCausalLM(DecoderForCausalLM):
    """TeleChat 1 and 2 with a language-model head."""

    api = 1
    config_type = TeleChat2Config
    layer = TeleChat2Layer
    oracle = "modulm_telechat.oracle:AsLlama"

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return WeightNames(
            rename=(
                (r"^transformer\.", "model."),
                (r"\.h\.", ".layers."),
                (r"\.word_embeddings\.", ".embed_tokens."),
                (r"\.ln_f\.", ".norm."),
                (r"\.self_attention\.query\.", ".self_attn.q_proj."),
                (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
                (r"\.self_attention\.", ".self_attn."),
            ),
            rewrite=(Rewrite(r"\.key_value\.", partial(_split, config.kv_heads)),),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["TeleChat2ForCausalLM"],
            "model_type": "telechat",
            "vocab_size": 512,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "n_layer": 3,
            "n_head": 4,
            "num_key_value_heads": 2,
            "seq_length": 256,
            "layer_norm_epsilon": 1e-5,
        }
