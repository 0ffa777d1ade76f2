"""StarCoder and SantaCoder (arXiv 2305.06161, 2301.03988): GPT-2's block with one key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Rewrite, WeightNames
from modulm_gpt2.gpt2 import GPT2Config, GPT2LMHeadModel
from modulm_layers import split_heads

__all__ = ["GPTBigCodeConfig", "GPTBigCodeForCausalLM"]


@frozen(kw_only=True)
class GPTBigCodeConfig(GPT2Config):
    """config.json of StarCoder, with GPT-2's key names."""

    hidden_act: str = "gelu_pytorch_tanh"
    multi_query: bool = True

    @property
    def kv_heads(self) -> int:
        return 1 if self.multi_query else self.num_attention_heads


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """StarCoder with a language-model head; old files hold the masks as well."""

    config_type = GPTBigCodeConfig

    @classmethod
    def weights(cls, config: GPTBigCodeConfig) -> WeightNames:
        split = Rewrite(r"c_attn", split_heads(config.heads, config.heads))
        return WeightNames(
            rename=((r"^transformer\.h\.", "transformer.layers."),),
            ignore=(r"\.attn\.bias$", r"^transformer\.bias$"),
            rewrite=() if config.multi_query else (split,),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["GPTBigCodeForCausalLM"],
            "model_type": "gpt_bigcode",
            "vocab_size": 512,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
        }
