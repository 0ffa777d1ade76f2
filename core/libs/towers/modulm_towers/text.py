"""The text model of a multimodal checkpoint, run by that text model's own plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import read_config
from modulm.plugins import current

__all__ = ["TEXT_NAMES", "TextConfig", "complete_config", "text_architecture"]

#: Weight prefixes of text models in files, and those their own plugins expect.
TEXT_NAMES = (
    (r"^language_model\.(model|lm_head)\.", r"\1."),
    (r"^model\.(language_model|text_model)\.", "model."),
)
#: `model_type` of a text model inside other models, and the architecture that runs it.
_TEXT: Mapping[str, str] = {
    "PanguEmbedded": "PanguEmbeddedForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cosmos3_edge_text": "ArceeForCausalLM",
    "deepseek_ocr2_text": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "llama_bidirec": "LlamaBidirectionalModel",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
    "modernbert": "ModernBertModel",
    "nemotron_h": "NemotronHForCausalLM",
    "opt": "OPTForCausalLM",
    "paddleocr_vl_text": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi4_multimodal": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "step3_text": "Step3TextForCausalLM",
    "ultrabert": "UltrabertModel",
}
#: Model types whose files have, or once had, the text model's keys at the top level.
_FLAT: Mapping[str, str] = {
    "phi4_multimodal": "phi4_multimodal",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
}


def text_architecture(config: Mapping[str, Any]) -> str | None:
    """Architecture of the text model inside config.json, None if it is unknown."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        return _TEXT.get(str(nested.get("model_type", "llama")))
    return _TEXT.get(_FLAT.get(str(config.get("model_type")), ""))


@frozen(eq=False)
class TextConfig:
    """The text model's driver and configuration, completed with transformers' defaults.

    Checkpoint files omit values that are defaults of the text model's class in transformers.
    has_own_quantization: whether `quantization_config` is inside the text model's table, not at the
    top level.
    """

    driver: Any
    text: Any
    name: str
    has_own_quantization: bool = False

    @classmethod
    def from_table(
        cls, table: Mapping[str, Any], file: str, ignored: Sequence[str] = ()
    ) -> TextConfig:
        """Read the text model's configuration.

        ignored: keys that the text model does not get. Raises UnsupportedError for a text model
        without a plugin, CheckpointError for values that transformers or the plugin rejects.
        """
        name, text = str(table["architectures"][0]), text_architecture(table)
        if text is None:
            raise UnsupportedError(f"{name}: no plugin provides its text model")
        driver = current().load("models", text)
        settings = {k: v for k, v in _text_table(name, table, file).items() if k not in ignored}
        nested = table.get("text_config") or {}
        own_quantization = "quantization_config" in nested and "quantization_config" not in table
        return cls(driver, read_config(settings, driver.config_type, file), name, own_quantization)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return int(self.text.vocab_size)

    @property
    def max_length(self) -> int:
        """Maximum sequence length in tokens."""
        return int(self.text.max_length)

    @property
    def sliding_window(self) -> int | None:
        """The text model's attention window in tokens."""
        window: int | None = self.text.sliding_window
        return window


def complete_config(name: str, table: Mapping[str, Any], file: str) -> Any:
    """config.json as transformers' configuration of the architecture; None if it has none.

    The configuration of a classifier that transformers lacks is its family's. Raises
    CheckpointError for values that transformers rejects.
    """
    import transformers

    writes = name.replace("ForSequenceClassification", "ForConditionalGeneration")
    model = getattr(transformers, name, None) or getattr(transformers, writes, None)
    if model is None:
        return None
    try:
        # Infinity, which JSON lacks, is an object in files that transformers wrote.
        return model.config_class.from_dict(model.config_class._decode_special_floats(table))
    except Exception as error:
        raise CheckpointError(f"{file}: {error}") from error


def _text_table(name: str, table: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """The text model's keys, completed with defaults."""
    whole = complete_config(name, table, file)
    if whole is None:
        nested: Mapping[str, Any] = table.get("text_config", table)
        return nested
    values: dict[str, Any] = whole.get_text_config().to_dict()
    if "tie_word_embeddings" in table:
        values["tie_word_embeddings"] = table["tie_word_embeddings"]
    return values
