"""Gemma 3 with images (arXiv 2503.19786): SigLIP with average-pooled patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module

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
    stacked,
    tiny_text,
)

__all__ = ["Gemma3Config", "Gemma3ForConditionalGeneration"]


@frozen(kw_only=True)
class _Keys:
    """mm_tokens_per_image: tokens per image after pooling, a square number."""

    mm_tokens_per_image: int = size(256)


@frozen(eq=False, kw_only=True)
class Gemma3Config(MultimodalConfig):
    """config.json of Gemma 3 with images."""

    vision_type: ClassVar[type] = TowerConfig
    top_level_type: ClassVar[type | None] = _Keys


class _Projector(Module):
    """Average-pools squares of patches, norms them, and projects them to the text model's width."""

    weight: Tensor

    def __init__(self, config: Gemma3Config, b: Builder) -> None:
        super().__init__()
        vision = config.vision
        self.side = vision.image_size // vision.patch_size
        self.kernel = self.side // int(config.top_level.mm_tokens_per_image**0.5)
        shape = (vision.hidden_size, config.hidden_size)
        b.parameter("mm_input_projection_weight", self, "weight", shape)
        norm, eps = "mm_soft_emb_norm", vision.layer_norm_eps
        self.norm = b.rms_norm(norm, vision.hidden_size, eps, offset=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, patches, width] -> [n, tokens, hidden]."""
        grid = x.transpose(1, 2).reshape(len(x), -1, self.side, self.side)
        pooled = F.avg_pool2d(grid, self.kernel).flatten(2).transpose(1, 2).contiguous()
        out: Tensor = self.norm(pooled.flatten(0, 1)) @ self.weight
        return out.view(*pooled.shape[:2], -1)


class Gemma3ForConditionalGeneration(MultimodalModel):
    """Gemma 3 with images; the text model is its own."""

    api = 1
    config_type: ClassVar[type] = Gemma3Config
    bidirectional = True
    names = WeightNames(
        rename=((r"^vision_tower\.vision_model\.", "vision_tower."),),
        ignore=(r"^vision_tower\.(head\.|embeddings\.position_ids)",),
        rewrite=(flat_patches(r"\.patch_embedding\.weight$"),),
    )

    def make_encoders(self, config: Gemma3Config, b: Builder) -> None:
        self.tower = ClipTower(config.vision, b.at("vision_tower"))
        self.projector = _Projector(config, b.at("multi_modal_projector"))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels, counts = stacked(self, items, "pixel_values")
        tokens: Tensor = self.projector((yield from self.tower.run(pixels)))
        return [part.flatten(0, 1) for part in tokens.split(counts)]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": 480,
            "eoi_token_index": 481,
            "image_token_index": 482,
            "mm_tokens_per_image": 16,
            "text_config": tiny_text(
                "gemma3_text",
                head_dim=24,
                sliding_window=12,
                query_pre_attn_scalar=20,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 7,
            },
        }
