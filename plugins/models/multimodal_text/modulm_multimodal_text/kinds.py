"""Which native architecture a nested text model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["text_architecture"]

#: `model_type` of a text model that other models are built around, and what runs it. Only what
#: computes the same for text alone: models that let a prompt see itself in both directions
#: (PaliGemma) or that read images across layers (Mllama) are not here.
_TEXT: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
#: Files from before text models had a table of their own: all keys lie at the top.
_FLAT: Mapping[str, str] = {"qwen2_5_vl": "qwen2_5_vl_text", "qwen2_vl": "qwen2_vl_text"}


def text_architecture(config: Mapping[str, Any]) -> str | None:
    """The architecture of the text model inside config.json, None where no known one is."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        return _TEXT.get(str(nested.get("model_type", "llama")))
    return _TEXT.get(_FLAT.get(str(config.get("model_type")), ""))
