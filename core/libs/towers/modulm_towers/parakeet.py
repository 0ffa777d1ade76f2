"""NVIDIA's fast conformer (arXiv 2305.05084), the encoder of Parakeet and Canary."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm_layers import PlainMLP, activation, only, size
from modulm_towers.convolution import Convolution
from modulm_towers.distances import distance_scores, distance_sines
from modulm_towers.pieces import Pieces, Tower, through

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = ["ParakeetConfig", "ParakeetTower"]

_EPS = 1e-5


@frozen(kw_only=True)
class ParakeetConfig:
    """`encoder_config`. subsampling_factor: frames of the spectrogram per frame of the encoder, a
    power of two.
    """

    hidden_size: int = size(1024)
    num_hidden_layers: int = size(24)
    num_attention_heads: int = size(8)
    intermediate_size: int = size(4096)
    hidden_act: str = "silu"
    attention_bias: bool = True
    convolution_bias: bool = True
    conv_kernel_size: int = size(9)
    subsampling_factor: int = size(8, least=2)
    subsampling_conv_channels: int = size(256)
    subsampling_conv_kernel_size: int = size(3)
    subsampling_conv_stride: int = size(2)
    num_mel_bins: int = size(80)
    max_position_embeddings: int = size(5000)
    scale_input: bool = True

    def __attrs_post_init__(self) -> None:
        only(self, subsampling_conv_kernel_size=(3,), subsampling_conv_stride=(2,))
        if self.hidden_size % self.num_attention_heads or self.hidden_size % 2:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if not self.conv_kernel_size % 2:
            raise ValueError("conv_kernel_size: must be odd")
        if 2**self.halvings != self.subsampling_factor:
            raise ValueError("subsampling_factor: must be a power of two")
        if self.num_mel_bins % self.subsampling_factor:
            raise ValueError("num_mel_bins: must be a multiple of subsampling_factor")

    @property
    def halvings(self) -> int:
        """How often the convolutions halve the time."""
        return round(math.log2(self.subsampling_factor))

    def outputs(self, frames: int) -> int:
        """Frames of the encoder for frames of the spectrogram."""
        for _ in range(self.halvings):
            frames = (frames + 1) // 2
        return frames


class _Attention(Module):
    """Attention within one sound; scores include a term for query and distance."""

    of_keys: Tensor
    of_distances: Tensor

    def __init__(self, c: ParakeetConfig, b: Builder) -> None:
        super().__init__()
        width, self.heads = c.hidden_size, c.num_attention_heads
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)
        self.qkv = b.linear("qkv_proj", width, parts, bias=c.attention_bias, split=False)
        self.distances = b.linear("relative_k_proj", width, width, split=False)
        shape = (self.heads, width // self.heads)
        b.parameter("bias_u", self, "of_keys", shape)
        b.parameter("bias_v", self, "of_distances", shape)
        self.out = b.linear("o_proj", width, width, bias=c.attention_bias, split=False)

    def forward(self, x: Tensor, sines: Tensor, heard: int) -> Tensor:
        """x: [frames, width]; sines: [2 * frames - 1, width], of distances. Frames from `heard` on
        are masked: others do not attend to them, and they attend to all equally.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        p = self.distances(sines).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        scale = q.shape[-1] ** -0.5
        scores = distance_scores(q + self.of_distances[:, None], p) * scale
        least = torch.finfo(scores.dtype).min
        scores[:, heard:], scores[:, :, heard:] = least, least
        near = q + self.of_keys[:, None]
        seen = F.scaled_dot_product_attention(near, k, v, attn_mask=scores, scale=scale)
        out: Tensor = self.out(seen.transpose(0, 1).flatten(1))
        return out


class _Convolved(Module):
    """Gated depthwise convolution over time with batch norm."""

    mean: Tensor
    var: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, c: ParakeetConfig, b: Builder) -> None:
        super().__init__()
        width, biased = c.hidden_size, c.convolution_bias
        self.up = Convolution(b, "pointwise_conv1", width, 2 * width, (1,), bias=biased)
        self.depth = Convolution(
            b, "depthwise_conv", width, width, (c.conv_kernel_size,),
            padding=c.conv_kernel_size // 2, groups=width, bias=biased,
        )  # fmt: skip
        for name in ("running_mean", "running_var", "weight", "bias"):
            b.parameter(f"norm.{name}", self, name.removeprefix("running_"), (width,))
        self.act = activation(c.hidden_act, b.ops)
        self.down = Convolution(b, "pointwise_conv2", width, width, (1,), bias=biased)

    def forward(self, x: Tensor, heard: int) -> Tensor:
        """x: [frames, width] of one sound, of which those from `heard` on are masked."""
        x = F.glu(self.up(x.T[None]), dim=1)
        x = self.depth(F.pad(x[..., :heard], (0, x.shape[-1] - heard)))
        x = F.batch_norm(x, self.mean, self.var, self.weight, self.bias, eps=_EPS)
        out: Tensor = self.down(self.act(x.contiguous()))[0].T
        return out


class _Block(Module):
    def __init__(self, c: ParakeetConfig, b: Builder) -> None:
        super().__init__()
        width = c.hidden_size
        feeds = ("feed_forward1", "feed_forward2")
        self.norms = ModuleList(
            b.layer_norm(f"norm_{name}", width, _EPS) for name in (feeds[0], "self_att", "conv")
        )
        self.norms.append(b.layer_norm(f"norm_{feeds[1]}", width, _EPS))
        self.feeds = ModuleList(
            PlainMLP(
                b.at(name), width, c.intermediate_size, c.hidden_act, bias=c.attention_bias,
                up="linear1", down="linear2",
            )
            for name in feeds
        )  # fmt: skip
        self.attention = _Attention(c, b.at("self_attn"))
        self.convolved = _Convolved(c, b.at("conv"))
        self.norm = b.layer_norm("norm_out", width, _EPS)

    def forward(self, x: Tensor, sines: Tensor, heard: int) -> Tensor:
        x = x + 0.5 * self.feeds[0](self.norms[0](x))
        x = x + self.attention(self.norms[1](x), sines, heard)
        x = x + self.convolved(self.norms[2](x), heard)
        x = x + 0.5 * self.feeds[1](self.norms[3](x.contiguous()))
        out: Tensor = self.norm(x)
        return out


class ParakeetTower(Tower):
    """Encodes one sound at a time."""

    def __init__(self, c: ParakeetConfig, b: Builder) -> None:
        super().__init__()
        self.dtype, self.config = b.shared.dtype, c
        wide, at = c.subsampling_conv_channels, b.at("subsampling")
        self.first = Convolution(at, "layers.0", 1, wide, (3, 3), stride=2, padding=1)
        places = range(2, 3 * c.halvings - 1, 3)
        self.depths = ModuleList(
            Convolution(at, f"layers.{i}", wide, wide, (3, 3), stride=2, padding=1, groups=wide)
            for i in places
        )
        self.points = ModuleList(
            Convolution(at, f"layers.{i + 1}", wide, wide, (1, 1)) for i in places
        )
        bins = c.num_mel_bins // c.subsampling_factor
        self.out = at.linear("linear", wide * bins, c.hidden_size, bias=True, split=False)
        self.scale = c.hidden_size**0.5 if c.scale_input else 1.0
        self.layers = ModuleList(_Block(c, b.at(f"layers.{i}")) for i in range(c.num_hidden_layers))

    def run(self, mel: Tensor, count: int = 0) -> Pieces[Tensor]:
        """[frames, bins] -> [frames / factor, hidden]; count: that of the output where masked
        frames follow those of the sound.
        """
        x = F.relu(self.first(mel.to(self.dtype)[None, None]))
        for depth, point in zip(self.depths, self.points, strict=True):
            x = F.relu(point(depth(x)))
        x = x[0].transpose(0, 1).flatten(1)
        heard = len(x)
        x = self.out(F.pad(x, (0, 0, 0, max(count - heard, 0)))) * self.scale
        sines = distance_sines(len(x), self.config.hidden_size).to(x.device, x.dtype)
        return (yield from through(self.layers, x, sines, heard))
