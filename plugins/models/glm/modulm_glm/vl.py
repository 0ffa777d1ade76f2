"""GLM-4.1V, 4.5V and 4.6V (arXiv 2507.01006): GLM's text models with images of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_glm.moe import Glm4MoeForCausalLM
from modulm_glm.vision import GlmTower, GlmTowerConfig
from modulm_towers import MultimodalConfig, MultimodalModel, Pieces, flat_patches, tiny_text

__all__ = [
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "GlmOcrConfig",
    "GlmOcrForConditionalGeneration",
    "GlmVConfig",
]

_TOWER: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "num_heads": 2,
    "image_size": 20,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


@frozen(eq=False, kw_only=True)
class GlmVConfig(MultimodalConfig):
    """config.json of GLM-V. By default heads divide the hidden size and are fully rotated."""

    vision_type: ClassVar[type] = GlmTowerConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Parse the table. Raises CheckpointError, UnsupportedError."""
        text = dict(table.get("text_config") or {})
        hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            text.setdefault("head_dim", hidden // heads)
        return super().from_table({**table, "text_config": text}, file)


@frozen(eq=False, kw_only=True)
class GlmOcrConfig(GlmVConfig):
    """config.json of GLM-OCR, whose text model's attention has no biases."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Parse the table. Raises CheckpointError, UnsupportedError."""
        config = super().from_table(table, file)
        text = evolve(config.text.text, attention_bias=False)
        return evolve(config, text=evolve(config.text, text=text))


class Glm4vForConditionalGeneration(MultimodalModel):
    """GLM-4.1V."""

    api = 1
    config_type: ClassVar[type] = GlmVConfig
    axes = 3
    media = ("image", "video")
    names = WeightNames(
        rewrite=(
            flat_patches(r"patch_embed\.proj\.weight$"),
            Rewrite(r"\.downsample\.weight$", lambda name, tensor: [(name, _square(tensor))]),
        )
    )
    tower: GlmTower

    def make_encoders(self, config: GlmVConfig, b: Builder) -> None:
        self.tower = GlmTower(config.vision, b.at("visual"))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, grids = [], []
        for item in items:
            video = item.kind == "video"
            pixels.append(self.tensor(item, "pixel_values_videos" if video else "pixel_values"))
            grids.append(item.tensors[f"{item.kind}_grid_thw"].reshape(-1, 3).tolist())
        flat = [grid for some in grids for grid in some]
        tokens = yield from self.tower.run(torch.cat(pixels), flat)
        merged = self.config.vision.spatial_merge_size**2
        return tokens.split([sum(t * h * w for t, h, w in some) // merged for some in grids])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("Glm4vForConditionalGeneration", "glm4v", tiny_text("glm4v_text"))


class Glm46VForConditionalGeneration(Glm4vForConditionalGeneration):
    """GLM-4.6V, which has the same parts; dense and with experts."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("Glm46VForConditionalGeneration", "glm46v", tiny_text("glm4v_text"))


class GlmOcrForConditionalGeneration(Glm4vForConditionalGeneration):
    """GLM-OCR: a small text model. The layer behind its last one drafts (`mtp`)."""

    config_type = GlmOcrConfig

    def make_encoders(self, config: GlmVConfig, b: Builder) -> None:
        self.tower = GlmTower(config.vision, b.at("visual"), ocr=True)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        behind = rf"^model\.layers\.{config.text.text.num_hidden_layers}\."
        return evolve(names, ignore=(behind, *names.ignore))

    @classmethod
    def mtp(cls, config: Any) -> MtpLayer | None:
        text, layer = config.text.text, config.text.driver.layer
        at = f"model.layers.{text.num_hidden_layers}"
        return MtpLayer(
            layer=lambda b: layer(text, b, 0),
            at=at,
            hidden=text.hidden_size,
            eps=text.rms_norm_eps,
            embedding_norm=f"{at}.enorm",
            hidden_norm=f"{at}.hnorm",
            project=f"{at}.eh_proj",
            norm=f"{at}.shared_head.norm",
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = _tiny("GlmOcrForConditionalGeneration", "glm_ocr", tiny_text("glm_ocr_text"))
        return {**table, "vision_config": {**_TOWER, "attention_bias": True}}


class Glm4vMoeForConditionalGeneration(Glm4vForConditionalGeneration):
    """GLM-4.5V: with experts."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        experts = dict(Glm4MoeForCausalLM.tiny())
        keys = {key for key in experts if key.startswith(("n_", "num_experts", "moe_", "topk_"))}
        text = tiny_text("glm4v_moe_text", attention_bias=True, **{k: experts[k] for k in keys})
        return _tiny("Glm4vMoeForConditionalGeneration", "glm4v_moe", text)


def _square(tensor: Tensor) -> Tensor:
    """Reshape a convolution [outputs, hidden, rows, columns] to [outputs, values per square]."""
    return tensor.permute(0, 2, 3, 1).reshape(len(tensor), -1)


def _tiny(architecture: str, model_type: str, text: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "image_token_id": 480,
        "video_token_id": 481,
        "image_start_token_id": 482,
        "image_end_token_id": 483,
        "video_start_token_id": 484,
        "video_end_token_id": 485,
        "tie_word_embeddings": False,
        "text_config": {**text, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}},
        "vision_config": dict(_TOWER),
    }
