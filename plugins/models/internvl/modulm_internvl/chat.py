"""InternVL in the format that it is published in (OpenGVLab), which derivatives use too.

config.json has `llm_config` for the text model, and the encoder's keys of the first release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from attrs import evolve, frozen

from modulm.errors import CheckpointError
from modulm.nn import WeightNames, read_config
from modulm_internvl.internvl import InternVLConfig, InternVLForConditionalGeneration
from modulm_layers import only
from modulm_towers import TextConfig, flat_patches, tiny_text

__all__ = ["InternVLChatConfig", "InternVLChatModel", "QianfanOCRForConditionalGeneration"]

#: The encoder's keys, and what transformers calls them.
_VISION = {
    "qkv_bias": "attention_bias",
    "qk_normalization": "use_qk_norm",
}
_LAYERS = (
    (r"^(vision_tower\.encoder\.layer\.\d+)\.attn\.qkv\.", r"\1.attention.qkv_proj."),
    (r"^(vision_tower\.encoder\.layer\.\d+)\.attn\.proj\.", r"\1.attention.projection_layer."),
    (r"^(vision_tower\.encoder\.layer\.\d+)\.attn\.", r"\1.attention."),
    (r"^(vision_tower\.encoder\.layer\.\d+)\.norm1\.", r"\1.layernorm_before."),
    (r"^(vision_tower\.encoder\.layer\.\d+)\.norm2\.", r"\1.layernorm_after."),
    (r"^(vision_tower\.encoder\.layer\.\d+)\.ls(\d)$", r"\1.lambda_\2"),
)
_RENAME = (
    (r"^vision_model\.", "vision_tower."),
    (r"^vision_tower\.embeddings\.class_embedding$", "vision_tower.embeddings.cls_token"),
    (
        r"^vision_tower\.embeddings\.patch_embedding\.",
        "vision_tower.embeddings.patch_embeddings.projection.",
    ),
    (
        r"^vision_tower\.embeddings\.position_embedding$",
        "vision_tower.embeddings.position_embeddings",
    ),
    (r"^vision_tower\.encoder\.layers\.", "vision_tower.encoder.layer."),
    *_LAYERS,
    (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."),
    (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
    (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
    # InternLM2's head.
    (r"^language_model\.output\.", "output."),
)


@frozen(kw_only=True)
class _Keys:
    """Top-level keys. ps_version: how patches of a token are ordered."""

    downsample_ratio: float = 0.5
    select_layer: int = -1
    ps_version: str = "v2"
    projector_hidden_act: str = "gelu"

    def __attrs_post_init__(self) -> None:
        only(self, select_layer=(-1,), ps_version=("v2",))


@frozen(eq=False, kw_only=True)
class InternVLChatConfig(InternVLConfig):
    """config.json of the published format."""

    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        parts = {key: table.get(key) for key in ("llm_config", "vision_config")}
        for key, part in parts.items():
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{file}: {key}: must be a table")
        text = {**table, "text_config": parts["llm_config"]}
        vision = {
            _VISION.get(key, key): value for key, value in (parts["vision_config"] or {}).items()
        }
        side = table.get("force_image_size") or vision.get("image_size", 448)
        patch = vision.get("patch_size", 14)
        vision |= {"image_size": [side] * 2, "patch_size": [patch] * 2}
        # What transformers has under these names is the opposite, or not in these files.
        vision = {k: v for k, v in vision.items() if k not in ("use_mean_pooling",)}
        return cls(
            text=TextConfig.from_table(text, file, cls.text_ignored),
            vision=read_config(vision, cls.vision_type, file),
            top_level=read_config(dict(table), _Keys, file),
        )


class InternVLChatModel(InternVLForConditionalGeneration):
    """InternVL 2 to 3.5, and Skywork R1V, as published."""

    config_type: ClassVar[type] = InternVLChatConfig
    names = WeightNames(
        rename=_RENAME, rewrite=(flat_patches(r"patch_embeddings\.projection\.weight$"),)
    )

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=(*cls.names.rename, *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["InternVLChatModel"],
            "model_type": "internvl_chat",
            "downsample_ratio": 0.5,
            "force_image_size": 28,
            "max_dynamic_patch": 4,
            "min_dynamic_patch": 1,
            "ps_version": "v2",
            "select_layer": -1,
            "use_thumbnail": True,
            "llm_config": {**tiny_text("qwen2"), "tie_word_embeddings": False},
            "vision_config": {
                "model_type": "intern_vit_6b",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
                "qkv_bias": True,
                "qk_normalization": False,
                "norm_type": "layer_norm",
                "hidden_act": "gelu",
                "layer_norm_eps": 1e-6,
            },
        }


class QianfanOCRForConditionalGeneration(InternVLForConditionalGeneration):
    """Qianfan-OCR: images only, transformers' keys in config.json before the published weights.

    transformers writes its text model's layers under the encoder's name.
    """

    media = ("image",)
    names = WeightNames(
        rename=(
            (r"^language_model\.model\.encoder\.", "language_model.model."),
            *_RENAME,
            (r"^(?:model\.)?vision_tower\.layers\.", "vision_tower.encoder.layer."),
        ),
        rewrite=InternVLForConditionalGeneration.names.rewrite,
    )

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=(*cls.names.rename, *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = super().tiny()
        vision = {"model_type": "qianfan_ocr_vision", "use_qk_norm": True, "drop_path_rate": 0.0}
        return {
            **table,
            "architectures": ["QianfanOCRForConditionalGeneration"],
            "model_type": "qianfan_ocr",
            "text_config": tiny_text("qwen3", head_dim=16),
            "vision_config": {**table["vision_config"], **vision},
        }
