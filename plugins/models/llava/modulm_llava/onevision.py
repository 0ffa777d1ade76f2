"""LLaVA-OneVision (arXiv 2408.03326): LLaVA-NeXT with SigLIP, and a limit on tokens per image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm_llava.llava import TINY_TOWER
from modulm_llava.next import LlavaNextConfig, LlavaNextForConditionalGeneration, LlavaNextKeys
from modulm_towers import Pieces, tiny_text

__all__ = ["LlavaOnevisionConfig", "LlavaOnevisionForConditionalGeneration"]

_PREFIX = "anyres_max_"


@frozen(kw_only=True)
class _Keys(LlavaNextKeys):
    """vision_aspect_ratio: "anyres_max_" and the maximum tokens of an image, in tiles."""

    vision_aspect_ratio: str = "anyres_max_9"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not self.vision_aspect_ratio.removeprefix(_PREFIX).isdigit():
            raise ValueError(
                f"vision_aspect_ratio: not supported yet: {self.vision_aspect_ratio!r}"
            )

    @property
    def most(self) -> int:
        """The maximum tokens of an image, in tiles."""
        return int(self.vision_aspect_ratio.removeprefix(_PREFIX))


@frozen(eq=False, kw_only=True)
class LlavaOnevisionConfig(LlavaNextConfig):
    """config.json of LLaVA-OneVision."""

    top_level_type: ClassVar[type | None] = _Keys


class LlavaOnevisionForConditionalGeneration(LlavaNextForConditionalGeneration):
    """LLaVA-OneVision; the text model is Qwen 2."""

    config_type = LlavaOnevisionConfig
    media = ("image", "video")

    def film(self, frames: Tensor) -> Pieces[Tensor]:
        tokens = yield from self.project(frames)
        side = math.isqrt(tokens.shape[1])
        planes = tokens.transpose(1, 2).unflatten(2, (side, side))
        half = [math.ceil(side / 2)] * 2
        fewer = F.interpolate(planes, half, mode="bilinear").flatten(2).transpose(1, 2)
        return torch.cat([fewer.flatten(0, 1), self.newline[None]])

    def reduced(self, grid: Tensor, side: int) -> Tensor:
        rows, columns = grid.shape[:2]
        ratio = math.sqrt(rows * columns / (self.config.top_level.most * side**2))
        if ratio <= 1.1:
            return grid
        sizes = [int(rows // ratio), int(columns // ratio)]
        planes = F.interpolate(grid.permute(2, 0, 1)[None], sizes, mode="bilinear")
        return planes[0].permute(1, 2, 0)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        tower = {key: value for key, value in TINY_TOWER.items() if key != "projection_dim"}
        return {
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "model_type": "llava_onevision",
            "image_token_index": 480,
            "video_token_index": 481,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
            "vision_aspect_ratio": "anyres_max_2",
            "text_config": tiny_text("qwen2"),
            "vision_config": {**tower, "model_type": "siglip_vision_model"},
        }
