"""GPT-Neo (Black et al., 2021), TinyStories: GPT-2's block; every other layer has a window.

Scores are not scaled by the square root of the head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.nn import Builder, WeightNames
from modulm_gpt2.gpt2 import GPT2Block, GPT2LMHeadModel
from modulm_layers import AttentionNames, DecoderConfig, size, standard_attention

__all__ = ["GPTNeoConfig", "GPTNeoForCausalLM", "GPTNeoLayer"]

_KINDS = ("global", "local")
_NAMES = AttentionNames(out="out_proj")


@frozen(kw_only=True)
class GPTNeoConfig(DecoderConfig):
    """config.json of GPT-Neo; `attention_types`: kinds of layers, and how often they repeat."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }

    intermediate_size: int | None = size(None)
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    window_size: int = size(256)
    attention_types: tuple[tuple[tuple[str, ...], int], ...] = ((("global", "local"), 12),)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        kinds = self._kinds()
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(
                f"attention_types: {len(kinds)} entries for {self.num_hidden_layers} layers"
            )
        if set(kinds) - set(_KINDS):
            raise ValueError(f"attention_types: kinds are {_KINDS}, got {sorted(set(kinds))}")

    def _kinds(self) -> list[str]:
        return [kind for kinds, times in self.attention_types for kind in kinds * times]

    def window(self, index: int) -> int | None:
        return self.window_size if self._kinds()[index] == "local" else None


class GPTNeoLayer(GPT2Block):
    """GPT-2's block; the projections into attention have no bias."""

    def __init__(self, c: GPTNeoConfig, b: Builder, index: int) -> None:
        settings = {"rope": None, "scale": 1.0, "out_bias": True, "names": _NAMES}
        attention = standard_attention(c, b, index, at="attn.attention", **settings)
        super().__init__(c, b, attention, c.layer_norm_eps)


class GPTNeoForCausalLM(GPT2LMHeadModel):
    """GPT-Neo with a language-model head; old files hold the masks as well."""

    config_type = GPTNeoConfig
    layer = GPTNeoLayer
    names = WeightNames(
        rename=((r"^transformer\.h\.", "transformer.layers."),), ignore=(r"attention\.bias$",)
    )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["GPTNeoForCausalLM"],
            "model_type": "gpt_neo",
            "vocab_size": 512,
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "max_position_embeddings": 256,
            "window_size": 12,
            "attention_types": [[["global", "local"], 2]],
        }
