"""The audio encoder of Phi-4 multimodal (arXiv 2503.01743): a conformer with relative positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.nn import Builder
from modulm_layers import PlainMLP, activation, only, size
from modulm_towers import Convolution, Pieces, Tower

__all__ = ["PhiHearing", "PhiHearingConfig"]

_EPS = 1e-5
#: Frames that attend to each other; longer audio is split, the last piece zero-padded.
_LONGEST = 500
#: The two projections: for audio only, and for audio with images.
_PROJECTIONS = ("speech", "vision_speech")


@frozen(kw_only=True)
class PhiHearingConfig:
    """`audio_config`. time_reduction: spectrogram frames per encoder frame, a power of 2.
    bias_max_distance: maximum distance in frames with its own bias.
    """

    hidden_size: int = size(1024)
    intermediate_size: int = size(1536)
    num_blocks: int = size(24)
    num_attention_heads: int = size(16)
    activation: str = "swish"
    chunk_size: int = -1
    ext_pw_out_channel: int = size(1024)
    depthwise_separable_out_channel: int = size(1024)
    depthwise_multiplier: int = size(1)
    kernel_size: int = size(3)
    conv_activation: str = "swish"
    conv_glu_type: str = "swish"
    input_size: int = size(80)
    time_reduction: int = size(8)
    bias_max_distance: int = size(1000)
    bias_symmetric: bool = False
    nemo_activation: str = "relu"
    nemo_conv_channels: int = size(1024)
    downsample_rate: int = size(1)
    audio_token_id: int = size(200011, least=0)

    def __attrs_post_init__(self) -> None:
        only(self, chunk_size=(-1,), downsample_rate=(1,))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.time_reduction < 2 or self.time_reduction & (self.time_reduction - 1):
            raise ValueError("time_reduction: must be a power of 2")
        if self.ext_pw_out_channel != self.hidden_size:
            raise ValueError("ext_pw_out_channel: other than hidden_size")
        if self.depthwise_separable_out_channel != self.hidden_size:
            raise ValueError("depthwise_separable_out_channel: other than hidden_size")

    @property
    def halvings(self) -> int:
        """The number of convolutions that halve the frames."""
        return int(math.log2(self.time_reduction))

    @property
    def last_bins(self) -> int:
        """The number of frequency bins after the convolutions."""
        bins = self.input_size
        for _ in range(self.halvings):
            bins = (bins + 1) // 2
        return bins


class _Stem(Module):
    """Convolutions along time and frequency that halve both."""

    def __init__(self, c: PhiHearingConfig, b: Builder) -> None:
        super().__init__()
        wide = c.nemo_conv_channels
        convolutions = [Convolution(b, "conv.0", 1, wide, (3, 3), stride=2, padding=1)]
        self.act = activation(c.nemo_activation, b.ops)
        for i in range(1, c.halvings):
            at = 3 * i - 1
            convolutions += [
                Convolution(b, f"conv.{at}", wide, wide, (3, 3), stride=2, padding=1, groups=wide),
                Convolution(b, f"conv.{at + 1}", wide, wide, (1, 1)),
            ]
        self.convolutions = ModuleList(convolutions)
        inputs = wide * c.last_bins
        self.out = b.linear("out", inputs, c.hidden_size, bias=True, split=False)

    def forward(self, mel: Tensor) -> Tensor:
        """[frames, bins] -> [frames / time_reduction, hidden]."""
        x = mel[None, None]
        for i, convolution in enumerate(self.convolutions):
            x = convolution(x)
            # Depthwise convolutions are followed by pointwise ones.
            x = self.act(x) if i % 2 == 0 else x
        out: Tensor = self.out(x[0].transpose(0, 1).flatten(1))
        return out


class _Feed(Module):
    """A pre-norm gated feed-forward block; the file stores the gate last."""

    def __init__(self, c: PhiHearingConfig, b: Builder) -> None:
        super().__init__()
        hidden, inner = c.hidden_size, c.intermediate_size
        self.norm = b.layer_norm("layer_norm", hidden, _EPS)
        self.up_gate = b.linear("gate_up_proj", hidden, 2 * inner, bias=True, split=False)
        self.act = activation(c.activation, b.ops)
        self.down = b.linear("down_proj", inner, hidden, bias=True, split=False)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_gate(self.norm(x)).chunk(2, dim=-1)
        out: Tensor = self.down(up * self.act(gate.contiguous()))
        return out


class _Attention(Module):
    def __init__(self, c: PhiHearingConfig, b: Builder) -> None:
        super().__init__()
        self.heads, hidden = c.num_attention_heads, c.hidden_size
        self.q, self.k, self.v, self.out = (
            b.linear(f"{name}_proj", hidden, hidden, bias=True, split=False) for name in "qkvo"
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x: [pieces, frames, hidden]; bias: [heads, frames, frames], added to scores."""
        parts = (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in parts)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


class _Convolved(Module):
    """A gated causal depthwise convolution."""

    up_bias: Tensor
    gate_bias: Tensor

    def __init__(self, c: PhiHearingConfig, b: Builder) -> None:
        super().__init__()
        hidden, wide = c.hidden_size, c.hidden_size * c.depthwise_multiplier
        self.norm = b.layer_norm("layer_norm", hidden, _EPS)
        self.up_gate = Convolution(b, "glu.ext_pw_conv_1d", hidden, 2 * hidden, (1,))
        b.parameter("glu.b1", self, "up_bias", (1, hidden, 1))
        b.parameter("glu.b2", self, "gate_bias", (1, hidden, 1))
        at = b.at("dw_sep_conv_1d")
        self.before = c.kernel_size - 1
        self.depth = Convolution(at, "dw_conv", hidden, wide, (c.kernel_size,), groups=hidden)
        self.mix = Convolution(at, "pw_conv", wide, hidden, (1,))
        self.out = Convolution(b, "ext_pw_conv_1d", hidden, hidden, (1,))
        self.gate_act = activation(c.conv_glu_type, b.ops)
        self.act = activation(c.conv_activation, b.ops)

    def forward(self, x: Tensor) -> Tensor:
        """x: [pieces, frames, hidden]."""
        up, gate = self.up_gate(self.norm(x).transpose(1, 2)).chunk(2, dim=1)
        x = (up + self.up_bias) * self.gate_act((gate + self.gate_bias).contiguous())
        x = self.mix(self.depth(F.pad(x, (self.before, 0))))
        out: Tensor = self.out(self.act(x)).transpose(1, 2)
        return out


class _Block(Module):
    def __init__(self, c: PhiHearingConfig, b: Builder) -> None:
        super().__init__()
        self.first = _Feed(c, b.at("feed_forward_in"))
        self.attn_norm = b.layer_norm("layer_norm_att", c.hidden_size, _EPS)
        self.attention = _Attention(c, b.at("self_attn"))
        self.convolved = _Convolved(c, b.at("conv"))
        self.last = _Feed(c, b.at("feed_forward_out"))
        self.norm = b.layer_norm("layer_norm", c.hidden_size, _EPS)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(self.attn_norm(x), bias)
        x = x + self.convolved(x)
        x = x + 0.5 * self.last(x)
        out: Tensor = self.norm(x.contiguous())
        return out


class PhiHearing(Tower):
    """Encodes one sound at a time and projects its frames to tokens."""

    mean: Tensor
    scale: Tensor
    distances: Tensor

    def __init__(self, c: PhiHearingConfig, hidden: int, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        at, width = b.at("encoder"), c.hidden_size
        at.parameter("encoder_embedding.global_mean", self, "mean", (c.input_size,))
        at.parameter("encoder_embedding.global_invstd", self, "scale", (c.input_size,))
        self.stem = _Stem(c, at.at("embed"))
        rows = c.bias_max_distance * (1 if c.bias_symmetric else 2)
        table = "relative_attention_bias_layer.bias_values.weight"
        at.parameter(table, self, "distances", (rows, c.num_attention_heads))
        self.blocks = ModuleList(_Block(c, at.at(f"encoders.{i}")) for i in range(c.num_blocks))
        self.projectors = ModuleList(
            PlainMLP(
                b, width, hidden, "gelu",
                up=f"up_proj_for_{name}", down=f"down_proj_for_{name}", outputs=hidden,
            )
            for name in _PROJECTIONS
        )  # fmt: skip

    def run(self, mel: Tensor, beside_images: bool) -> Pieces[Tensor]:
        """[frames, bins] -> [tokens, hidden]."""
        x = self.stem((mel.to(self.dtype) - self.mean) * self.scale)
        count = len(x)
        pieces = -(-count // _LONGEST)
        if pieces > 1:
            x = F.pad(x, (0, 0, 0, pieces * _LONGEST - count))
        x = x.unflatten(0, (pieces, -1))
        bias = self._bias(x.shape[1])
        for block in self.blocks:
            x = block(x, bias)
            yield x.shape[0] * x.shape[1]
        out: Tensor = self.projectors[beside_images](x.flatten(0, 1)[:count])
        return out

    def _bias(self, frames: int) -> Tensor:
        """[heads, frames, frames]: biases by distance."""
        most, positions = self.config.bias_max_distance, torch.arange(frames)
        distances = (positions - positions[:, None]).clamp(-most, most - 1)
        rows = (
            distances.abs().clamp(max=most - 1) if self.config.bias_symmetric else distances + most
        )
        return self.distances[rows.to(self.distances.device)].permute(2, 0, 1).contiguous()
