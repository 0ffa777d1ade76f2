"""The audio encoders of Qwen2.5-Omni and Qwen3-Omni (arXiv 2503.20215, 2509.17765), for audio of
any length in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.nn import Builder
from modulm_layers import PlainMLP, size
from modulm_towers import (
    Convolution,
    Pieces,
    WhisperTower,
    WhisperTowerConfig,
    halved,
    sinusoids,
    through,
    whisper_blocks,
)

__all__ = [
    "OmniHearingConfig",
    "Qwen3Hearing",
    "Qwen3HearingConfig",
    "Qwen25Hearing",
    "Stem",
    "thirds",
]

#: Chunks per convolution call.
_CHUNKS = 32


@frozen(kw_only=True)
class OmniHearingConfig(WhisperTowerConfig):
    """`audio_config` of Qwen2.5-Omni; n_window: half the frames of a chunk."""

    n_window: int = size(100)
    output_dim: int = size()


@frozen(kw_only=True)
class Qwen3HearingConfig(OmniHearingConfig):
    """`audio_config` of Qwen3-Omni; n_window_infer: frames that attend to each other."""

    n_window: int = size(50)
    n_window_infer: int = size(800)
    downsample_hidden_size: int = size(480)


class Qwen25Hearing(WhisperTower):
    """Convolves and attends within chunks, with positions from 0 in each; two frames become a
    token.
    """

    def __init__(self, c: OmniHearingConfig, b: Builder) -> None:
        super().__init__(c, b, post="ln_post", learned=False)
        self.chunk = 2 * c.n_window
        self.projector = b.linear("proj", c.d_model, c.output_dim, bias=True, split=False)

    def hear(self, sounds: Sequence[Tensor]) -> Pieces[list[Tensor]]:
        """[bins, frames] of each sound -> [tokens, outputs] of each."""
        rows: list[Tensor] = []
        lengths: list[int] = []
        counts: list[int] = []
        for mel in sounds:
            whole = mel.shape[1] // self.chunk
            before = len(lengths)
            if whole:
                cut = mel[:, : whole * self.chunk].unflatten(1, (whole, self.chunk))
                x = self.stem(cut.transpose(0, 1))
                rows.append(x.flatten(0, 1))
                lengths += [x.shape[1]] * whole
            if mel.shape[1] % self.chunk:
                rows.append(self.stem(mel[None, :, whole * self.chunk :])[0])
                lengths.append(len(rows[-1]))
            counts.append(sum(lengths[before:]))
        states = yield from self.states(torch.cat(rows), lengths)
        parts = torch.split(states, counts)
        pooled = [halved(part) for part in parts]
        tokens = self.projector(self.norm(torch.cat(pooled)))
        return list(torch.split(tokens, [len(part) for part in pooled]))


class Stem(Module):
    """Three convolutions along time and frequency, in chunks; eight frames per token.

    whole_chunks: whether silence also fills a sound shorter than one chunk.
    """

    whole_chunks = False
    dtype: torch.dtype
    chunk: int
    convolutions: torch.nn.ModuleList
    out_of_stem: Module

    def stem(self, mel: Tensor) -> Tensor:
        """[bins, frames] -> [tokens, width], chunks with positions; the last of several is
        zero-padded, as is any with `whole_chunks`.
        """
        frames = mel.shape[1]
        count = -(-frames // self.chunk)
        filled = self.whole_chunks or count > 1
        mel = F.pad(mel, (0, count * self.chunk - frames)) if filled else mel
        cut = mel.unflatten(1, (count, -1)).transpose(0, 1)[:, None].to(self.dtype)
        chunks = []
        for part in cut.split(_CHUNKS):
            x = part
            for convolution in self.convolutions:
                x = F.gelu(convolution(x))
            chunks.append(self.out_of_stem(x.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)))
        x = torch.cat(chunks).unflatten(0, (count, -1))
        x = x + sinusoids(x.shape[1], x.shape[2]).to(x.device, x.dtype)
        last = frames - (count - 1) * self.chunk
        return x.flatten(0, 1)[: (count - 1) * x.shape[1] + thirds(last)]


class Qwen3Hearing(Stem):
    """Convolves chunks along time and frequency, eight frames per token, with positions from 0 in
    each; attention spans a window of several chunks.

    whole_chunks: whether silence also fills a sound shorter than one chunk.
    """

    def __init__(self, c: Qwen3HearingConfig, b: Builder, *, whole_chunks: bool = False) -> None:
        super().__init__()
        self.whole_chunks = whole_chunks
        self.dtype, self.chunk = b.shared.dtype, 2 * c.n_window
        self.ratio = max(c.n_window_infer // self.chunk, 1)
        wide = c.downsample_hidden_size
        self.convolutions = torch.nn.ModuleList(
            Convolution(b, f"conv2d{i + 1}", wide if i else 1, wide, (3, 3), stride=2, padding=1)
            for i in range(3)
        )
        inputs = wide * thirds(c.num_mel_bins)
        self.out_of_stem = b.linear("conv_out", inputs, c.d_model, split=False)
        self.layers = whisper_blocks(c, b)
        self.norm = b.layer_norm("ln_post", c.d_model, 1e-5)
        self.projector = PlainMLP(
            b, c.d_model, c.d_model, c.activation_function,
            up="proj1", down="proj2", outputs=c.output_dim,
        )  # fmt: skip

    def hear(self, sounds: Sequence[Tensor]) -> Pieces[list[Tensor]]:
        """[bins, frames] of each sound -> [tokens, outputs] of each."""
        rows = [self.stem(mel) for mel in sounds]
        window = thirds(self.chunk) * self.ratio
        lengths = [
            min(window, len(row) - first) for row in rows for first in range(0, len(row), window)
        ]
        x = yield from through(self.layers, torch.cat(rows), lengths)
        tokens: Tensor = self.projector(self.norm(x))
        return list(torch.split(tokens, [len(row) for row in rows]))


def thirds(count: int) -> int:
    """Return the length after three convolutions that halve it."""
    for _ in range(3):
        count = (count + 1) // 2
    return count
