"""Qwen2.5-Omni's codec (arXiv 2503.20215): codes to sound, in float32, once all are known.

A diffusion transformer (arXiv 2212.09748) turns noise into a spectrogram, led by the codes and by
how a voice sounds; BigVGAN (arXiv 2206.04658) turns the spectrogram into samples.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.errors import CheckpointError
from modulm.nn import Builder
from modulm_layers import size
from modulm_qwen.bigvgan import BigVgan, BigVganConfig, Convolution
from modulm_speakers.codec import Float32Module

__all__ = ["DiTConfig", "Token2Wav", "Voice"]

_EPS, _LEAST = 1e-6, 1e-12
_TIME_WIDTH, _TIME_SCALE = 256, 1000
#: Points in time of the solver, how strongly codes and voice lead, and how the points are moved.
_STEPS, _GUIDANCE, _SWAY = 10, 0.5, -1.0


@frozen(kw_only=True)
class DiTConfig:
    """`dit_config`."""

    hidden_size: int = size(1024)
    num_hidden_layers: int = size(22)
    num_attention_heads: int = size(16)
    ff_mult: int = size(2)
    emb_dim: int = size(512)
    head_dim: int = size(64)
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float = 10000.0
    max_position_embeddings: int = size(32768)
    block_size: int = size(24)
    look_ahead_layers: tuple[int, ...] = (10,)
    look_backward_layers: tuple[int, ...] = (0, 20)
    repeats: int = size(2)
    num_embeds: int = size(8193)
    mel_dim: int = size(80)
    enc_emb_dim: int = size(192)
    enc_dim: int = size(128)
    enc_channels: tuple[int, ...] = (256, 256, 256, 256, 768)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = size(64)
    enc_res2net_scale: int = size(2)
    enc_se_channels: int = size(64)

    @property
    def theta(self) -> float:
        """Base of the rotary angles."""
        return float((self.rope_parameters or {}).get("rope_theta", self.rope_theta))


@frozen(eq=False)
class Voice:
    """How a voice sounds. vector: [1, enc_emb_dim]. mel: [1, frames, mel_dim], of a recording."""

    vector: Tensor
    mel: Tensor


class _Linear(Float32Module):
    def __init__(self, b: Builder, name: str, inputs: int, outputs: int) -> None:
        super().__init__()
        self.add(b, f"{name}.weight", "weight", outputs, inputs)
        self.add(b, f"{name}.bias", "bias", outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Tdnn(Module):
    """A layer of a time delay network."""

    def __init__(
        self, b: Builder, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1
    ) -> None:
        super().__init__()
        self.conv = Convolution(b, "conv", inputs, outputs, kernel, dilation, mirrored=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class _Res2Net(Module):
    """A block of ECAPA-TDNN (arXiv 2005.07143): parts of the channels, one after the other, and a
    gate for each channel.
    """

    def __init__(self, c: DiTConfig, b: Builder, index: int) -> None:
        super().__init__()
        inputs, outputs = c.enc_channels[index - 1], c.enc_channels[index]
        kernel, dilation = c.enc_kernel_sizes[index], c.enc_dilations[index]
        self.parts, inner = c.enc_res2net_scale, c.enc_se_channels
        self.first = _Tdnn(b.at("tdnn1"), inputs, outputs)
        width = outputs // self.parts
        at = b.at("res2net_block")
        self.blocks = ModuleList(
            _Tdnn(at.at(f"blocks.{place}"), width, width, kernel, dilation)
            for place in range(self.parts - 1)
        )
        self.last = _Tdnn(b.at("tdnn2"), outputs, outputs)
        self.squeeze = Convolution(b, "se_block.conv1", outputs, inner)
        self.excite = Convolution(b, "se_block.conv2", inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        before = x
        first, *others = self.first(x).chunk(self.parts, 1)
        done = [first]
        for place, (block, part) in enumerate(zip(self.blocks, others, strict=True)):
            done.append(block(part + done[-1] if place else part))
        x = self.last(torch.cat(done, 1))
        gate = self.excite(F.relu(self.squeeze(x.mean(2, keepdim=True)))).sigmoid()
        return x * gate + before


class _VoiceEncoder(Module):
    """Spectrograms to vectors of how the voice sounds: ECAPA-TDNN."""

    def __init__(self, c: DiTConfig, b: Builder) -> None:
        super().__init__()
        channels, kernels, dilations = c.enc_channels, c.enc_kernel_sizes, c.enc_dilations
        self.first = _Tdnn(b.at("blocks.0"), c.mel_dim, channels[0], kernels[0], dilations[0])
        self.blocks = ModuleList(
            _Res2Net(c, b.at(f"blocks.{index}"), index) for index in range(1, len(channels) - 1)
        )
        last = channels[-1]
        self.mix = _Tdnn(b.at("mfa"), last, last, kernels[-1], dilations[-1])
        self.attend = _Tdnn(b.at("asp.tdnn"), 3 * last, c.enc_attention_channels)
        self.weigh = Convolution(b, "asp.conv", c.enc_attention_channels, last)
        self.out = Convolution(b, "fc", 2 * last, c.enc_dim)

    def forward(self, mel: Tensor) -> Tensor:
        """[n, frames, mel_dim] -> [n, enc_dim]."""
        x, outputs = self.first(mel.transpose(1, 2)), []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        x = self.mix(torch.cat(outputs, 1))
        even = torch.full_like(x[:, :1], 1 / x.shape[2])
        about = [each[..., None].expand_as(x) for each in _statistics(x, even)]
        weights = self.weigh(self.attend(torch.cat([x, *about], 1)).tanh()).softmax(2)
        vector: Tensor = self.out(torch.cat(_statistics(x, weights), 1)[..., None])
        return vector[..., 0]


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over time: [n, channels] each."""
    mean = (weights * x).sum(2)
    variance = (weights * (x - mean[..., None]).square()).sum(2)
    return mean, variance.clamp(_LEAST).sqrt()


class _Block(Module):
    """A block of the transformer, changed by the point in time.

    reach: of attention, in blocks of frames: backward and ahead.
    """

    def __init__(self, c: DiTConfig, b: Builder, index: int) -> None:
        super().__init__()
        hidden, wide = c.hidden_size, c.num_attention_heads * c.head_dim
        self.heads = c.num_attention_heads
        self.reach = (int(index in c.look_backward_layers), int(index in c.look_ahead_layers))
        self.change = _Linear(b, "attn_norm.linear", hidden, 6 * hidden)
        self.q, self.k, self.v = (
            _Linear(b, f"attn.to_{name}", hidden, wide) for name in ("q", "k", "v")
        )
        self.out = _Linear(b, "attn.to_out.0", wide, hidden)
        self.up = _Linear(b, "ff.ff.0", hidden, c.ff_mult * hidden)
        self.down = _Linear(b, "ff.ff.3", c.ff_mult * hidden, hidden)

    def forward(
        self, x: Tensor, time: Tensor, turns: tuple[Tensor, Tensor], away: Tensor
    ) -> Tensor:
        """x: [n, frames, hidden]. away: [frames, frames], how many blocks each frame is ahead."""
        shift, scale, gate, shift2, scale2, gate2 = self.change(F.silu(time))[:, None].chunk(6, 2)
        q, k, v = (
            part(_normed(x) * (1 + scale) + shift).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        # Only the first head has rotary positions.
        q, k = (torch.cat([_turned(part[:, :1], *turns), part[:, 1:]], 1) for part in (q, k))
        backward, ahead = self.reach
        mask = (away >= -backward) & (away <= ahead)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + gate * self.out(seen.transpose(1, 2).flatten(2))
        inner = self.up(_normed(x) * (1 + scale2) + shift2)
        out: Tensor = x + gate2 * self.down(F.gelu(inner, approximate="tanh"))
        return out


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), eps=_EPS)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours: [n, heads, frames, head_dim]."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _Diffusion(Float32Module):
    """Codes and a voice to a spectrogram."""

    table: Tensor

    def __init__(self, c: DiTConfig, b: Builder) -> None:
        super().__init__()
        self.config, hidden = c, c.hidden_size
        self.add(b, "text_embed.codec_embed.weight", "table", c.num_embeds + 1, c.emb_dim)
        self.time1 = _Linear(b, "time_embed.time_mlp.0", _TIME_WIDTH, hidden)
        self.time2 = _Linear(b, "time_embed.time_mlp.2", hidden, hidden)
        self.encoder = _VoiceEncoder(c, b.at("input_embed.spk_encoder"))
        inputs = c.mel_dim + c.enc_dim + c.emb_dim + c.enc_emb_dim
        self.inputs = _Linear(b, "input_embed.proj", inputs, hidden)
        self.blocks = ModuleList(
            _Block(c, b.at(f"transformer_blocks.{index}"), index)
            for index in range(c.num_hidden_layers)
        )
        self.change = _Linear(b, "norm_out.linear", hidden, 2 * hidden)
        self.out = _Linear(b, "proj_out", hidden, c.mel_dim)

    def forward(self, codes: Tensor, voice: Voice, noise: Tensor) -> Tensor:
        """codes: [frames]; noise: [1, frames * repeats, mel_dim] -> a spectrogram of that shape.

        Solves the differential equation with the 3/8 rule of Runge and Kutta.
        """
        lead = self._lead(codes, voice)
        times = torch.linspace(0, 1, _STEPS, device=codes.device)
        times = times + _SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        x = noise
        for begin, end in pairwise(times):
            step = end - begin
            k1 = self._change(x, begin, lead)
            k2 = self._change(x + step * k1 / 3, begin + step / 3, lead)
            k3 = self._change(x + step * (k2 - k1 / 3), begin + step * 2 / 3, lead)
            k4 = self._change(x + step * (k1 - k2 + k3), end, lead)
            x = x + (k1 + 3 * (k2 + k3) + k4) * step / 8
        return x

    def _lead(self, codes: Tensor, voice: Voice) -> Tensor:
        """What leads the change, with codes and voice and without: [2, time, inputs - mel_dim]."""
        c = self.config
        embedded = self.table[torch.stack([codes, torch.zeros_like(codes)])]
        embedded = embedded.repeat_interleave(c.repeats, 1)
        mels = torch.cat([voice.mel, torch.zeros_like(voice.mel)])
        vectors = torch.cat([voice.vector, torch.zeros_like(voice.vector)])
        about = (self.encoder(mels), vectors)
        heard, vector = (each[:, None].expand(-1, embedded.shape[1], -1) for each in about)
        return torch.cat([heard, embedded, vector], 2)

    def _change(self, x: Tensor, time: Tensor, lead: Tensor) -> Tensor:
        """How the spectrogram changes at a point in time."""
        c = self.config
        half = _TIME_WIDTH // 2
        rates = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        angles = _TIME_SCALE * time * rates
        at = torch.cat([angles.sin(), angles.cos()])[None]
        embedded = self.time2(F.silu(self.time1(at))).expand(2, -1)
        places = torch.arange(x.shape[1], device=x.device)
        pairs = torch.arange(0, c.head_dim, 2, device=x.device) / c.head_dim
        turned = places[:, None] / c.theta**pairs
        blocks = places // c.block_size
        away = blocks[None] - blocks[:, None]
        hidden = self.inputs(torch.cat([x.expand(2, -1, -1), lead], 2))
        for block in self.blocks:
            hidden = block(hidden, embedded, (turned.cos(), turned.sin()), away)
        scale, shift = self.change(F.silu(embedded))[:, None].chunk(2, 2)
        led, free = self.out(_normed(hidden) * (1 + scale) + shift).chunk(2)
        change: Tensor = led + (led - free) * _GUIDANCE
        return change


class Token2Wav(Module):
    """Codes of a sound to its samples."""

    def __init__(self, dit: DiTConfig, vocoder: BigVganConfig, b: Builder) -> None:
        super().__init__()
        if dit.mel_dim != vocoder.mel_dim:
            raise CheckpointError("token2wav_config: mel_dim of its two parts differ")
        self.config, self.vocoder_config = dit, vocoder
        self.diffusion = _Diffusion(dit, b.at("code2wav_dit_model"))
        self.vocoder = BigVgan(vocoder, b.at("code2wav_bigvgan_model"))

    @property
    def frame_samples(self) -> int:
        """Samples of a code."""
        return self.config.repeats * math.prod(self.vocoder_config.upsample_rates)

    def forward(self, codes: Tensor, voice: Voice, generator: torch.Generator) -> Tensor:
        """codes: [n] -> [samples]. generator: of the noise, on the CPU."""
        shape = (1, len(codes) * self.config.repeats, self.config.mel_dim)
        noise = torch.randn(shape, generator=generator).to(codes.device)
        samples: Tensor = self.vocoder(self.diffusion(codes, voice, noise))
        return samples
