"""CLIP and SigLIP: fixed image size, learned positions (arXiv 2103.00020, 2303.15343)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.errors import UnsupportedError
from modulm_layers import size
from modulm_towers.blocks import Block, BlockShape, patches
from modulm_towers.pieces import Pieces, Tower

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["ClipTower", "TowerConfig", "pixel_shuffle"]

#: Models with a class token, and models without.
_KINDS = (
    "clip_vision_model",
    "siglip_vision_model",
    "idefics3_vision",
    "minicpm_ocr_vision",
    "minicpmv4_6_vision",
    "minicpmv4_7_vision",
    "phi4_multimodal_vision",
    "smolvlm_vision",
)


@frozen(kw_only=True)
class TowerConfig:
    """`vision_config` of CLIP, SigLIP and similar models."""

    model_type: str = "clip_vision_model"
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_channels: int = size(3)
    image_size: int = size()
    patch_size: int = size()
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    head_dim: int | None = size(None)
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] = field(factory=dict)

    @property
    def theta(self) -> float:
        """Base of the rotary positions, in encoders that have them."""
        return float(self.rope_parameters.get("rope_theta", self.rope_theta))

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")


class ClipTower(Tower):
    """The encoder of CLIP, which starts with a class token, or of SigLIP, which does not."""

    first: Tensor
    positions: Tensor

    def __init__(self, c: TowerConfig, b: Builder) -> None:
        super().__init__()
        if c.model_type not in _KINDS:
            raise UnsupportedError(f"vision_config.model_type: not supported yet: {c.model_type!r}")
        self.config, self.dtype = c, b.shared.dtype
        self.clip = c.model_type == "clip_vision_model"
        at, hidden = b.at("embeddings"), c.hidden_size
        pixels = c.num_channels * c.patch_size**2
        self.patch = at.linear("patch_embedding", pixels, hidden, bias=not self.clip, split=False)
        count = (c.image_size // c.patch_size) ** 2 + self.clip
        at.parameter("position_embedding.weight", self, "positions", (count, hidden))
        if self.clip:
            at.parameter("class_embedding", self, "first", (hidden,))
            self.norm = b.layer_norm("pre_layrnorm", hidden, c.layer_norm_eps)
        shape = BlockShape(
            hidden=hidden, inner=c.intermediate_size, heads=c.num_attention_heads,
            act=c.hidden_act, eps=c.layer_norm_eps,
        )  # fmt: skip
        layers = range(c.num_hidden_layers)
        self.layers = ModuleList(Block(b.at(f"encoder.layers.{i}"), shape) for i in layers)
        self.post = b.layer_norm("post_layernorm", hidden, c.layer_norm_eps)

    def embed(self, pixels: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, tokens, hidden]."""
        n, side = len(pixels), self.config.image_size
        if pixels.shape[-2:] != (side, side):
            raise UnsupportedError(f"images of {list(pixels.shape[-2:])} pixels, not {side}")
        cut = patches(pixels.to(self.dtype), self.config.patch_size)
        x = self.patch(cut.flatten(0, 1)).view(n, cut.shape[1], -1)
        if self.clip:
            x = torch.cat([self.first.expand(n, 1, -1), x], dim=1)
        x += self.positions
        out: Tensor = self.norm(x.flatten(0, 1)).view(x.shape) if self.clip else x
        return out

    def states(self, pixels: Tensor, layers: Sequence[int]) -> Pieces[list[Tensor]]:
        """[n, tokens, hidden] after the given layer numbers; negative ones count from the last."""
        count = len(self.layers)
        depths = [index % (count + 1) for index in layers]
        x = self.embed(pixels)
        shape, states_by_depth = x.shape, {0: x}
        lengths, x = [shape[1]] * len(x), x.flatten(0, 1)
        for index, layer in enumerate(self.layers[: max(depths)]):
            x = layer(x, lengths)
            if index + 1 in depths:
                states_by_depth[index + 1] = x.view(shape)
            yield len(x)
        return [states_by_depth[index] for index in depths]

    def run(self, pixels: Tensor) -> Pieces[Tensor]:
        """[n, tokens, hidden] after the last norm, without CLIP's class token."""
        (x,) = yield from self.states(pixels, [-1])
        x = self.post(x.flatten(0, 1)).view(x.shape)
        out: Tensor = x[:, 1:] if self.clip else x
        return out


def pixel_shuffle(x: Tensor, scale: int) -> Tensor:
    """[n, rows, columns, hidden] -> [n, rows / scale, columns / scale, hidden * scale^2].

    Concatenates squares of tokens (arXiv 2404.16821).
    """
    n, rows, columns, hidden = x.shape
    x = x.reshape(n, rows, columns // scale, hidden * scale).transpose(1, 2)
    x = x.reshape(n, columns // scale, rows // scale, hidden * scale * scale)
    return x.transpose(1, 2)
