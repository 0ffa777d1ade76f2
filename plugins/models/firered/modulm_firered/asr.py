"""FireRedASR 2 (arXiv 2501.14350): a conformer before Qwen 2.

The conformer (arXiv 2005.08100) has layer norms in its convolutions, and norms of its own for
queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, size
from modulm_towers import (
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    distance_scores,
    distance_sines,
    through,
    tiny_text,
)

__all__ = [
    "FireRedAsr2Config",
    "FireRedAsr2ForConditionalGeneration",
    "FireRedTower",
    "FireRedTowerConfig",
]

_EPS = 1e-5
#: Channels of the first convolutions, and the empty frames that follow a sound.
_CHANNELS, _AFTER = 32, 6


@frozen(kw_only=True)
class FireRedTowerConfig:
    """`audio_encoder_conf`, or keys of FireRedLID. idim: bins of the spectrogram; pe_maxlen: frames
    at most.
    """

    idim: int = size(80, least=7)
    n_layers_enc: int = size(16)
    n_head: int = size(20)
    d_model: int = size(1280)
    kernel_size: int = size(33)
    pe_maxlen: int = size(5000)

    def __attrs_post_init__(self) -> None:
        if self.d_model % (2 * self.n_head):
            raise ValueError("n_head: does not divide d_model into pairs")
        if not self.kernel_size % 2:
            raise ValueError("kernel_size: must be odd")


@frozen(kw_only=True)
class _Keys:
    """encoder_downsample_rate: frames of the encoder that one token is made of."""

    encoder_downsample_rate: int = size(2)


@frozen(eq=False, kw_only=True)
class FireRedAsr2Config(MultimodalConfig):
    """config.json of FireRedASR 2: Qwen 2's keys beside those of the encoder."""

    audio_type: ClassVar[type | None] = FireRedTowerConfig
    audio_key = "audio_encoder_conf"
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        audio, nested = table.get(cls.audio_key), table.get("text_config")
        if not isinstance(audio, Mapping):
            raise CheckpointError(f"{file}: {cls.audio_key}: must be a table")
        text = {**(nested if isinstance(nested, Mapping) else table), "model_type": "qwen2"}
        return cls(
            text=TextConfig.from_table({**table, "text_config": text}, file),
            audio=read_config(audio, FireRedTowerConfig, file),
            top_level=read_config(dict(table), _Keys, file),
        )


class _Attention(Module):
    """Attention within one sound; scores include a term for query and distance."""

    of_keys: Tensor
    of_distances: Tensor

    def __init__(self, c: FireRedTowerConfig, b: Builder) -> None:
        super().__init__()
        self.heads, width = c.n_head, c.d_model
        self.norms = ModuleList(b.layer_norm(f"layer_norm_{x}", width, _EPS) for x in "qkv")
        self.maps = ModuleList(b.linear(f"w_{x}s", width, width, split=False) for x in "qkv")
        self.distances = b.linear("linear_pos", width, width, split=False)
        shape = (c.n_head, width // c.n_head)
        b.parameter("pos_bias_u", self, "of_keys", shape)
        b.parameter("pos_bias_v", self, "of_distances", shape)
        self.out = b.linear("fc", width, width, split=False)

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        """x: [frames, width]; distances: [2 * frames - 1, width], their sines."""
        pairs = zip(self.norms, self.maps, strict=True)
        q, k, v = (self._heads(linear(norm(x))) for norm, linear in pairs)
        p = self._heads(self.distances(distances))
        scale = q.shape[-1] ** -0.5
        scores = distance_scores(q + self.of_distances[:, None], p) * scale
        seen = F.scaled_dot_product_attention(
            q + self.of_keys[:, None], k, v, attn_mask=scores, scale=scale
        )
        out: Tensor = self.out(seen.transpose(0, 1).flatten(1))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[n, width] -> [heads, n, head_dim]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(0, 1)


class _Convolved(Module):
    """Gated depthwise convolution over time with layer norm."""

    def __init__(self, c: FireRedTowerConfig, b: Builder) -> None:
        super().__init__()
        width = c.d_model
        self.norm = b.layer_norm("pre_layer_norm", width, _EPS)
        self.up = Convolution(b, "pointwise_conv1", width, 4 * width, (1,), bias=False)
        self.depth = Convolution(
            b, "depthwise_conv", 2 * width, 2 * width, (c.kernel_size,),
            padding=c.kernel_size // 2, groups=2 * width, bias=False,
        )  # fmt: skip
        self.inner = b.layer_norm("batch_norm", 2 * width, _EPS)
        self.down = Convolution(b, "pointwise_conv2", 2 * width, width, (1,), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [frames, width] of one sound."""
        wide = self.depth(F.glu(self.up(self.norm(x).T[None]), dim=1))
        wide = F.silu(self.inner(wide[0].T.contiguous()))
        out: Tensor = self.down(wide.T[None])[0].T
        return out


class _Feed(Module):
    def __init__(self, c: FireRedTowerConfig, b: Builder) -> None:
        super().__init__()
        self.norm = b.layer_norm("net.0", c.d_model, _EPS)
        self.mlp = PlainMLP(b, c.d_model, 4 * c.d_model, "silu", up="net.1", down="net.4")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm(x))
        return out


class _Block(Module):
    def __init__(self, c: FireRedTowerConfig, b: Builder) -> None:
        super().__init__()
        self.feeds = ModuleList(_Feed(c, b.at(name)) for name in ("ffn1", "ffn2"))
        self.attention = _Attention(c, b.at("mhsa"))
        self.convolved = _Convolved(c, b.at("conv"))
        self.norm = b.layer_norm("layer_norm", c.d_model, _EPS)

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        x = x + 0.5 * self.feeds[0](x)
        x = x + self.attention(x, distances)
        x = x + self.convolved(x)
        x = x + 0.5 * self.feeds[1](x)
        out: Tensor = self.norm(x)
        return out


class FireRedTower(Tower):
    """Encodes one sound at a time, four frames of its spectrogram per frame."""

    def __init__(self, c: FireRedTowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        at, bins = b.at("input_preprocessor"), ((c.idim - 1) // 2 - 1) // 2
        self.convolutions = ModuleList(
            Convolution(at, f"conv.{2 * i}", _CHANNELS if i else 1, _CHANNELS, (3, 3), stride=2)
            for i in range(2)
        )
        self.out = at.linear("out", _CHANNELS * bins, c.d_model, bias=True, split=False)
        self.blocks = ModuleList(_Block(c, b.at(f"layer_stack.{i}")) for i in range(c.n_layers_enc))

    def run(self, mel: Tensor) -> Pieces[Tensor]:
        """[frames, bins] -> [frames / 4, width]."""
        x = F.pad(mel, (0, 0, 0, _AFTER)).to(self.dtype)[None, None]
        for convolution in self.convolutions:
            x = F.relu(convolution(x))
        x = self.out(x[0].transpose(0, 1).flatten(1))
        if len(x) > self.config.pe_maxlen:
            raise UnsupportedError(f"audio of {len(x)} frames: the encoder supports fewer")
        distances = distance_sines(len(x), self.config.d_model).to(x.device, x.dtype)
        return (yield from through(self.blocks, x, distances))


class FireRedAsr2ForConditionalGeneration(MultimodalModel):
    """FireRedASR 2 with a language model."""

    api = 1
    config_type: ClassVar[type] = FireRedAsr2Config
    media = ("audio",)
    names = WeightNames(rename=((r"^llm\.", ""),), ignore=(r"^encoder\.positional_encoding\.",))

    def make_encoders(self, config: FireRedAsr2Config, b: Builder) -> None:
        self.tower = FireRedTower(config.audio, b.at("encoder"))
        self.projector = PlainMLP(
            b.at("encoder_projector"),
            config.audio.d_model * config.top_level.encoder_downsample_rate,
            config.hidden_size, "relu", up="linear1", down="linear2", outputs=config.hidden_size,
        )  # fmt: skip

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        rate, embeddings = self.config.top_level.encoder_downsample_rate, []
        for item in items:
            x = yield from self.tower.run(self.tensor(item, "input_features"))
            count = len(x) // rate
            embeddings.append(self.projector(x[: count * rate].reshape(count, -1)))
        return embeddings

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_text("qwen2"),
            "architectures": ["FireRedASR2ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "encoder_downsample_rate": 2,
            "audio_encoder_conf": {
                "idim": 16,
                "n_layers_enc": 2,
                "n_head": 2,
                "d_model": 32,
                "kernel_size": 5,
                "pe_maxlen": 500,
            },
        }
