"""Ovis 2 in the format that AIDC publishes it in (arXiv 2405.20797)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen
from torch import Tensor

from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Rewrite, WeightNames, read_config
from modulm_ovis.ovis2 import Ovis2Config, Ovis2ForConditionalGeneration
from modulm_towers import TextConfig, flat_patches, tiny_text

__all__ = ["INDICATORS", "OvisConfig", "OvisForCausalLM"]

#: Indicators in the order of the last words of the visual vocabulary: the end of an image, of a row
#: and of a tile, before tiles, and the start. They have no ids in the text's vocabulary.
INDICATORS = (-5, -4, -3, -2, -1)
_LAYERS = r"^vision_tower\.transformer\.encoder\.layers\.(\d+)\."
_INTO = r"vision_tower.transformer.encoder.layers.\1."
_RENAME = (
    (r"^llm\.", ""),
    (r"^vte\.weight$", "visual_embeddings_table.weight"),
    (r"^visual_tokenizer\.head\.0\.", "vision_tower.head_linear."),
    (r"^visual_tokenizer\.head\.1\.", "vision_tower.head_norm."),
    (
        r"^visual_tokenizer\.backbone\.preprocessor\.patchifier\.proj\.",
        "vision_tower.transformer.embeddings.patch_embedding.",
    ),
    (
        r"^visual_tokenizer\.backbone\.preprocessor\.patchifier\.norm\.",
        "vision_tower.transformer.embeddings.rms_norm.",
    ),
    (
        r"^visual_tokenizer\.backbone\.preprocessor\.pos_embed$",
        "vision_tower.transformer.embeddings.position_embedding.weight",
    ),
    (r"^visual_tokenizer\.backbone\.trunk\.blocks\.", "vision_tower.transformer.encoder.layers."),
    (_LAYERS + r"norm_(\d)\.", _INTO + r"rms_norm\2."),
    (_LAYERS + r"attn\.qkv\.", _INTO + "attention.qkv_proj."),
    (_LAYERS + r"attn\.proj\.", _INTO + "attention.out_proj."),
    (_LAYERS + r"mlp\.fc1\.", _INTO + "ffn.gate_proj."),
    (_LAYERS + r"mlp\.fc3\.", _INTO + "ffn.up_proj."),
    (_LAYERS + r"mlp\.fc2\.", _INTO + "ffn.down_proj."),
)


def _square(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Learned positions of one image: [1, patches, hidden] -> [patches, hidden]."""
    return [(name, tensor.reshape(-1, tensor.shape[-1]))]


@frozen(eq=False, kw_only=True)
class OvisConfig(Ovis2Config):
    """config.json of Ovis 2 as published."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text = table.get("llm_config") or table.get("text_config")
        vision = table.get("visual_tokenizer_config")
        inner = vision.get("backbone_config") if isinstance(vision, Mapping) else None
        for key, part in (
            ("llm_config", text), ("visual_tokenizer_config", vision), ("backbone_config", inner)
        ):  # fmt: skip
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{file}: {key}: must be a table")
        vision, inner = vision or {}, inner or {}
        if (kind := inner.get("model_type", "aimv2")) not in ("aimv2", "aimv2_vision_model"):
            raise UnsupportedError(
                f"{file}: backbone_config.model_type: not supported yet: {kind!r}"
            )
        # The files' own keys of AIMv2 for the biases.
        keys = {"mlp_bias": inner.get("use_bias", False), **inner}
        keys |= {
            key: vision[key] for key in ("hidden_stride", "tokenize_function") if key in vision
        }
        keys["vocab_size"] = vision.get("vocab_size", 16384)
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            vision=read_config(keys, cls.vision_type, file),
            indicators=INDICATORS,
        )


class OvisForCausalLM(Ovis2ForConditionalGeneration):
    """Ovis 2 as published; the words come from states before AIMv2's last norm."""

    config_type: ClassVar[type] = OvisConfig
    normed = False

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        text: WeightNames = config.text.driver.weights(config.text.text)
        return evolve(
            text,
            rename=(*_RENAME, *text.rename),
            ignore=(
                r"^visual_tokenizer\.backbone\.trunk\.post_trunk_norm\.",
                r"^vision_tower\.transformer\.rms_norm\.", *text.ignore,
            ),
            rewrite=(
                flat_patches(r"\.patch_embedding\.weight$"),
                Rewrite(r"\.position_embedding\.weight$", _square), *text.rewrite,
            ),
        )  # fmt: skip

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        vision = super().tiny()["vision_config"]
        outer = ("model_type", "vocab_size", "hidden_stride", "num_visual_indicator_tokens")
        backbone = {key: value for key, value in vision.items() if key not in outer}
        return {
            "architectures": ["Ovis"],
            "model_type": "ovis",
            "hidden_size": 64,
            "llm_config": {**tiny_text("qwen2"), "tie_word_embeddings": False},
            "visual_tokenizer_config": {
                "model_type": "aimv2_visual_tokenizer",
                "vocab_size": vision["vocab_size"],
                "hidden_stride": vision["hidden_stride"],
                "tokenize_function": "softmax",
                "backbone_config": {
                    **backbone,
                    "model_type": "aimv2",
                    "qkv_bias": False,
                    "use_bias": False,
                },
            },
        }
