"""BigVGAN (arXiv 2206.04658): spectrograms to samples, in float32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.nn import Builder
from modulm_layers import size
from modulm_qwen.snake import Snake
from modulm_speakers.codec import Float32Module

__all__ = ["BigVgan", "BigVganConfig", "Convolution"]

#: Of the spectrogram, in decibels.
_LEAST_DB, _REFERENCE_DB = -115, 20
_TAPS = 12


@frozen(kw_only=True)
class BigVganConfig:
    """`bigvgan_config`."""

    mel_dim: int = size(80)
    upsample_initial_channel: int = size(1536)
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    upsample_rates: tuple[int, ...] = (5, 3, 2, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (11, 7, 4, 4, 4, 4)


class Convolution(Float32Module):
    """A convolution that keeps the length. mirrored: what is beyond the ends is a reflection."""

    def __init__(
        self, b: Builder, name: str, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1,
        *, mirrored: bool = False, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dilation, self.mirrored, self.biased = dilation, mirrored, bias
        around = (kernel - 1) * dilation
        self.pads = (around // 2, around - around // 2)
        self.add(b, f"{name}.weight", "weight", outputs, inputs, kernel)
        if bias:
            self.add(b, f"{name}.bias", "bias", outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, time] -> [n, outputs, time]."""
        if sum(self.pads):
            x = F.pad(x, self.pads, mode="reflect" if self.mirrored else "constant")
        return F.conv1d(x, self.weight, self.bias if self.biased else None, dilation=self.dilation)


class _Snake(Snake):
    """Computed at twice the rate, so that nothing is aliased."""

    def __init__(self, b: Builder, name: str, channels: int) -> None:
        super().__init__(b, f"{name}.act", channels)

    def forward(self, x: Tensor) -> Tensor:
        taps = _low_pass(x.device).expand(x.shape[1], 1, -1)
        pad = _TAPS // 2 - 1
        x = F.pad(x, (pad, pad), mode="replicate")
        x = 2 * F.conv_transpose1d(x, taps, stride=2, groups=len(taps))
        cut = 2 * pad + (_TAPS - 2) // 2
        x = x[..., cut:-cut]
        x = F.pad(self.activate(x), (_TAPS // 2 - 1, _TAPS // 2), mode="replicate")
        return F.conv1d(x, taps, stride=2, groups=len(taps))


def _low_pass(device: torch.device) -> Tensor:
    """A sinc with Kaiser's window that halves the rate: [taps]."""
    half = _TAPS // 2
    attenuation = 2.285 * (half - 1) * math.pi * 4 * 0.3 + 7.95
    beta = 0.1102 * (attenuation - 8.7)
    window = torch.kaiser_window(_TAPS, periodic=False, beta=beta, device=device)
    places = torch.arange(-half, half, device=device) + 0.5
    taps = 0.5 * window * torch.sinc(0.5 * places)
    return taps / taps.sum()


class _Residual(Module):
    def __init__(self, b: Builder, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[Module] = []
        for place, dilation in enumerate(dilations):
            layers += [
                _Snake(b, f"activations.{2 * place}", channels),
                Convolution(b, f"convs1.{place}", channels, channels, kernel, dilation),
                _Snake(b, f"activations.{2 * place + 1}", channels),
                Convolution(b, f"convs2.{place}", channels, channels, kernel),
            ]
        self.layers = ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for place in range(0, len(self.layers), 4):
            inner = x
            for layer in self.layers[place : place + 4]:
                inner = layer(inner)
            x = x + inner
        return x


class _Upsampling(Float32Module):
    def __init__(self, b: Builder, inputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.stride, self.cut = stride, (kernel - stride) // 2
        self.add(b, "weight", "weight", inputs, inputs // 2, kernel)
        self.add(b, "bias", "bias", inputs // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(x, self.weight, self.bias, self.stride, self.cut)


class BigVgan(Module):
    """Spectrograms to samples."""

    def __init__(self, c: BigVganConfig, b: Builder) -> None:
        super().__init__()
        channels = c.upsample_initial_channel
        self.first = Convolution(b, "conv_pre", c.mel_dim, channels, 7)
        self.ups, self.residuals = ModuleList(), ModuleList()
        self.count = len(c.resblock_kernel_sizes)
        kinds = tuple(zip(c.resblock_kernel_sizes, c.resblock_dilation_sizes, strict=True))
        rates = zip(c.upsample_rates, c.upsample_kernel_sizes, strict=True)
        for index, (rate, kernel) in enumerate(rates):
            self.ups.append(_Upsampling(b.at(f"ups.{index}.0"), channels, kernel, rate))
            channels //= 2
            for kind in kinds:
                at = b.at(f"resblocks.{len(self.residuals)}")
                self.residuals.append(_Residual(at, channels, *kind))
        self.snake = _Snake(b, "activation_post", channels)
        self.last = Convolution(b, "conv_post", channels, 1, 7, bias=False)

    def forward(self, mel: Tensor) -> Tensor:
        """[1, frames, mel_dim], logarithms of amplitudes -> [samples]."""
        least = math.exp(_LEAST_DB / 20 * math.log(10))
        decibels = 20 * mel.transpose(1, 2).exp().clamp(min=least).log10() - _REFERENCE_DB
        x = self.first((2 * (decibels - _LEAST_DB) / -_LEAST_DB - 1).clamp(-1, 1))
        for index, up in enumerate(self.ups):
            x = up(x)
            own = self.residuals[index * self.count : (index + 1) * self.count]
            x = torch.stack([residual(x) for residual in own]).sum(0) / self.count
        samples: Tensor = self.last(self.snake(x))
        return samples.clamp(-1, 1).flatten()
