"""VibeVoice ASR (arXiv 2508.19205): two causal convolutional encoders of sound before Qwen 2.

The acoustic encoder was trained with noise on its outputs. None is added here, so that the same
sound gives the same answer (`sample=False` in transformers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, size
from modulm_towers import (
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    Tower,
    tiny_text,
)

__all__ = ["VibeVoiceAsrConfig", "VibeVoiceAsrForConditionalGeneration"]

_EPS = 1e-6
#: The end of what each convolution has read before.
Past = dict[Module, Tensor]


@frozen(kw_only=True)
class _TowerConfig:
    """`acoustic_tokenizer_encoder_config` and the semantic one's. num_filters: channels of the
    first stage, doubled by each of downsampling_ratios. depths: blocks of each stage.
    """

    channels: int = size(1)
    hidden_size: int = size(64)
    kernel_size: int = size(7)
    num_filters: int = size(32)
    downsampling_ratios: tuple[int, ...] = (2, 2, 4, 5, 5, 8)
    depths: tuple[int, ...] = (3, 3, 3, 3, 3, 3, 8)
    ffn_expansion: int = size(4)
    hidden_act: str = "gelu"
    rms_norm_eps: float = 1e-5

    def __attrs_post_init__(self) -> None:
        if len(self.depths) != len(self.downsampling_ratios) + 1:
            raise ValueError("depths: one more than downsampling_ratios")
        if any(number < 1 for number in (*self.depths, *self.downsampling_ratios)):
            raise ValueError("depths, downsampling_ratios: must be positive")
        if self.channels != 1:
            raise ValueError("channels: must be 1")

    @property
    def hop(self) -> int:
        """Samples per token."""
        count = 1
        for ratio in self.downsampling_ratios:
            count *= ratio
        return count


@frozen(kw_only=True)
class _Keys:
    """acoustic_tokenizer_chunk_size: samples that are encoded at once."""

    acoustic_tokenizer_chunk_size: int = size(1440000)


@frozen(eq=False, kw_only=True)
class VibeVoiceAsrConfig(MultimodalConfig):
    """config.json of VibeVoice ASR. semantic: settings of the second encoder."""

    audio_type: ClassVar[type | None] = _TowerConfig
    audio_key = "acoustic_tokenizer_encoder_config"
    top_level_type: ClassVar[type | None] = _Keys

    semantic: _TowerConfig

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        table = keys.get("semantic_tokenizer_encoder_config")
        if not isinstance(table, Mapping):
            raise CheckpointError(f"{file}: semantic_tokenizer_encoder_config: must be a table")
        semantic = read_config(table, _TowerConfig, file)
        acoustic = read_config(keys[cls.audio_key], _TowerConfig, file)
        if semantic.hop != acoustic.hop:
            raise CheckpointError(f"{file}: downsampling_ratios: differ between the encoders")
        if keys["acoustic_tokenizer_chunk_size"] % acoustic.hop:
            raise CheckpointError(
                f"{file}: acoustic_tokenizer_chunk_size: not a multiple of {acoustic.hop}"
            )
        return {"semantic": semantic}


class _Causal(Module):
    """A convolution over time that continues where it stopped before."""

    def __init__(
        self, b: Builder, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = Convolution(b, "conv", inputs, outputs, (kernel,), stride=stride, groups=groups)
        self.inputs, self.before = inputs, kernel - stride

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """x: [time, inputs] -> [time / stride, outputs]."""
        known = past.get(self)
        known = x.new_zeros(self.before, self.inputs) if known is None else known
        x = torch.cat([known, x])
        past[self] = x[len(x) - self.before :]
        out: Tensor = self.conv(x.T[None])[0].T
        return out.contiguous()


class _Block(Module):
    """A depthwise convolution and a feed-forward block, each added with learned factors."""

    factor: Tensor
    mlp_factor: Tensor

    def __init__(self, c: _TowerConfig, width: int, b: Builder) -> None:
        super().__init__()
        self.norm = b.rms_norm("norm", width, c.rms_norm_eps)
        self.mixer = _Causal(b.at("mixer"), width, width, c.kernel_size, groups=width)
        self.mlp_norm = b.rms_norm("ffn_norm", width, c.rms_norm_eps)
        self.mlp = PlainMLP(
            b.at("ffn"), width, c.ffn_expansion * width, c.hidden_act, up="linear1", down="linear2"
        )
        b.parameter("gamma", self, "factor", (width,))
        b.parameter("ffn_gamma", self, "mlp_factor", (width,))

    def forward(self, x: Tensor, past: Past) -> Tensor:
        """x: [time, width]."""
        x = x + self.mixer(self.norm(x), past) * self.factor
        out: Tensor = x + self.mlp(self.mlp_norm(x)) * self.mlp_factor
        return out


class _Tower(Tower):
    """Samples to tokens; every stage halves the time axis or shortens it more."""

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.dtype = b.shared.dtype
        width = c.num_filters
        self.stages = ModuleList([_Causal(b.at("stem.conv"), c.channels, width, c.kernel_size)])
        self.stages.extend(_Block(c, width, b.at(f"stem.stage.{i}")) for i in range(c.depths[0]))
        for index, ratio in enumerate(c.downsampling_ratios):
            at = b.at(f"conv_layers.{index}")
            self.stages.append(_Causal(at.at("conv"), width, 2 * width, 2 * ratio, ratio))
            width *= 2
            blocks = range(c.depths[index + 1])
            self.stages.extend(_Block(c, width, at.at(f"stage.{i}")) for i in blocks)
        self.stages.append(_Causal(b.at("head"), width, c.hidden_size, c.kernel_size))

    def run(self, samples: Tensor, chunk: int) -> Pieces[Tensor]:
        """samples: [n], a multiple of the hop -> [tokens, hidden]; `chunk` samples at a time."""
        past: Past = {}
        tokens = []
        for part in samples.to(self.dtype)[:, None].split(chunk):
            x = part
            for stage in self.stages:
                x = stage(x, past)
            tokens.append(x)
            yield len(x)
        return torch.cat(tokens)


class _Projector(Module):
    """Two layers with a norm between them."""

    def __init__(self, b: Builder, kind: str, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first = b.linear(f"{kind}_linear_1", inputs, hidden, bias=True, split=False)
        self.norm = b.rms_norm(f"{kind}_norm", hidden, _EPS)
        self.second = b.linear(f"{kind}_linear_2", hidden, hidden, bias=True, split=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.norm(self.first(x)))
        return out


class VibeVoiceAsrForConditionalGeneration(MultimodalModel):
    """VibeVoice ASR: an hour of speech at 24 kHz, 7.5 tokens per second."""

    api = 1
    config_type: ClassVar[type] = VibeVoiceAsrConfig
    media = ("audio",)
    names = WeightNames(rename=((r"^model\.(acoustic|semantic)_tokenizer", r"\1_tokenizer"),))

    def make_encoders(self, config: VibeVoiceAsrConfig, b: Builder) -> None:
        kinds = (("acoustic", config.audio), ("semantic", config.semantic))
        at = b.at("multi_modal_projector")
        self.towers = ModuleList(_Tower(c, b.at(f"{kind}_tokenizer_encoder")) for kind, c in kinds)
        self.projectors = ModuleList(
            _Projector(at, kind, c.hidden_size, config.hidden_size) for kind, c in kinds
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        hop, embeddings = self.config.audio.hop, []
        for item in items:
            samples = self.tensor(item, "input_values").reshape(-1)
            tokens = []
            for tower, projector in zip(self.towers, self.projectors, strict=True):
                states = yield from tower.run(
                    samples, self.config.top_level.acoustic_tokenizer_chunk_size
                )
                tokens.append(projector(states))
            heard = int(item.tensors["padding_mask"].sum())
            embeddings.append((tokens[0] + tokens[1])[: -(-heard // hop)])
        return embeddings

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        encoder = {
            "model_type": "vibevoice_acoustic_tokenizer_encoder",
            "hidden_size": 16,
            "kernel_size": 3,
            "num_filters": 2,
            "downsampling_ratios": [2, 2, 4, 5, 5, 8],
            "depths": [1, 1, 1, 1, 1, 1, 2],
            "ffn_expansion": 2,
            "layer_scale_init_value": 0.5,
            "vae_std": 0.0,
        }
        return {
            "architectures": ["VibeVoiceAsrForConditionalGeneration"],
            "model_type": "vibevoice_asr",
            "audio_token_id": 480,
            "audio_bos_token_id": 481,
            "audio_eos_token_id": 482,
            "acoustic_tokenizer_chunk_size": 6400,
            "tie_word_embeddings": False,
            "text_config": tiny_text("qwen2"),
            "acoustic_tokenizer_encoder_config": encoder,
            "semantic_tokenizer_encoder_config": {**encoder, "hidden_size": 24},
        }
