"""Qwen2-VL, 2.5 and 3, dense and with experts: Qwen's text models with images of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_qwen.qwen3_5 import Qwen35ForCausalLM, Qwen35MoeForCausalLM
from modulm_qwen.vision import QwenTower, QwenTowerConfig
from modulm_towers import (
    DeepStack,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    flat_patches,
    tiny_text,
)
from modulm_towers.pruning import placed, without_repeats

__all__ = [
    "Qwen2VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeConfig",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen25VLForConditionalGeneration",
    "Qwen35ForConditionalGeneration",
    "Qwen35MoeForConditionalGeneration",
    "QwenVLConfig",
]

_TOWER: Mapping[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@frozen(eq=False, kw_only=True)
class QwenVLConfig(MultimodalConfig):
    """config.json of Qwen-VL."""

    vision_type: ClassVar[type] = QwenTowerConfig


class Qwen2VLForConditionalGeneration(MultimodalModel):
    """Qwen2-VL."""

    api = 1
    config_type: ClassVar[type] = QwenVLConfig
    axes = 3
    media = ("image", "video")
    kind: ClassVar[str] = "2"
    #: Whether tokens of videos may be left out (`--video-pruning-rate`).
    prunes_videos: ClassVar[bool] = True
    names = WeightNames(rewrite=(flat_patches(r"patch_embed\.proj\.weight$"),))
    tower: QwenTower

    def make_encoders(self, config: QwenVLConfig, b: Builder) -> None:
        self.tower = QwenTower(config.vision, b.at("visual"), self.kind)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, grids = [], []
        for item in items:
            video = item.kind == "video"
            pixels.append(self.tensor(item, "pixel_values_videos" if video else "pixel_values"))
            grids.append(item.tensors[f"{item.kind}_grid_thw"].reshape(-1, 3).tolist())
        flat = [grid for some in grids for grid in some]
        tokens = yield from self.tower.run(torch.cat(pixels), flat)
        merged = self.config.vision.spatial_merge_size**2
        parts = tokens.split([sum(t * h * w for t, h, w in some) // merged for some in grids])
        return [without_repeats(item, part) for item, part in zip(items, parts, strict=True)]

    def forward(self, batch: Batch) -> Tensor:
        if type(self).prunes_videos:
            batch = placed(batch, self.config.hidden_size)
        return super().forward(batch)

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        if type(self).prunes_videos:
            batch = placed(batch, self.config.hidden_size)
        return super().states(batch, layers)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny(
            "Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl_text",
            vision={"embed_dim": 32, "hidden_size": 64},
        )  # fmt: skip


class Qwen25VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Qwen2.5-VL, with windowed attention in most layers of the encoder."""

    kind = "2.5"

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        vision = {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        }
        return _tiny(
            "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl_text", vision=vision
        )


class Qwen3VLForConditionalGeneration(DeepStack, Qwen2VLForConditionalGeneration):
    """Qwen3-VL: outputs of inner encoder layers are added to the first layers of the text model
    (DeepStack, arXiv 2406.04334).
    """

    kind = "3"
    prunes_videos = False

    def make_encoders(self, config: QwenVLConfig, b: Builder) -> None:
        super().make_encoders(config, b)
        self.inject(len(config.vision.deepstack_visual_indexes))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", **_THIRD)


@frozen(eq=False, kw_only=True)
class Qwen3VLMoeConfig(QwenVLConfig):
    """config.json of Qwen3-VL with experts, whose weights are always normalized."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        config = super().from_table(table, file)
        text = evolve(config.text.text, norm_topk_prob=True)
        return evolve(config, text=evolve(config.text, text=text))


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Qwen3-VL with experts, which are stored transposed."""

    config_type = Qwen3VLMoeConfig

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        inner = config.text.text.moe_intermediate_size
        turn = Rewrite(r"\.experts\.(gate_up|down)_proj$", partial(_outputs_first, inner))
        return evolve(names, rewrite=(turn, *names.rewrite))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return _tiny(
            "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text",
            vision=_THIRD["vision"], text={**_THIRD["text"], **experts},
        )  # fmt: skip


class Qwen35ForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Qwen3.5, dense or with experts: Qwen3-VL's encoder without DeepStack."""

    kind = "3"
    prunes_videos = False

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny_delta("Qwen3_5ForConditionalGeneration", "qwen3_5", Qwen35ForCausalLM)


class Qwen35MoeForConditionalGeneration(Qwen35ForConditionalGeneration):
    """Qwen3.5 with experts."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        name = "Qwen3_5MoeForConditionalGeneration"
        return _tiny_delta(name, "qwen3_5_moe", Qwen35MoeForCausalLM)


_THIRD: Mapping[str, Any] = {
    "vision": {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    "text": {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
}


def _outputs_first(inner: int, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Transpose a stack of experts of width `inner` to [experts, outputs, inputs]."""
    stored = (
        tensor.shape[1] == inner if name.endswith("down_proj") else tensor.shape[2] == 2 * inner
    )
    return [(name, tensor.transpose(1, 2).contiguous() if stored else tensor)]


def _tiny(
    architecture: str,
    model_type: str,
    text_type: str,
    *,
    vision: Mapping[str, Any],
    text: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "image_token_id": 480,
        "video_token_id": 481,
        "vision_start_token_id": 482,
        "vision_end_token_id": 483,
        "tie_word_embeddings": False,
        "text_config": tiny_text(text_type, **{"rope_parameters": dict(_ROPE), **(text or {})}),
        "vision_config": {**_TOWER, **vision},
    }


def _tiny_delta(
    architecture: str, model_type: str, text: type[Qwen35ForCausalLM]
) -> Mapping[str, Any]:
    table = dict(text.tiny())
    vision = {k: v for k, v in _THIRD["vision"].items() if k != "deepstack_visual_indexes"}
    vision["out_hidden_size"] = table["hidden_size"]
    table_ = dict(_tiny(architecture, model_type, table["model_type"], vision=vision))
    del table["architectures"]
    # Half of a head's dimensions are rotated.
    sections = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    table["rope_parameters"] = {**_ROPE, **sections, "partial_rotary_factor": 0.5}
    return {**table_, "text_config": table}
