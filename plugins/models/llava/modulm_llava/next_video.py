"""LLaVA-NeXT-Video (2024): LLaVA-NeXT with videos, whose frames are pooled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm_layers import only, size
from modulm_llava.next import LlavaNextConfig, LlavaNextForConditionalGeneration, LlavaNextKeys
from modulm_towers import Pieces

__all__ = ["LlavaNextVideoConfig", "LlavaNextVideoForConditionalGeneration"]


@frozen(kw_only=True)
class _Keys(LlavaNextKeys):
    """spatial_pool_mode, spatial_pool_stride: how squares of patches are pooled."""

    spatial_pool_mode: str = "average"
    spatial_pool_stride: int = size(2)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, spatial_pool_mode=("average", "max"))


@frozen(eq=False, kw_only=True)
class LlavaNextVideoConfig(LlavaNextConfig):
    """config.json of LLaVA-NeXT-Video."""

    top_level_type: ClassVar[type | None] = _Keys


class LlavaNextVideoForConditionalGeneration(LlavaNextForConditionalGeneration):
    """LLaVA-NeXT-Video; the text model is Llama."""

    config_type = LlavaNextVideoConfig
    media = ("image", "video")

    def film(self, frames: Tensor) -> Pieces[Tensor]:
        patches, keys = (yield from self.seen(frames)), self.config.top_level
        side = math.isqrt(patches.shape[1])
        planes = patches.transpose(1, 2).unflatten(2, (side, side))
        pool = F.avg_pool2d if keys.spatial_pool_mode == "average" else F.max_pool2d
        fewer = pool(planes, keys.spatial_pool_stride).flatten(2).transpose(1, 2)
        tokens: Tensor = self.projector(fewer.flatten(0, 1))
        return tokens

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **super().tiny(),
            "architectures": ["LlavaNextVideoForConditionalGeneration"],
            "model_type": "llava_next_video",
            "video_token_index": 481,
        }
