"""LLaVA 1.5 (arXiv 2310.03744): CLIP's patches, projected by two linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP, only
from modulm_towers import (
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    PixtralTower,
    TowerConfig,
    cropped,
    flat_patches,
    stacked,
    tiny_text,
)

__all__ = [
    "TINY_TOWER",
    "LlavaConfig",
    "LlavaForConditionalGeneration",
    "LlavaKeys",
    "feature_layers",
]

TINY_TOWER: Mapping[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 32,
}


@frozen(kw_only=True)
class LlavaKeys:
    """The keys besides those of the two models."""

    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
    vision_feature_select_strategy: str = "default"

    def __attrs_post_init__(self) -> None:
        only(self, vision_feature_select_strategy=("default", "full"))


@frozen(eq=False, kw_only=True)
class LlavaConfig(MultimodalConfig):
    """config.json of LLaVA. layers: the tower layers whose states are concatenated."""

    vision_type: ClassVar[type] = TowerConfig
    top_level_type: ClassVar[type | None] = LlavaKeys

    layers: tuple[int, ...] = (-2,)

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        return {"layers": feature_layers(keys, file)}


def feature_layers(keys: Mapping[str, Any], file: str) -> tuple[int, ...]:
    """`vision_feature_layer`, one layer or several. Raises CheckpointError."""
    setting = keys.get("vision_feature_layer")
    layers = tuple(setting) if isinstance(setting, list | tuple) else (setting,)
    count = keys["vision_config"].get("num_hidden_layers", 0)
    if not layers or not all(type(i) is int and -count <= i + 1 <= count + 1 for i in layers):
        raise CheckpointError(f"{file}: vision_feature_layer: {setting!r} of {count} layers")
    return layers


class LlavaForConditionalGeneration(MultimodalModel):
    """LLaVA 1.5 and similar models, with one square image."""

    api = 1
    config_type: ClassVar[type] = LlavaConfig
    names = WeightNames(
        rename=((r"^vision_tower\.vision_model\.", "vision_tower."),),
        ignore=(r"^vision_tower\.(head\.|embeddings\.position_ids)",),
        rewrite=(flat_patches(r"\.(patch_embedding|patch_conv)\.weight$"),),
    )
    tower: ClipTower | PixtralTower
    projector: Module

    def make_encoders(self, config: LlavaConfig, b: Builder) -> None:
        kind = PixtralTower if config.vision.model_type == "pixtral" else ClipTower
        self.tower = kind(config.vision, b.at("vision_tower"))
        self.projector = self.make_projector(config, b.at("multi_modal_projector"))

    def make_projector(self, config: Any, b: Builder) -> Module:
        """What makes states of the tower, [n, hidden of the tower], embeddings."""
        vision, keys, hidden = config.vision, config.top_level, config.hidden_size
        return PlainMLP(
            b,
            vision.hidden_size * len(config.layers),
            hidden,
            keys.projector_hidden_act,
            bias=keys.multimodal_projector_bias,
            up="linear_1",
            down="linear_2",
            outputs=hidden,
        )

    def seen(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, height, width] -> [n, patches, hidden of the tower]."""
        states = yield from self.tower.states(pixels, self.config.layers)
        states_joined = torch.cat(states, dim=-1)
        if self.config.top_level.vision_feature_select_strategy == "default":
            states_joined = states_joined[:, 1:]
        return states_joined

    def project(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, channels, height, width] -> [n, patches, hidden]."""
        states = yield from self.seen(pixels)
        projected: Tensor = self.projector(states.flatten(0, 1))
        return projected.view(*states.shape[:2], -1)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        if isinstance(self.tower, PixtralTower):
            pictures = cropped(self, items)
            states = yield from self.tower.states(pictures, self.config.layers)
            tokens = torch.cat(states, dim=-1)
            size = self.config.vision.patch_size
            counts = [p.shape[1] // size * (p.shape[2] // size) for p in pictures]
            return self.projector(tokens).split(counts)
        pixels, counts = stacked(self, items, "pixel_values")
        tokens = yield from self.project(pixels)
        return [part.flatten(0, 1) for part in tokens.split(counts)]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": 480,
            "text_config": tiny_text(),
            "vision_config": dict(TINY_TOWER),
        }
