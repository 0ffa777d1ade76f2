"""Whisper's encoder (arXiv 2212.04356), which many models use for audio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.errors import UnsupportedError
from modulm.nn import Rewrite
from modulm_layers import size
from modulm_towers.blocks import Block, BlockNames, BlockShape
from modulm_towers.convolution import Convolution
from modulm_towers.pieces import Pieces, Tower, through

if TYPE_CHECKING:
    from modulm.nn import Builder

__all__ = [
    "WHISPER_BLOCK",
    "WhisperTower",
    "WhisperTowerConfig",
    "encode_sounds",
    "halved",
    "sinusoids",
    "tiny_audio",
    "whisper_blocks",
    "zero_key_biases",
]

_EPS = 1e-5
#: Names of a block's parts; those after attention are not nested.
WHISPER_BLOCK = BlockNames(norm1="self_attn_layer_norm", norm2="final_layer_norm", mlp="")


@frozen(kw_only=True)
class WhisperTowerConfig:
    """`audio_config`, with Whisper's names or those of later files."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "intermediate_size": "encoder_ffn_dim",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    model_type: str = ""
    num_mel_bins: int = size(80)
    d_model: int = size()
    encoder_layers: int = size()
    encoder_attention_heads: int = size()
    encoder_ffn_dim: int = size()
    max_source_positions: int = size(1500)
    activation_function: str = "gelu"

    def __attrs_post_init__(self) -> None:
        if self.d_model % self.encoder_attention_heads:
            raise ValueError("encoder_attention_heads: does not divide d_model")


class WhisperTower(Tower):
    """Two convolutions, the second of which halves the time axis, then positions and blocks.

    post: name of the last norm. learned: whether positions are stored in the checkpoint. chunk:
    positions of a chunk, as in `BlockShape`.
    """

    positions: Tensor

    def __init__(
        self,
        c: WhisperTowerConfig,
        b: Builder,
        *,
        post: str = "layer_norm",
        learned: bool = True,
        chunk: int = 0,
    ) -> None:
        super().__init__()
        width, self.config, self.dtype = c.d_model, c, b.shared.dtype
        self.conv1 = Convolution(b, "conv1", c.num_mel_bins, width, (3,), padding=1)
        self.conv2 = Convolution(b, "conv2", width, width, (3,), stride=2, padding=1)
        self.learned = learned
        if learned:
            shape = (c.max_source_positions, width)
            b.parameter("embed_positions.weight", self, "positions", shape)
        self.layers = whisper_blocks(c, b, chunk)
        self.norm = b.layer_norm(post, width, _EPS)

    def stem(self, mel: Tensor) -> Tensor:
        """[n, bins, frames] -> [n, frames / 2, width], with positions added."""
        x = F.gelu(self.conv1(mel.to(self.dtype)))
        x = F.gelu(self.conv2(x)).transpose(1, 2).contiguous()
        count, most = x.shape[1], self.config.max_source_positions
        if count > most:
            raise UnsupportedError(f"audio of {count} positions: the encoder supports {most}")
        table = self.positions[:count] if self.learned else sinusoids(count, x.shape[2])
        return (x + table.to(x.device, x.dtype)).contiguous()

    def states(self, x: Tensor, lengths: Sequence[int]) -> Pieces[Tensor]:
        """[positions of all sounds, width] after the blocks; lengths: positions of each sound."""
        return through(self.layers, x, lengths)

    def run(self, mel: Tensor) -> Pieces[Tensor]:
        """[n, bins, frames] -> [n, frames / 2, width] after the last norm."""
        x = self.stem(mel)
        encoded = yield from self.states(x.flatten(0, 1), [x.shape[1]] * len(x))
        out: Tensor = self.norm(encoded).view(x.shape)
        return out


def whisper_blocks(c: WhisperTowerConfig, b: Builder, chunk: int = 0) -> ModuleList:
    """The blocks under `layers`; chunk as in `BlockShape`."""
    shape = BlockShape(
        hidden=c.d_model, inner=c.encoder_ffn_dim, heads=c.encoder_attention_heads,
        act=c.activation_function, eps=_EPS, names=WHISPER_BLOCK,
        chunk=chunk,
    )  # fmt: skip
    return ModuleList(Block(b.at(f"layers.{i}"), shape) for i in range(c.encoder_layers))


def encode_sounds(tower: WhisperTower, mel: Tensor, frames: Sequence[int]) -> Pieces[Tensor]:
    """[tokens of all sounds, width]: encode padded sounds [n, bins, frames].

    frames: unpadded length of each sound; padding is not attended to. Pairs of positions are
    averaged into one token.
    """
    counts = [(n - 1) // 2 + 1 for n in frames]
    rows = tower.stem(mel)
    x = torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
    encoded = yield from tower.states(x, counts)
    parts = torch.split(encoded, counts)
    out: Tensor = tower.norm(torch.cat([halved(part) for part in parts]))
    return out


def halved(x: Tensor) -> Tensor:
    """[n, width] -> [n // 2, width], the means of pairs."""
    return x[: len(x) // 2 * 2].view(-1, 2, x.shape[1]).mean(1)


def sinusoids(count: int, width: int, longest: float = 10000.0) -> Tensor:
    """[count, width] float32 positions: sines, then cosines, with wavelengths up to `longest`."""
    half = width // 2
    waves = torch.exp(-math.log(longest) / max(half - 1, 1) * torch.arange(half).float())
    angles = torch.arange(count)[:, None] * waves
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def zero_key_biases(pattern: str = r"audio_tower\.") -> Rewrite:
    """Rewrite that adds zero biases to key projections, which Whisper's files omit."""

    def change(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        bias = name.removesuffix("weight") + "bias"
        return [(name, tensor), (bias, tensor.new_zeros(len(tensor)))]

    return Rewrite(rf"{pattern}.*\.k_proj\.weight$", change)


def tiny_audio(model_type: str, **more: Any) -> dict[str, Any]:
    """`audio_config` of a tiny checkpoint, with Whisper's names; one second of sound."""
    return {
        "model_type": model_type,
        "num_mel_bins": 16,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "max_source_positions": 50,
        **more,
    }
