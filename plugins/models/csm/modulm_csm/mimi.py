"""Mimi's decoder (arXiv 2410.00037): frames of codes to sound, in float32.

Everything in it is causal, so it decodes frame by frame: each convolution and each attention layer
carries its last inputs over to the next call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import ELU, Module, ModuleList

from modulm.nn import Builder
from modulm_layers import only, size

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


@define(eq=False)
class _Past:
    """What layers carry over between calls, in the order in which they run.

    before: of the last call, None in the first. after: for the next one. position: frames so far.
    """

    before: list[Tensor] | None
    after: list[Tensor] = field(factory=list)

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Return the next tensor of the last call; zeros in the first one."""
        return like.new_zeros(shape) if self.before is None else self.before[len(self.after)]

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor for the next call."""
        self.after.append(tensor)


class _Layer(Module):
    """A layer with parameters in float32."""

    weight: Tensor
    bias: Tensor

    def add(self, b: Builder, name: str, attribute: str, *shape: int) -> None:
        """Add a parameter, stored as `name`."""
        b.parameter(name, self, attribute, shape, torch.float32)


class _Convolution(_Layer):
    def __init__(
        self, b: Builder, name: str, inputs: int, outputs: int, kernel: int, dilation: int = 1
    ) -> None:
        super().__init__()
        self.dilation, self.past = dilation, (kernel - 1) * dilation
        self.add(b, f"{name}.conv.weight", "weight", outputs, inputs, kernel)
        self.add(b, f"{name}.conv.bias", "bias", outputs)

    def forward(self, x: Tensor, past: _Past) -> Tensor:
        """[n, inputs, time] -> [n, outputs, time]."""
        if self.past:
            x = torch.cat([past.take(x, len(x), x.shape[1], self.past), x], 2)
            past.keep(x[..., -self.past :])
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation)


class _Upsampling(_Layer):
    """A transposed convolution whose kernel is two strides long."""

    def __init__(
        self, b: Builder, name: str, inputs: int, outputs: int, stride: int, groups: int = 1,
        *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stride, self.groups, self.biased = stride, groups, bias
        self.add(b, f"{name}.conv.weight", "weight", inputs, outputs // groups, 2 * stride)
        if bias:
            self.add(b, f"{name}.conv.bias", "bias", outputs)

    def forward(self, x: Tensor, past: _Past) -> Tensor:
        """[n, inputs, time] -> [n, outputs, time * stride]."""
        y = F.conv_transpose1d(x, self.weight, None, self.stride, groups=self.groups)
        s = self.stride
        y[..., :s] += past.take(y, len(y), y.shape[1], s)
        past.keep(y[..., -s:])
        y = y[..., :-s]
        return y + self.bias[:, None] if self.biased else y


class _Residual(Module):
    def __init__(self, c: MimiConfig, b: Builder, channels: int, dilation: int) -> None:
        super().__init__()
        inner = channels // c.compress
        kernel = c.residual_kernel_size
        self.first = _Convolution(b, "block.1", channels, inner, kernel, dilation)
        self.second = _Convolution(b, "block.3", inner, channels, 1)

    def forward(self, x: Tensor, past: _Past) -> Tensor:
        out: Tensor = x + self.second(F.elu(self.first(F.elu(x), past)), past)
        return out


class _TransformerLayer(_Layer):
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

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, past: _Past) -> Tensor:
        """x: [n, time, hidden] -> the same shape. mask: [n, 1, time, earlier keys + time]."""
        normed = self._norm("norm1", x)
        q, k, v = (self._heads(normed, weight) for weight in (self.q, self.k, self.v))
        q, k = (_turned(part, *turns) for part in (q, k))
        earlier = self.config.sliding_window - 1
        for index, new in enumerate((k, v)):
            held = past.take(new, len(x), new.shape[1], earlier, self.head_dim)
            whole = torch.cat([held, new], 2)
            past.keep(whole[:, :, whole.shape[2] - earlier :])
            k, v = (whole, v) if index == 0 else (k, whole)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.scale1 * F.linear(seen.transpose(1, 2).flatten(2), self.out)
        inner = F.gelu(F.linear(self._norm("norm2", x), self.up))
        return x + self.scale2 * F.linear(inner, self.down)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.config.norm_eps)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """[n, time, hidden] -> [n, heads, time, head_dim]."""
        return F.linear(x, weight).unflatten(2, (-1, self.head_dim)).transpose(1, 2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [n, heads, time, head_dim]. cos, sin: [n, 1, time, head_dim / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _Transformer(Module):
    def __init__(self, c: MimiConfig, b: Builder) -> None:
        super().__init__()
        self.config = c
        self.layers = ModuleList(
            _TransformerLayer(c, b.at(f"layers.{index}")) for index in range(c.num_hidden_layers)
        )
        self.head_dim = c.head_dim or c.hidden_size // c.num_attention_heads

    def forward(self, x: Tensor, past: _Past) -> Tensor:
        """[n, time, hidden] -> the same shape."""
        first = past.take(x, len(x), 1)
        time = torch.arange(x.shape[1], device=x.device)
        past.keep(first + x.shape[1])
        positions = first + time
        earlier = self.config.sliding_window - 1
        # Keys of earlier calls end where this one begins; a sound has none before its beginning.
        keys = first + torch.arange(-earlier, x.shape[1], device=x.device)
        distance = positions[:, :, None] - keys[:, None]
        mask = (keys[:, None] >= 0) & (distance >= 0) & (distance <= earlier)
        pairs = torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim
        angles = (positions[..., None] / self.config.theta**pairs)[:, None]
        turns = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, turns, mask[:, None], past)
        return x


class _Codebook(_Layer):
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


class _Quantizer(_Layer):
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


class MimiDecoder(Module):
    """Frames of codes to sound."""

    def __init__(self, c: MimiConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.semantic = c, c.num_semantic_quantizers
        at = b.at("quantizer")
        rest = c.num_quantizers - self.semantic
        names = "semantic_residual_vector_quantizer", "acoustic_residual_vector_quantizer"
        self.first = _Quantizer(c, at.at(names[0]), self.semantic)
        self.rest = _Quantizer(c, at.at(names[1]), rest)
        self.upsample = _Upsampling(
            b, "upsample", c.hidden_size, c.hidden_size, c.stride, c.upsample_groups, bias=False
        )
        self.transformer = _Transformer(c, b.at("decoder_transformer"))
        self.layers = ModuleList(_layers(c, b.at("decoder")))

    def forward(
        self, frames: Tensor, states: Sequence[list[Tensor] | None]
    ) -> tuple[Tensor, Sequence[list[Tensor]]]:
        """See `SpeakingModel.decode`. A state has a tensor of shape [1, ...] per layer."""
        known = [state for state in states if state is not None]
        if 0 < len(known) < len(states):
            return self._apart(frames, states)
        before = [torch.cat(each) for each in zip(*known, strict=True)] if known else None
        past = _Past(before)
        samples = self._sound(frames, past)
        split = [tensor.split(1) for tensor in past.after]
        return samples, [[part[index].clone() for part in split] for index in range(len(states))]

    def _apart(
        self, frames: Tensor, states: Sequence[list[Tensor] | None]
    ) -> tuple[Tensor, Sequence[list[Tensor]]]:
        """Decode sounds that begin apart from the others."""
        begins = [index for index, state in enumerate(states) if state is None]
        others = [index for index, state in enumerate(states) if state is not None]
        done: dict[int, tuple[Tensor, list[Tensor]]] = {}
        for places in (begins, others):
            sound, after = self(frames[places], [states[index] for index in places])
            done |= dict(zip(places, zip(sound, after, strict=True), strict=True))
        waves, following = zip(*(done[index] for index in range(len(states))), strict=True)
        return torch.stack(waves), list(following)

    def _sound(self, frames: Tensor, past: _Past) -> Tensor:
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
    layers: list[Module] = [_Convolution(b, "layers.0", c.hidden_size, channels, c.kernel_size)]
    for ratio in c.upsampling_ratios:
        layers.append(ELU())
        name = f"layers.{len(layers)}"
        layers.append(_Upsampling(b, name, channels, channels // 2, ratio))
        channels //= 2
        for index in range(c.num_residual_layers):
            at = b.at(f"layers.{len(layers)}")
            layers.append(_Residual(c, at, channels, c.dilation_growth_rate**index))
    layers.append(ELU())
    layers.append(_Convolution(b, f"layers.{len(layers)}", channels, 1, c.last_kernel_size))
    return layers
