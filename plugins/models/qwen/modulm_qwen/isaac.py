"""Isaac (Perceptron): SigLIP 2 for images of any size, squares of its patches, before Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, size, tiny_config
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    NaflexTower,
    Pieces,
    Siglip2VisionConfig,
    TextConfig,
    pixel_shuffle,
)

__all__ = ["IsaacConfig", "IsaacForConditionalGeneration"]


@frozen(kw_only=True)
class _VisionConfig(Siglip2VisionConfig):
    """`vision_config`. pixel_shuffle_scale_factor: patches along the side of a token."""

    pixel_shuffle_scale_factor: int = size(1)


@frozen(eq=False, kw_only=True)
class IsaacConfig(MultimodalConfig):
    """config.json of Isaac: Qwen 3's keys, or `text_config`, beside `vision_config`."""

    vision_type: ClassVar[type] = _VisionConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        vision, text = table.get("vision_config"), table.get("text_config")
        if not isinstance(vision, Mapping):
            raise CheckpointError(f"{file}: vision_config: must be a table")
        if not isinstance(text, Mapping):
            text = {key: value for key, value in table.items() if key != "vision_config"}
        scale = table.get("pixel_shuffle_scale", 1)
        inner = {**text, "model_type": "qwen3"}
        rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
        if "rope_theta" in text:
            rope.setdefault("rope_theta", text["rope_theta"])
        head = inner.get("head_dim", 128)
        if type(head) is not int or head < 8 or head % 8:
            raise CheckpointError(f"{file}: head_dim: {head!r} is not a multiple of 8")
        rope["mrope_section"] = [head // 4, head // 8, head // 8]
        inner["rope_parameters"] = {"rope_type": "default", **rope}
        inner.pop("rope_scaling", None)
        vision = {"pixel_shuffle_scale_factor": scale, **vision}
        return cls(
            text=TextConfig.from_table({**table, "text_config": inner}, file),
            vision=read_config(vision, _VisionConfig, file),
        )


class IsaacForConditionalGeneration(MultimodalModel):
    """Isaac 0.1 and 0.2."""

    api = 1
    config_type: ClassVar[type] = IsaacConfig
    axes = 3

    def make_encoders(self, config: IsaacConfig, b: Builder) -> None:
        vision, at = config.vision, b.at("sight")
        self.tower = NaflexTower(vision, at.at("0"))
        width = vision.hidden_size * vision.pixel_shuffle_scale_factor**2
        self.projector = PlainMLP(
            at, width, 4 * width, "silu", bias=False, up="1", down="3", outputs=config.hidden_size
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        grids = [item.tensors["image_grid_thw"].reshape(-1)[1:].tolist() for item in items]
        pixels = torch.cat([self.tensor(item, "pixel_values") for item in items])
        states = yield from self.tower.run(pixels, grids)
        side = self.config.vision.pixel_shuffle_scale_factor
        parts = states.split([rows * columns for rows, columns in grids])
        squares = [
            pixel_shuffle(part.view(1, *grid, -1), side).flatten(0, 2)
            for part, grid in zip(parts, grids, strict=True)
        ]
        tokens: Tensor = self.projector(torch.cat(squares))
        return tokens.split([len(part) for part in squares])

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        rename = (
            (r"^model\.vision_embedding\.", "sight."),
            (r"^model\.text_model\.", "model."),
            (r"^model\.lm_head\.", "lm_head."),
        )
        return evolve(names, rename=(*rename, *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_config("qwen3", "IsaacForConditionalGeneration", head_dim=16),
            "model_type": "isaac",
            "pixel_shuffle_scale": 2,
            "vision_max_num_patches": 60,
            "vision_min_num_patches": 16,
            "tie_word_embeddings": False,
            "vision_config": {
                "model_type": "pixel_shuffle_siglip2",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_patches": 16,
                "patch_size": 4,
                "pixel_shuffle_scale_factor": 2,
            },
        }
