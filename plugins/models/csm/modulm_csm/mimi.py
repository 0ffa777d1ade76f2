"""Mimi's decoder (arXiv 2410.00037): frames of codes to sound, in float32.

Everything in it is causal, so it decodes frame by frame.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ELU, Module, ModuleList

from modulm.nn import Builder
from modulm_layers import only, size
from modulm_speakers.codec import (
    CausalConvolution,
    CausalDecoder,
    CausalUpsampling,
    Float32Module,
    Past,
    Window,
)

__all__ = ["MimiConfig", "MimiDecoder"]

_EPS = 1e-5


@frozen(kw_only=True)
class MimiConfig:
    """`codec_config`: the keys of the decoder."""

    sampling_rate: int = size(24000)
    frame_rate: float | None = None
    audio_channels: int = size(1)
    hidden_size: int = size(512)
    num_filters: int = size(64)
    num_residual_layers: int = size(1)
    upsampling_ratios: tuple[int, ...] = (8, 6, 5, 4)
    kernel_size: int = size(7)
    last_kernel_size: int = size(3)
    residual_kernel_size: int = size(3)
    dilation_growth_rate: int = size(2)
    use_causal_conv: bool = True
    pad_mode: str = "constant"
    compress: int = size(2)
    trim_right_ratio: float = 1.0
    codebook_size: int = size(2048)
    codebook_dim: int = size(256)
    num_quantizers: int = size(32)
    use_conv_shortcut: bool = False
    vector_quantization_hidden_dimension: int = size(256)
    num_semantic_quantizers: int = size(1)
    upsample_groups: int = size(512)
    num_hidden_layers: int = size(8)
    intermediate_size: int = size(2048)
    num_attention_heads: int = size(8)
    num_key_value_heads: int = size(8)
    head_dim: int | None = size(None)
    hidden_act: str = "gelu"
    norm_eps: float = 1e-5
    sliding_window: int = size(250)
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        only(
            self, audio_channels=(1,), use_causal_conv=(True,), pad_mode=("constant",),
            trim_right_ratio=(1.0,), use_conv_shortcut=(False,), hidden_act=("gelu",),
            attention_bias=(False,), num_key_value_heads=(self.num_attention_heads,),
        )  # fmt: skip

    @property
    def stride(self) -> int:
        """Positions of the transformer per frame."""
        if self.frame_rate is None:
            return 2
        inner = math.ceil(self.sampling_rate / math.prod(self.upsampling_ratios))
        return int(inner / self.frame_rate)

    @property
    def frame_samples(self) -> int:
        """Samples of a frame."""
        return self.stride * math.prod(self.upsampling_ratios)

    @property
    def theta(self) -> float:
        """Base of the rotary angles."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta))


class _Residual(Module):
    def __init__(self, c: MimiConfig, b: Builder, channels: int, dilation: int) -> None:
        super().__init__()
        inner = channels // c.compress
        kernel = c.residual_kernel_size
        self.first = CausalConvolution(b, "block.1", channels, inner, kernel, dilation)
        self.second = CausalConvolution(b, "block.3", inner, channels, 1)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        out: Tensor = x + self.second(F.elu(self.first(F.elu(x), past)), past)
        return out


class _TransformerLayer(Float32Module):
    """Pre-norm block with scaled branches; attention over a window."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    scale1: Tensor
    scale2: Tensor

    def __init__(self, c: MimiConfig, b: Builder) -> None:
        super().__init__()
        self.config, hidden = c, c.hidden_size
        self.head_dim = c.head_dim or hidden // c.num_attention_heads
        wide = c.num_attention_heads * self.head_dim
        norms = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
        for name, attribute in norms.items():
            self.add(b, f"{name}.weight", f"{attribute}_weight", hidden)
            self.add(b, f"{name}.bias", f"{attribute}_bias", hidden)
        for name in ("q", "k", "v"):
            self.add(b, f"self_attn.{name}_proj.weight", name, wide, hidden)
        self.add(b, "self_attn.o_proj.weight", "out", hidden, wide)
        self.add(b, "mlp.fc1.weight", "up", c.intermediate_size, hidden)
        self.add(b, "mlp.fc2.weight", "down", hidden, c.intermediate_size)
        self.add(b, "self_attn_layer_scale.scale", "scale1", hidden)
        self.add(b, "mlp_layer_scale.scale", "scale2", hidden)

    def forward(self, x: Tensor, window: Window, past: Past) -> Tensor:
        """x: [n, time, hidden] -> the same shape."""
        normed = self._norm("norm1", x)
        q, k, v = (self._heads(normed, weight) for weight in (self.q, self.k, self.v))
        x = x + self.scale1 * F.linear(window.attend(q, k, v, past), self.out)
        inner = F.gelu(F.linear(self._norm("norm2", x), self.up))
        return x + self.scale2 * F.linear(inner, self.down)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.config.norm_eps)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """[n, time, hidden] -> [n, heads, time, head_dim]."""
        return F.linear(x, weight).unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class _Transformer(Module):
    def __init__(self, c: MimiConfig, b: Builder) -> None:
        super().__init__()
        self.config = c
        self.layers = ModuleList(
            _TransformerLayer(c, b.at(f"layers.{index}")) for index in range(c.num_hidden_layers)
        )
        self.head_dim = c.head_dim or c.hidden_size // c.num_attention_heads

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """[n, time, hidden] -> the same shape."""
        c = self.config
        window = Window.of(x, past, c.sliding_window, self.head_dim, c.theta)
        for layer in self.layers:
            x = layer(x, window, past)
        return x


class _Codebook(Float32Module):
    sums: Tensor
    usage: Tensor

    def __init__(self, c: MimiConfig, b: Builder) -> None:
        super().__init__()
        self.add(b, "codebook.embed_sum", "sums", c.codebook_size, c.codebook_dim)
        self.add(b, "codebook.cluster_usage", "usage", c.codebook_size)

    def forward(self, codes: Tensor) -> Tensor:
        """[n, frames] -> [n, frames, codebook_dim]. Codes beyond the codebook are its last."""
        codes = codes.clamp(max=len(self.usage) - 1)
        return self.sums[codes] / self.usage[codes].clamp(min=_EPS)[..., None]


class _Quantizer(Float32Module):
    """Adds up the vectors of residual codebooks."""

    def __init__(self, c: MimiConfig, b: Builder, count: int) -> None:
        super().__init__()
        self.codebooks = ModuleList(_Codebook(c, b.at(f"layers.{i}")) for i in range(count))
        inner = c.vector_quantization_hidden_dimension
        self.projected = inner != c.hidden_size
        if self.projected:
            self.add(b, "output_proj.weight", "weight", c.hidden_size, inner, 1)

    def forward(self, codes: Tensor) -> Tensor:
        """[n, frames, codebooks] -> [n, hidden, frames]."""
        tables = zip(self.codebooks, codes.unbind(2), strict=False)
        vectors: Tensor = sum(table(each) for table, each in tables).transpose(1, 2)  # type: ignore[union-attr]
        return F.conv1d(vectors, self.weight) if self.projected else vectors


class MimiDecoder(CausalDecoder):
    """Frames of codes to sound."""

    def __init__(self, c: MimiConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.semantic = c, c.num_semantic_quantizers
        at = b.at("quantizer")
        rest = c.num_quantizers - self.semantic
        names = "semantic_residual_vector_quantizer", "acoustic_residual_vector_quantizer"
        self.first = _Quantizer(c, at.at(names[0]), self.semantic)
        self.rest = _Quantizer(c, at.at(names[1]), rest)
        self.upsample = CausalUpsampling(
            b, "upsample", c.hidden_size, c.hidden_size, c.stride, c.upsample_groups, bias=False
        )
        self.transformer = _Transformer(c, b.at("decoder_transformer"))
        self.layers = ModuleList(_layers(c, b.at("decoder")))

    def sound(self, frames: Tensor, past: Past) -> Tensor:
        x = self.first(frames[..., : self.semantic])
        if frames.shape[2] > self.semantic:
            x = x + self.rest(frames[..., self.semantic :])
        x = self.upsample(x, past)
        x = self.transformer(x.transpose(1, 2), past).transpose(1, 2)
        for layer in self.layers:
            x = layer(x) if isinstance(layer, ELU) else layer(x, past)
        return x[:, 0]


def _layers(c: MimiConfig, b: Builder) -> list[Module]:
    """The SEANet decoder."""
    channels = c.num_filters * 2 ** len(c.upsampling_ratios)
    layers: list[Module] = [
        CausalConvolution(b, "layers.0", c.hidden_size, channels, c.kernel_size)
    ]
    for ratio in c.upsampling_ratios:
        layers.append(ELU())
        name = f"layers.{len(layers)}"
        layers.append(CausalUpsampling(b, name, channels, channels // 2, ratio))
        channels //= 2
        for index in range(c.num_residual_layers):
            at = b.at(f"layers.{len(layers)}")
            layers.append(_Residual(c, at, channels, c.dilation_growth_rate**index))
    layers.append(ELU())
    layers.append(CausalConvolution(b, f"layers.{len(layers)}", channels, 1, c.last_kernel_size))
    return layers
