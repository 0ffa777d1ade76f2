"""Qwen3-Omni's codec: frames of codes to sound, in float32 (arXiv 2509.17765).

A transformer over a window, then convolutions. All of it is causal, up to transposed convolutions
whose samples are complete one input later; the last such samples of a sound are dropped, as in
transformers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.nn import Builder
from modulm_layers import only, size
from modulm_qwen.snake import Snake
from modulm_speakers.codec import (
    CausalConvolution,
    CausalDecoder,
    CausalUpsampling,
    Float32Module,
    Past,
    Window,
)

__all__ = ["Code2Wav", "Code2WavConfig"]

_NORM_EPS = 1e-6
_DILATIONS = (1, 3, 9)
_KERNEL = 7


@frozen(kw_only=True)
class Code2WavConfig:
    """`code2wav_config`."""

    codebook_size: int = size(2048)
    hidden_size: int = size(1024)
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float = 10000.0
    num_attention_heads: int = size(16)
    num_key_value_heads: int = size(16)
    head_dim: int | None = size(None)
    attention_bias: bool = False
    sliding_window: int = size(72)
    intermediate_size: int = size(3072)
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    num_hidden_layers: int = size(8)
    num_quantizers: int = size(16)
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)
    decoder_dim: int = size(1536)

    def __attrs_post_init__(self) -> None:
        only(
            self, attention_bias=(False,), hidden_act=("silu",),
            num_key_value_heads=(self.num_attention_heads,),
        )  # fmt: skip
        if math.prod(self.upsampling_ratios) < 2:
            raise ValueError("upsampling_ratios: their product must be at least 2")

    @property
    def frame_samples(self) -> int:
        """Samples of a frame."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @property
    def head_size(self) -> int:
        """Dimensions per head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def theta(self) -> float:
        """Base of the rotary angles."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta))


class _Snake(Snake):
    def forward(self, x: Tensor, past: Past) -> Tensor:
        return self.activate(x)


class _Residual(Module):
    def __init__(self, b: Builder, channels: int, dilation: int) -> None:
        super().__init__()
        self.layers = ModuleList([
            _Snake(b, "act1", channels),
            CausalConvolution(b, "conv1", channels, channels, _KERNEL, dilation),
            _Snake(b, "act2", channels),
            CausalConvolution(b, "conv2", channels, channels, 1),
        ])  # fmt: skip

    def forward(self, x: Tensor, past: Past) -> Tensor:
        inner = x
        for layer in self.layers:
            inner = layer(inner, past)
        return x + inner


class _ConvNext(Float32Module):
    """A depthwise convolution and a feed-forward block, scaled (arXiv 2201.03545)."""

    norm_weight: Tensor
    norm_bias: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    gamma: Tensor

    def __init__(self, b: Builder, channels: int) -> None:
        super().__init__()
        self.depthwise = CausalConvolution(
            b, "dwconv", channels, channels, _KERNEL, groups=channels
        )
        self.add(b, "norm.weight", "norm_weight", channels)
        self.add(b, "norm.bias", "norm_bias", channels)
        self.add(b, "pwconv1.weight", "up", 4 * channels, channels)
        self.add(b, "pwconv1.bias", "up_bias", 4 * channels)
        self.add(b, "pwconv2.weight", "down", channels, 4 * channels)
        self.add(b, "pwconv2.bias", "down_bias", channels)
        self.add(b, "gamma", "gamma", channels)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        inner = self.depthwise(x, past).transpose(1, 2)
        shape = (inner.shape[-1],)
        inner = F.layer_norm(inner, shape, self.norm_weight, self.norm_bias, _NORM_EPS)
        inner = F.linear(F.gelu(F.linear(inner, self.up, self.up_bias)), self.down, self.down_bias)
        return x + (self.gamma * inner).transpose(1, 2)


class _Layer(Float32Module):
    """Pre-norm block with scaled branches; attention over a window."""

    norm1: Tensor
    norm2: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    scale1: Tensor
    scale2: Tensor

    def __init__(self, c: Code2WavConfig, b: Builder) -> None:
        super().__init__()
        self.head_dim, self.eps = c.head_size, c.rms_norm_eps
        hidden, wide, inner = (
            c.hidden_size,
            c.num_attention_heads * c.head_size,
            c.intermediate_size,
        )
        self.add(b, "input_layernorm.weight", "norm1", hidden)
        self.add(b, "post_attention_layernorm.weight", "norm2", hidden)
        for name in ("q", "k", "v"):
            self.add(b, f"self_attn.{name}_proj.weight", name, wide, hidden)
        self.add(b, "self_attn.o_proj.weight", "out", hidden, wide)
        self.add(b, "mlp.gate_proj.weight", "gate", inner, hidden)
        self.add(b, "mlp.up_proj.weight", "up", inner, hidden)
        self.add(b, "mlp.down_proj.weight", "down", hidden, inner)
        self.add(b, "self_attn_layer_scale.scale", "scale1", hidden)
        self.add(b, "mlp_layer_scale.scale", "scale2", hidden)

    def forward(self, x: Tensor, window: Window, past: Past) -> Tensor:
        """x: [n, time, hidden] -> the same shape."""
        normed = _rms_norm(x, self.norm1, self.eps)
        q, k, v = (
            F.linear(normed, weight).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for weight in (self.q, self.k, self.v)
        )
        x = x + self.scale1 * F.linear(window.attend(q, k, v, past), self.out)
        normed = _rms_norm(x, self.norm2, self.eps)
        inner = F.silu(F.linear(normed, self.gate)) * F.linear(normed, self.up)
        return x + self.scale2 * F.linear(inner, self.down)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class Code2Wav(CausalDecoder, Float32Module):
    """Frames of codes to sound."""

    table: Tensor
    norm: Tensor

    def __init__(self, c: Code2WavConfig, b: Builder) -> None:
        super().__init__()
        self.config, hidden = c, c.hidden_size
        self.add(b, "code_embedding.weight", "table", c.codebook_size * c.num_quantizers, hidden)
        at = b.at("pre_transformer")
        self.transformer = ModuleList(
            _Layer(c, at.at(f"layers.{index}")) for index in range(c.num_hidden_layers)
        )
        self.add(at, "norm.weight", "norm", hidden)
        layers: list[Module] = []
        for index, ratio in enumerate(c.upsampling_ratios):
            at = b.at(f"upsample.{index}")
            layers.append(CausalUpsampling(at, "0", hidden, hidden, ratio, kernel=ratio))
            layers.append(_ConvNext(at.at("1"), hidden))
        at, channels = b.at("decoder"), c.decoder_dim
        layers.append(CausalConvolution(at, "0", hidden, channels, _KERNEL))
        for index, rate in enumerate(c.upsample_rates):
            block = at.at(f"{index + 1}.block")
            layers.append(_Snake(block, "0", channels))
            layers.append(CausalUpsampling(block, "1", channels, channels // 2, rate, late=True))
            channels //= 2
            layers += [
                _Residual(block.at(str(2 + i)), channels, d) for i, d in enumerate(_DILATIONS)
            ]
        count = len(c.upsample_rates) + 1
        layers.append(_Snake(at, str(count), channels))
        layers.append(CausalConvolution(at, str(count + 1), channels, 1, _KERNEL))
        self.layers = ModuleList(layers)

    def sound(self, frames: Tensor, past: Past) -> Tensor:
        c = self.config
        offsets = torch.arange(c.num_quantizers, device=frames.device) * c.codebook_size
        x = self.table[frames.clamp(max=c.codebook_size - 1) + offsets].mean(2)
        window = Window.of(x, past, c.sliding_window, c.head_size, c.theta)
        for layer in self.transformer:
            x = layer(x, window, past)
        x = _rms_norm(x, self.norm, c.rms_norm_eps).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, past)
        return x[:, 0].clamp(-1, 1)
