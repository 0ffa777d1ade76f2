"""Llama 3.2 Vision (Meta, 2024): tiles of an image attend to each other; text uses
cross-attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_layers import PlainMLP, size
from modulm_llama.mllama import MORE, MllamaForCausalLM
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    Tower,
    flat_patches,
    patches,
    through,
)

__all__ = ["MllamaConfig", "MllamaForConditionalGeneration"]

#: Number of images with the maximum of tiles that fit into a prompt; the cache reserves blocks for
#: them.
_IMAGES = 4
_BLOCK = 256
#: The patches of a tile are padded to a multiple of this.
_MULTIPLE = 8
_EPS = 1e-5


@frozen(kw_only=True)
class _TowerConfig:
    """`vision_config`."""

    hidden_size: int = size(1280)
    hidden_act: str = "gelu"
    num_hidden_layers: int = size(32)
    num_global_layers: int = size(8)
    attention_heads: int = size(16)
    num_channels: int = size(3)
    intermediate_size: int = size(5120)
    vision_output_dim: int = size(7680)
    image_size: int = size(448)
    patch_size: int = size(14)
    norm_eps: float = 1e-5
    max_num_tiles: int = size(4)
    intermediate_layers_indices: tuple[int, ...] = ()
    supported_aspect_ratios: tuple[tuple[int, ...], ...] = ()

    def __attrs_post_init__(self) -> None:
        layers = range(self.num_hidden_layers)
        if not self.intermediate_layers_indices:
            raise ValueError("intermediate_layers_indices: none")
        if self.hidden_size % self.attention_heads:
            raise ValueError(f"attention_heads: {self.attention_heads} do not divide hidden_size")
        if self.patch_size > self.image_size:
            raise ValueError("patch_size: larger than image_size")
        if any(index not in layers for index in self.intermediate_layers_indices):
            raise ValueError(f"intermediate_layers_indices: there are {len(layers)} layers")
        if self.vision_output_dim != self.hidden_size * (1 + len(self.intermediate_layers_indices)):
            raise ValueError("vision_output_dim: not that of the layers that are read")

    @property
    def patches(self) -> int:
        """The number of patches of a tile, including its class token."""
        side: int = self.image_size // self.patch_size
        return side * side + 1


@frozen(eq=False, kw_only=True)
class MllamaConfig(MultimodalConfig):
    """config.json of Llama 3.2 Vision."""

    vision_type: ClassVar[type] = _TowerConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        config = super().from_table(table, file)
        tokens = config.vision.max_num_tiles * config.vision.patches
        room = _IMAGES * -(-tokens // _BLOCK) * _BLOCK
        text = evolve(config.text, text=evolve(config.text.text, image_tokens=room))
        return evolve(config, text=text)

    @property
    def vocab_size(self) -> int:
        """The vocabulary size, including tokens that only occur in prompts."""
        return self.text.vocab_size + MORE


class _Attention(Module):
    """Patches attend to the whole image; padding attends to real patches only."""

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        heads = f"attention heads of {b.prefix}"
        self.heads, width = b.shared.mesh.tensor.part(c.attention_heads, heads), c.hidden_size
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)
        self.qkv = b.linear("qkv_proj", width, parts)
        self.out = b.row_linear("o_proj", width, width)

    def forward(self, x: Tensor, real: Sequence[Tensor]) -> Tensor:
        """x: [patches of all images, hidden]; real: of each image, [its patches] bool."""
        n = len(real)
        qkv = self.qkv(x).view(n, len(x) // n, 3, self.heads, -1).permute(0, 2, 3, 1, 4)
        seen = torch.empty_like(qkv[:, 0])
        for item_qkv, into, there in zip(qkv, seen, real, strict=True):
            q, k, v = item_qkv
            into[:, there] = _attend(q[:, there], k, v)
            into[:, ~there] = _attend(q[:, ~there], k[:, there], v[:, there])
        out: Tensor = self.out(seen.transpose(1, 2).reshape(len(x), -1))
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


class _Block(Module):
    """norm, attention, norm, feed-forward, with optionally gated residual additions."""

    gate_attn: Tensor
    gate_ffn: Tensor

    def __init__(self, c: _TowerConfig, b: Builder, gated: bool) -> None:
        super().__init__()
        self.gated, width = gated, c.hidden_size
        self.norm1 = b.layer_norm("input_layernorm", width, c.norm_eps)
        self.attn = _Attention(c, b.at("self_attn"))
        self.norm2 = b.layer_norm("post_attention_layernorm", width, c.norm_eps)
        at = b.at("mlp")
        self.mlp = PlainMLP(at, width, c.intermediate_size, c.hidden_act, up="fc1", down="fc2")
        for name in ("gate_attn", "gate_ffn") if gated else ():
            b.parameter(name, self, name, (1,))

    def forward(self, x: Tensor, real: Sequence[Tensor]) -> Tensor:
        """See `_Attention`."""
        seen = self.attn(self.norm1(x), real)
        x = x + (seen * self.gate_attn.tanh() if self.gated else seen)
        transformed = self.mlp(self.norm2(x))
        out: Tensor = x + (transformed * self.gate_ffn.tanh() if self.gated else transformed)
        return out


class _Tower(Tower):
    """Encodes each tile with a class token, then all tiles of an image together."""

    class_token: Tensor
    gate: Tensor
    positions: Tensor
    tiles: Tensor
    before: Tensor
    before_gate: Tensor
    after: Tensor
    after_gate: Tensor

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, hidden = c, b.shared.dtype, c.hidden_size
        inputs, kinds = c.num_channels * c.patch_size**2, len(c.supported_aspect_ratios) + 1
        self.patch = b.linear("patch_embedding", inputs, hidden, split=False)
        b.parameter("class_embedding", self, "class_token", (hidden,))
        at = b.at("gated_positional_embedding")
        at.parameter("gate", self, "gate", (1,))
        at.parameter("embedding", self, "positions", (c.patches, hidden))
        shape = (kinds, c.max_num_tiles * c.patches * hidden)
        at.parameter("tile_embedding.weight", self, "tiles", shape)
        for name, stored in (("before", "pre_tile"), ("after", "post_tile")):
            at, shape = b.at(f"{stored}_positional_embedding"), (kinds, c.max_num_tiles * hidden)
            at.parameter("embedding.weight", self, name, shape)
            at.parameter("gate", self, f"{name}_gate", (1,))
        self.pre = b.layer_norm("layernorm_pre", hidden, _EPS)
        self.post = b.layer_norm("layernorm_post", hidden, _EPS)
        self.layers, self.whole = (
            ModuleList(_Block(c, b.at(f"{name}.layers.{i}"), gated) for i in range(count))
            for name, count, gated in (
                ("transformer", c.num_hidden_layers, False),
                ("global_transformer", c.num_global_layers, True),
            )
        )

    def run(self, pixels: Sequence[Tensor], kinds: Tensor) -> Pieces[list[Tensor]]:
        """pixels: of each image, [tiles, channels, height, width]; kinds: [images] int64, index of
        its tiling -> [tokens of its tiles, vision_output_dim] each.
        """
        c, n = self.config, len(pixels)
        x = self._embedded(pixels, kinds)
        filled = -(-c.patches // _MULTIPLE) * _MULTIPLE
        x = F.pad(x, (0, 0, 0, filled - c.patches))
        real = [self._real(len(item), filled).to(x.device) for item in pixels]
        x, intermediate = x.flatten(0, 2), []
        for index, layer in enumerate(self.layers):
            x = layer(x, real)
            yield len(x)
            intermediate += [x] * (index in c.intermediate_layers_indices)
        tiled = self.post(x).view(n, c.max_num_tiles, filled, -1)
        x = self._placed(tiled, self.after[kinds], self.after_gate).flatten(0, 2)
        x = yield from through(self.whole, x, real)
        order = sorted(c.intermediate_layers_indices)
        inner = torch.stack(
            [intermediate[order.index(i)] for i in c.intermediate_layers_indices], -1
        )
        combined = torch.cat([x, inner.flatten(1)], -1).view(n, len(x) // n, -1)
        return [item[there] for item, there in zip(combined, real, strict=True)]

    def _embedded(self, pixels: Sequence[Tensor], kinds: Tensor) -> Tensor:
        """[images, tiles, patches of a tile, hidden], with positions, normed."""
        c, n, tiles = self.config, len(pixels), self.config.max_num_tiles
        cut = [patches(tiles_.to(self.dtype), c.patch_size) for tiles_ in pixels]
        x = torch.stack([F.pad(tiles_, (0, 0, 0, 0, 0, tiles - len(tiles_))) for tiles_ in cut])
        x = self.patch(x.flatten(0, 2)).view(n, tiles, c.patches - 1, -1)
        x = self._placed(x, self.before[kinds], self.before_gate)
        x = torch.cat([self.class_token.expand(n, tiles, 1, -1), x], dim=2)
        gate = self.gate.tanh()
        x = x + (1 - gate) * self.positions + gate * self.tiles[kinds].view(x.shape)
        normed: Tensor = self.pre(x.flatten(0, 2))
        return normed.view(x.shape)

    def _placed(self, x: Tensor, table: Tensor, gate: Tensor) -> Tensor:
        """Add tile embeddings to x: [images, tiles, patches, hidden]."""
        return x + table.view(*x.shape[:2], 1, -1) * gate.tanh()

    def _real(self, tiles: int, filled: int) -> Tensor:
        """[patches] bool: False for padding."""
        there = torch.zeros(self.config.max_num_tiles, filled, dtype=torch.bool)
        there[:tiles, : self.config.patches] = True
        return there.flatten()


class MllamaForConditionalGeneration(MultimodalModel):
    """Llama 3.2 Vision."""

    api = 1
    config_type: ClassVar[type] = MllamaConfig
    takes_embeds = False
    names = WeightNames(rewrite=(flat_patches(r"^vision_model\.patch_embedding\.weight$"),))

    def make_encoders(self, config: MllamaConfig, b: Builder) -> None:
        self.tower = _Tower(config.vision, b.at("vision_model"))
        inputs, outputs = config.vision.vision_output_dim, config.hidden_size
        name = "multi_modal_projector"
        self.projector = b.linear(name, inputs, outputs, bias=True, split=False)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        pixels = [self.tensor(item, "pixel_values") for item in items]
        kinds = torch.cat([self.tensor(item, "aspect_ratio_ids") for item in items])
        states = yield from self.tower.run(pixels, kinds)
        return [self.projector(item_states) for item_states in states]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.pad(super().logits(hidden), (0, MORE), value=-1e4)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        text = {k: v for k, v in MllamaForCausalLM.tiny().items() if k != "architectures"}
        return {
            "architectures": ["MllamaForConditionalGeneration"],
            "model_type": "mllama",
            "image_token_index": 481,
            "text_config": {**text, "vocab_size": 481},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_global_layers": 2,
                "attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 96,
                "intermediate_layers_indices": [2, 0],
                "max_num_tiles": 4,
            },
        }
