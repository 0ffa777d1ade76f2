"""Fun-ASR Nano (arXiv 2509.12508): SenseVoice's encoder (arXiv 2407.04051) before Qwen 3.

Its attention (SAN-M, arXiv 2006.01713) adds a convolution of the values over time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, only, size
from modulm_towers import (
    Convolution,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    Tower,
    sinusoids,
    through,
    tiny_text,
)

__all__ = [
    "FunAsrConfig",
    "FunAsrForConditionalGeneration",
    "FunAsrNanoConfig",
    "FunAsrNanoForConditionalGeneration",
]

#: FunASR's epsilon of norms, and what its adaptor is where config.json does not say.
_EPS = 1e-12
_ADAPTOR = {"ffn_dim": 2048, "attention_heads": 8, "n_layer": 2}


@frozen(kw_only=True)
class _LayerConfig:
    """What layers of the encoder and of the adaptor have in common."""

    hidden_size: int = size(512)
    num_attention_heads: int = size(4)
    intermediate_size: int = size(2048)
    num_hidden_layers: int = size(70)
    layer_norm_eps: float = 1e-5
    hidden_act: str = "relu"

    def __attrs_post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")


@frozen(kw_only=True)
class _TowerConfig(_LayerConfig):
    """`audio_config`. num_stacked_frames: frames of the spectrogram in one input.
    num_timestamp_prediction_layers: the last layers, which follow a norm.
    """

    num_mel_bins: int = size(80)
    num_stacked_frames: int = size(7)
    num_timestamp_prediction_layers: int = size(20, least=0)
    fsmn_kernel_size: int = size(11)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_timestamp_prediction_layers >= self.num_hidden_layers:
            raise ValueError("num_timestamp_prediction_layers: fewer than num_hidden_layers")

    @property
    def inputs(self) -> int:
        """Numbers in one input."""
        return self.num_mel_bins * self.num_stacked_frames

    def ends(self, index: int) -> bool:
        """Whether a norm follows the layer."""
        last = self.num_hidden_layers - 1
        return index in (last - self.num_timestamp_prediction_layers, last)


@frozen(kw_only=True)
class _AdaptorConfig(_LayerConfig):
    """`adaptor_config`."""

    projector_hidden_size: int = size(2048)
    projector_hidden_act: str = "relu"


@frozen(eq=False, kw_only=True)
class FunAsrNanoConfig(MultimodalConfig):
    """config.json of Fun-ASR Nano in transformers' format. adaptor: settings of what follows the
    encoder.
    """

    audio_type: ClassVar[type | None] = _TowerConfig

    adaptor: _AdaptorConfig

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        return {"adaptor": read_config(keys.get("adaptor_config") or {}, _AdaptorConfig, file)}


@frozen(kw_only=True)
class _Encoder:
    """`audio_encoder_conf` of FunASR."""

    ALIASES: ClassVar[Mapping[str, str]] = {"sanm_shfit": "sanm_shift"}

    input_size: int = size(560)
    output_size: int = size(512)
    attention_heads: int = size(4)
    linear_units: int = size(2048)
    num_blocks: int = size(50)
    tp_blocks: int = size(20)
    kernel_size: int = size(11)
    sanm_shift: int = 0
    normalize_before: bool = True

    def __attrs_post_init__(self) -> None:
        only(self, sanm_shift=(0,), normalize_before=(True,))


@frozen(eq=False, kw_only=True)
class FunAsrConfig(FunAsrNanoConfig):
    """config.json of Fun-ASR Nano with FunASR's keys beside those of Qwen 3."""

    audio_type: ClassVar[type | None] = _Encoder
    audio_key = "audio_encoder_conf"

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        stored = table.get(cls.audio_key)
        if not isinstance(stored, Mapping):
            raise CheckpointError(f"{file}: {cls.audio_key}: must be a table")
        c = read_config(stored, _Encoder, file)
        nested = table.get("text_config")
        text = dict(nested) if isinstance(nested, Mapping) else dict(table)
        config = TextConfig.from_table(
            {**table, "text_config": {**text, "model_type": "qwen3"}}, file
        )
        hidden = int(config.text.hidden_size)
        more = {**_ADAPTOR, **(table.get("audio_adaptor_conf") or {})}
        audio = {
            "num_mel_bins": c.input_size, "num_stacked_frames": 1, "hidden_size": c.output_size,
            "num_attention_heads": c.attention_heads, "intermediate_size": c.linear_units,
            "num_hidden_layers": c.num_blocks + c.tp_blocks, "fsmn_kernel_size": c.kernel_size,
            "num_timestamp_prediction_layers": c.tp_blocks, "layer_norm_eps": _EPS,
        }  # fmt: skip
        adaptor = {
            "hidden_size": hidden, "intermediate_size": hidden // 4, "layer_norm_eps": _EPS,
            "num_attention_heads": more["attention_heads"], "num_hidden_layers": more["n_layer"],
            "projector_hidden_size": more["ffn_dim"],
        }  # fmt: skip
        return cls(
            text=config,
            audio=read_config(audio, _TowerConfig, file),
            adaptor=read_config(adaptor, _AdaptorConfig, file),
        )


class _Attention(Module):
    """Attention within each sound; kernel: of the convolution of values, 0 for none."""

    def __init__(self, c: _LayerConfig, inputs: int, kernel: int, b: Builder) -> None:
        super().__init__()
        width, self.heads, self.ops = c.hidden_size, c.num_attention_heads, b.ops
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)
        self.qkv = b.linear("qkv_proj", inputs, parts, bias=True, split=False)
        self.out = b.linear("o_proj", width, width, bias=True, split=False)
        self.kernel = kernel
        if kernel:
            at = b.at("fsmn")
            self.memory = Convolution(at, "conv", width, width, (kernel,), groups=width, bias=False)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x: [frames of all sounds, inputs] -> [frames, width]."""
        qkv = self.qkv(x)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(1)
        seen: Tensor = self.out(self.ops.varlen_attention(q, k, v, list(lengths)).flatten(1))
        if not self.kernel:
            return seen
        return seen + torch.cat([self._remembered(part) for part in v.flatten(1).split(lengths)])

    def _remembered(self, values: Tensor) -> Tensor:
        """values: [frames, width] of one sound."""
        before = (self.kernel - 1) // 2
        padded = F.pad(values.T[None], (before, self.kernel - 1 - before))
        out: Tensor = self.memory(padded)[0].T
        return out + values


class _Layer(Module):
    """A pre-norm block. inputs: of the first layer, which adds no input to its attention."""

    def __init__(
        self, c: _LayerConfig, b: Builder, inputs: int, kernel: int = 0, ends: bool = False
    ) -> None:
        super().__init__()
        width, eps = c.hidden_size, c.layer_norm_eps
        self.adds = inputs == width
        self.norm1 = b.layer_norm("input_layernorm", inputs, eps)
        self.attention = _Attention(c, inputs, kernel, b.at("self_attn"))
        self.norm2 = b.layer_norm("post_attention_layernorm", width, eps)
        self.mlp = PlainMLP(
            b.at("mlp"), width, c.intermediate_size, c.hidden_act, up="fc1", down="fc2"
        )
        self.end = b.layer_norm("final_layernorm", width, eps) if ends else None

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x: [frames of all sounds, inputs] -> [frames, width]."""
        seen = self.attention(self.norm1(x), lengths)
        x = x + seen if self.adds else seen
        x = x + self.mlp(self.norm2(x))
        return x if self.end is None else self.end(x)


class _Tower(Tower):
    """Encodes stacked frames of the spectrograms of several sounds."""

    def __init__(self, c: _TowerConfig, b: Builder) -> None:
        super().__init__()
        self.config, self.dtype = c, b.shared.dtype
        self.layers = ModuleList(
            _Layer(
                c, b.at(f"layers.{i}"), c.hidden_size if i else c.inputs, c.fsmn_kernel_size,
                c.ends(i),
            )
            for i in range(c.num_hidden_layers)
        )  # fmt: skip

    def run(self, sounds: Sequence[Tensor]) -> Pieces[Tensor]:
        """[frames, inputs] of each sound -> [frames of all, width]."""
        lengths = [len(sound) for sound in sounds]
        places = torch.cat([sinusoids(n + 1, self.config.inputs)[1:] for n in lengths])
        x = torch.cat(list(sounds)).to(self.dtype) * self.config.hidden_size**0.5
        x = x + places.to(x.device, x.dtype)
        return (yield from through(self.layers, x, lengths))


class FunAsrNanoForConditionalGeneration(MultimodalModel):
    """Fun-ASR Nano in transformers' format: every input becomes a token."""

    api = 1
    config_type: ClassVar[type] = FunAsrNanoConfig
    media = ("audio",)

    def make_encoders(self, config: FunAsrNanoConfig, b: Builder) -> None:
        c, at = config.adaptor, b.at("multi_modal_projector")
        self.tower = _Tower(config.audio, b.at("audio_tower"))
        self.projector = PlainMLP(
            at, config.audio.hidden_size, c.projector_hidden_size, c.projector_hidden_act,
            up="linear_1", down="linear_2", outputs=c.hidden_size,
        )  # fmt: skip
        self.layers = ModuleList(
            _Layer(c, at.at(f"layers.{i}"), c.hidden_size) for i in range(c.num_hidden_layers)
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        sounds = [self.tensor(item, "input_features") for item in items]
        lengths = [len(sound) for sound in sounds]
        states = yield from self.tower.run(sounds)
        tokens = yield from through(self.layers, self.projector(states), lengths)
        counts = [int(item.tensors["tokens"].reshape(-1)[0]) for item in items]
        parts = tokens.split(lengths)
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        layer = {"num_attention_heads": 2, "hidden_act": "relu"}
        return {
            "architectures": ["FunAsrNanoForConditionalGeneration"],
            "model_type": "fun_asr_nano",
            "audio_token_id": 480,
            "tie_word_embeddings": False,
            "text_config": tiny_text("qwen3", head_dim=16),
            "audio_config": {
                **layer,
                "model_type": "fun_asr_nano_encoder",
                "num_mel_bins": 8,
                "num_stacked_frames": 7,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4,
                "num_timestamp_prediction_layers": 1,
                "fsmn_kernel_size": 5,
            },
            "adaptor_config": {
                **layer,
                "hidden_size": 64,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "projector_hidden_size": 40,
            },
        }


#: FunASR's names of parts of layers, and transformers'.
_PARTS = (
    (r"\.self_attn\.linear_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.linear_q_k_v\.", ".self_attn.qkv_proj."),
    (r"\.self_attn\.linear_out\.", ".self_attn.o_proj."),
    (r"\.self_attn\.fsmn_block\.", ".self_attn.fsmn.conv."),
    (r"\.feed_forward\.w_([12])\.", r".mlp.fc\1."),
    (r"\.norm1\.", ".input_layernorm."),
    (r"\.norm2\.", ".post_attention_layernorm."),
    (r"^audio_adaptor\.linear([12])\.", r"multi_modal_projector.linear_\1."),
    (r"^audio_adaptor\.blocks\.", "multi_modal_projector.layers."),
    (r"^llm\.", ""),
)


class FunAsrForConditionalGeneration(FunAsrNanoForConditionalGeneration):
    """Fun-ASR Nano with FunASR's names; outputs of the first eighth of the inputs are tokens."""

    config_type: ClassVar[type] = FunAsrConfig

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        c = config.audio
        words = c.num_hidden_layers - c.num_timestamp_prediction_layers
        blocks = (
            (r"^audio_encoder\.encoders0\.0\.", "audio_tower.layers.0."),
            *(
                (rf"^audio_encoder\.encoders\.{i}\.", f"audio_tower.layers.{i + 1}.")
                for i in range(words - 1)
            ),
            *(
                (rf"^audio_encoder\.tp_encoders\.{i}\.", f"audio_tower.layers.{words + i}.")
                for i in range(c.num_timestamp_prediction_layers)
            ),
            (r"^audio_encoder\.after_norm\.", f"audio_tower.layers.{words - 1}.final_layernorm."),
            (
                r"^audio_encoder\.tp_norm\.",
                f"audio_tower.layers.{c.num_hidden_layers - 1}.final_layernorm.",
            ),
        )
        return evolve(names, rename=(*blocks, *_PARTS, *names.rename))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_text("qwen3", head_dim=16),
            "architectures": ["FunASRForConditionalGeneration"],
            "tie_word_embeddings": False,
            "audio_adaptor_conf": {"ffn_dim": 40, "attention_heads": 2, "n_layer": 2},
            "audio_encoder_conf": {
                "input_size": 56,
                "output_size": 32,
                "attention_heads": 2,
                "linear_units": 48,
                "num_blocks": 3,
                "tp_blocks": 1,
                "kernel_size": 5,
                "sanm_shfit": 0,
            },
        }
