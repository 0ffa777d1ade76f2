"""LFM2-VL: SigLIP 2 with native aspect ratios, squares of patches as tokens of LFM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP, size
from modulm_lfm2.lfm2 import Lfm2ForCausalLM
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    NaflexTower,
    Pieces,
    Siglip2VisionConfig,
    pixel_shuffle,
)

__all__ = ["Lfm2VlConfig", "Lfm2VlForConditionalGeneration"]


@frozen(kw_only=True)
class _Keys:
    downsample_factor: int = size(2)
    projector_hidden_act: str = "gelu"
    projector_hidden_size: int = size(2560)
    projector_bias: bool = True
    projector_use_layernorm: bool = True


@frozen(eq=False, kw_only=True)
class Lfm2VlConfig(MultimodalConfig):
    """config.json of LFM2-VL."""

    vision_type: ClassVar[type | None] = Siglip2VisionConfig
    top_level_type: ClassVar[type | None] = _Keys


class Lfm2VlForConditionalGeneration(MultimodalModel):
    """LFM2-VL: large images are split into tiles, which precede a thumbnail."""

    api = 1
    config_type: ClassVar[type] = Lfm2VlConfig
    names = WeightNames(
        rename=(
            (r"^vision_tower\.vision_model\.", "vision_tower."),
            (r"\.patch_embedding\.projection\.", ".patch_embedding."),
        ),
        ignore=(r"^vision_tower\.head\.",),
    )

    def make_encoders(self, config: Lfm2VlConfig, b: Builder) -> None:
        keys, at = config.top_level, b.at("multi_modal_projector")
        inputs = config.vision.hidden_size * keys.downsample_factor**2
        self.tower = NaflexTower(config.vision, b.at("vision_tower"))
        self.norm = (
            at.layer_norm("layer_norm", inputs, 1e-5) if keys.projector_use_layernorm else None
        )
        self.projector = PlainMLP(
            at, inputs, keys.projector_hidden_size, keys.projector_hidden_act,
            bias=keys.projector_bias, up="linear_1", down="linear_2", outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels: list[Tensor] = []
        grids: list[list[int]] = []
        tiles = []
        for item in items:
            shapes = item.tensors["spatial_shapes"].reshape(-1, 2).tolist()
            rows = zip(self.tensor(item, "pixel_values"), shapes, strict=True)
            pixels += [row[: high * wide] for row, (high, wide) in rows]
            grids += shapes
            tiles.append(len(shapes))
        states = yield from self.tower.run(torch.cat(pixels), grids)
        split = states.split([high * wide for high, wide in grids])
        squares = [self._squares(*pair) for pair in zip(split, grids, strict=True)]
        x = torch.cat(squares)
        tokens = self.projector(x if self.norm is None else self.norm(x))
        parts = list(tokens.split([len(square) for square in squares]))
        return [torch.cat([parts.pop(0) for _ in range(count)]) for count in tiles]

    def _squares(self, states: Tensor, grid: Sequence[int]) -> Tensor:
        """[patches, hidden] -> [tokens, hidden * factor^2]."""
        merged = pixel_shuffle(states.view(1, *grid, -1), self.config.top_level.downsample_factor)
        return merged.flatten(0, 2)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        flat = (r"^language_model\.(?!model\.|lm_head\.)", "model.")
        return evolve(names, rename=(*names.rename[:1], flat, *names.rename[1:]))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = {k: v for k, v in Lfm2ForCausalLM.tiny().items() if k != "architectures"}
        return {
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "model_type": "lfm2_vl",
            "image_token_id": 480,
            "tie_word_embeddings": text.get("tie_word_embeddings", True),
            "projector_hidden_size": 48,
            "text_config": text,
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_patches": 16,
                "patch_size": 4,
                "vision_use_head": False,
            },
        }
