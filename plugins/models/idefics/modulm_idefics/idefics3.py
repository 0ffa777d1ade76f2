"""Idefics 3 (arXiv 2408.12637), SmolVLM (arXiv 2504.05299): SigLIP on tiles, merged patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import size
from modulm_towers import (
    ClipTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TowerConfig,
    flat_patches,
    pixel_shuffle,
    tiny_text,
)

__all__ = ["Idefics3Config", "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"]


@frozen(kw_only=True)
class _Keys:
    """scale_factor: the side of squares of patches that become one token."""

    scale_factor: int = size(2)


@frozen(eq=False, kw_only=True)
class Idefics3Config(MultimodalConfig):
    """config.json of Idefics 3 and SmolVLM."""

    vision_type: ClassVar[type] = TowerConfig
    top_level_type: ClassVar[type | None] = _Keys


class Idefics3ForConditionalGeneration(MultimodalModel):
    """Idefics 3; the text model is Llama."""

    api = 1
    config_type: ClassVar[type] = Idefics3Config
    names = WeightNames(rewrite=(flat_patches(r"\.patch_embedding\.weight$"),))

    def make_encoders(self, config: Idefics3Config, b: Builder) -> None:
        self.tower = _Tower(config.vision, b.at("vision_model"))
        inputs = config.vision.hidden_size * config.top_level.scale_factor**2
        name = "connector.modality_projection.proj"
        self.projector = b.linear(name, inputs, config.hidden_size, split=False)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        tiles = [self.tensor(item, "pixel_values").flatten(0, 1) for item in items]
        states = yield from self.tower.run(torch.cat(tiles))
        side = self.config.vision.image_size // self.config.vision.patch_size
        squares = pixel_shuffle(states.reshape(-1, side, side, states.shape[-1]), self._scale)
        tokens: Tensor = self.projector(squares.flatten(0, 2))
        each = (side // self._scale) ** 2
        return tokens.split([len(item_tiles) * each for item_tiles in tiles])

    @property
    def _scale(self) -> int:
        scale: int = self.config.top_level.scale_factor
        return scale

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("Idefics3ForConditionalGeneration", "idefics3")


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """SmolVLM 1 and 2."""

    media = ("image", "video")

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("SmolVLMForConditionalGeneration", "smolvlm")


class _Tower(ClipTower):
    """Positions of patches are bucketed by their fraction of a side, as in transformers."""

    def embed(self, pixels: Tensor) -> Tensor:
        x = super().embed(pixels) - self.positions
        side = self.config.image_size // self.config.patch_size
        edges = torch.arange(1 / side, 1.0, 1 / side)
        starts = (torch.arange(side, dtype=torch.float32) * (1.0 / side)).clamp(max=1.0 - 1e-6)
        buckets = torch.bucketize(starts, edges, right=True)
        rows = (buckets[:, None] * side + buckets).flatten().to(x.device)
        moved: Tensor = x + self.positions[rows]
        return moved


def _tiny(architecture: str, model_type: str) -> Mapping[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "image_token_id": 480,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": tiny_text(),
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }
