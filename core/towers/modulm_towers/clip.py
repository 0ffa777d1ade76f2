"""CLIP and SigLIP: images of one size, learned positions (arXiv 2103.00020, 2303.15343)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.errors import UnsupportedError
from modulm_layers import size
from modulm_towers.blocks import Block, BlockShape, patches

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["ClipTower", "TowerConfig"]


@frozen(kw_only=True)
class TowerConfig:
    """`vision_config` of CLIP, SigLIP and those like them."""

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

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: they do not divide hidden_size")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")


class ClipTower(Module):
    """The encoder of CLIP, which begins with a token of its own, or of SigLIP, which does not."""

    first: Tensor
    positions: Tensor

    def __init__(self, c: TowerConfig, b: Builder) -> None:
        super().__init__()
        if c.model_type not in ("clip_vision_model", "siglip_vision_model"):
            raise UnsupportedError(f"vision_config.model_type {c.model_type!r}: not yet")
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

    def states(self, pixels: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """[n, tokens, hidden] after as many layers; negative ones count from the last."""
        count = len(self.layers)
        wanted = [index % (count + 1) for index in layers]
        x = self.embed(pixels)
        shape, found = x.shape, {0: x}
        lengths, x = [shape[1]] * len(x), x.flatten(0, 1)
        for index, layer in enumerate(self.layers[: max(wanted)]):
            x = layer(x, lengths)
            if index + 1 in wanted:
                found[index + 1] = x.view(shape)
        return [found[index] for index in wanted]

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, tokens, hidden] after the last norm, without CLIP's own token."""
        (x,) = self.states(pixels, [-1])
        x = self.post(x.flatten(0, 1)).view(x.shape)
        out: Tensor = x[:, 1:] if self.clip else x
        return out
