"""MiDashengLM (arXiv 2508.03983): Dasheng's encoder of sound before Qwen 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import AttentionNames, PlainMLP, only, size
from modulm_towers import (
    Block,
    BlockNames,
    BlockShape,
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    tiny_text,
)

__all__ = ["MiDashengLMConfig", "MiDashengLMModel"]

_EPS, _BATCH_EPS = 1e-6, 1e-5
_NAMES = BlockNames(
    norm1="norm1",
    attn="attn",
    projections=AttentionNames("q", "k", "v", "proj", "qkv"),
    norm2="norm2",
)


def _pair(value: Any) -> tuple[int, int]:
    """A number for both axes, or one for each."""
    pair = (value, value) if type(value) is int else tuple(value)
    if len(pair) != 2 or any(type(number) is not int or number < 1 for number in pair):
        raise ValueError(f"patch_size, patch_stride: {value!r} is no size of patches")
    return pair


@frozen(kw_only=True)
class _TowerConfig:
    """`audio_encoder_config`. patch_size, patch_stride: of frequency and time. target_length:
    frames that attend to each other.
    """

    embed_dim: int = size(768)
    depth: int = size(12)
    num_heads: int = size(12)
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    init_values: float | None = None
    patch_size: Any = 16
    patch_stride: Any = 16
    input_channels: int = size(1)
    target_length: int = size(1012)
    n_mels: int = size(64)
    hop_length: int = size(160)

    def __attrs_post_init__(self) -> None:
        only(self, input_channels=(1,))
        _pair(self.patch_size)
        if self.embed_dim % self.num_heads:
            raise ValueError("num_heads: does not divide embed_dim")
        if self.n_mels < self.strides[0] or self.target_length < self.strides[1]:
            raise ValueError("patch_stride: larger than n_mels and target_length")

    @property
    def strides(self) -> tuple[int, int]:
        """Bins and frames from one patch to the next."""
        return _pair(self.patch_stride)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of a part in frequency and time."""
        return self.n_mels // self.strides[0], self.target_length // self.strides[1]


@frozen(kw_only=True)
class _Keys:
    """subsample_factor: patches that one token is made of."""

    subsample_factor: int = size(5)


@frozen(eq=False, kw_only=True)
class MiDashengLMConfig(MultimodalConfig):
    """config.json of MiDashengLM. The axes of its positions are equal: sounds count like text."""

    audio_type: ClassVar[type | None] = _TowerConfig
    audio_key = "audio_encoder_config"
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        text, audio = table.get("text_config"), table.get(cls.audio_key)
        if not isinstance(text, Mapping) or not isinstance(audio, Mapping):
            raise CheckpointError(f"{file}: text_config, {cls.audio_key}: must be tables")
        text = {**text, "model_type": "qwen2"}
        for key in ("rope_scaling", "rope_parameters"):
            if "mrope_section" in (text.get(key) or {}):
                theta = text[key].get("rope_theta", text.get("rope_theta"))
                text = {**text, key: None, **({} if theta is None else {"rope_theta": theta})}
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            audio=read_config(audio, _TowerConfig, file),
            top_level=read_config(dict(table), _Keys, file),
        )


class _Tower(Tower):
    """Encodes the spectrogram of one sound, in parts of `target_length` frames."""

    mean: Tensor
    var: Tensor
    weight: Tensor
    bias: Tensor
    of_time: Tensor
    of_frequency: Tensor

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype, width = c, b.shared.dtype, c.embed_dim
        for name in ("running_mean", "running_var", "weight", "bias"):
            b.parameter(f"init_bn.{name}", self, name.removeprefix("running_"), (c.n_mels,))
        kernel = _pair(c.patch_size)
        self.patches = Convolution(b, "patch_embed.proj", 1, width, kernel, stride=c.strides)
        rows, columns = c.grid
        b.parameter("time_pos_embed", self, "of_time", (1, width, 1, columns))
        b.parameter("freq_pos_embed", self, "of_frequency", (1, width, rows, 1))
        shape = BlockShape(
            hidden=width, inner=int(width * c.mlp_ratio), heads=c.num_heads, act="gelu", eps=_EPS,
            bias=c.qkv_bias, scales=("ls1.gamma", "ls2.gamma") if c.init_values else None,
            names=_NAMES,
        )  # fmt: skip
        self.blocks = ModuleList(Block(b.at(f"blocks.{i}"), shape) for i in range(c.depth))
        self.norm = b.layer_norm("norm", width, _EPS)

    def run(self, mel: Tensor, heard: int) -> Pieces[Tensor]:
        """mel: [bins, frames] -> [patches, width]; heard: patches in time that are attended to."""
        x = F.batch_norm(
            mel.to(self.dtype).T, self.mean, self.var, self.weight, self.bias, eps=_BATCH_EPS
        )
        x = self.patches(x.T[None, None])
        outputs, first = [], 0
        for part in x.split(self.config.grid[1], dim=-1):
            count = part.shape[-1]
            at = part + self.of_time[..., :count] + self.of_frequency
            rows = at[0].flatten(1).T.contiguous()
            seen = (torch.arange(count) + first < heard).repeat(at.shape[2])
            unseen = None if seen.all() or not seen.any() else ~seen.to(x.device)
            for block in self.blocks:
                rows = block(rows, [len(rows)], None, unseen)
                yield len(rows)
            outputs.append(self.norm(rows))
            first += count
        return torch.cat(outputs)


class MiDashengLMModel(MultimodalModel):
    """MiDashengLM: speech, sounds and music."""

    api = 1
    config_type: ClassVar[type] = MiDashengLMConfig
    media = ("audio",)
    names = WeightNames(
        rename=((r"^decoder\.", ""),),
        ignore=(r"^audio_encoder\.front_end\.", r"\.num_batches_tracked$"),
    )

    def make_encoders(self, config: MiDashengLMConfig, b: Builder) -> None:
        width, merged = config.audio.embed_dim, config.top_level.subsample_factor
        self.tower = _Tower(config.audio, b.at("audio_encoder"))
        self.projector = PlainMLP(
            b.at("audio_projector"), merged * width, config.hidden_size, "gelu",
            up="net.0", down="net.2", outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        merged, stride = self.config.top_level.subsample_factor, self.config.audio.strides[1]
        embeddings = []
        for item in items:
            samples = int(item.tensors["samples"].reshape(-1)[0])
            heard = samples // (self.config.audio.hop_length * stride)
            x = yield from self.tower.run(self.tensor(item, "input_features"), heard)
            count = len(x) // merged
            embeddings.append(self.projector(x[: count * merged].reshape(count, -1)))
        return embeddings

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["MiDashengLMModel"],
            "model_type": "midashenglm",
            "audio_token_id": 480,
            "subsample_factor": 5,
            "text_config": {**tiny_text("qwen2"), "tie_word_embeddings": False},
            "audio_encoder_config": {
                "embed_dim": 32,
                "depth": 2,
                "num_heads": 2,
                "mlp_ratio": 2.0,
                "init_values": 0.1,
                "patch_size": [16, 4],
                "patch_stride": [16, 4],
                "target_length": 48,
                "n_mels": 16,
            },
        }
