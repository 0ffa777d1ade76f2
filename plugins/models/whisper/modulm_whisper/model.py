"""Whisper (Radford et al., arXiv 2212.04356): an audio encoder and a text decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Head, Norm, WeightNames
from modulm_layers import CrossedLayer, DecoderForCausalLM, LearnedPositions, size
from modulm_towers.pieces import Pieces, whole
from modulm_towers.whisper import WhisperTower, WhisperTowerConfig, zero_key_biases

__all__ = ["WhisperConfig", "WhisperForConditionalGeneration"]

_EPS = 1e-5


@frozen(kw_only=True)
class WhisperConfig(WhisperTowerConfig):
    """config.json of Whisper."""

    ALIASES: ClassVar[Mapping[str, str]] = {}

    vocab_size: int = size()
    decoder_layers: int = size()
    decoder_attention_heads: int = size()
    decoder_ffn_dim: int = size()
    max_target_positions: int = size(448)
    scale_embedding: bool = False
    tie_word_embeddings: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.d_model % self.decoder_attention_heads:
            raise ValueError("decoder_attention_heads: does not divide d_model")

    @property
    def hidden_size(self) -> int:
        """The decoder's width."""
        return self.d_model

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder."""
        return self.decoder_layers

    @property
    def max_length(self) -> int:
        """The maximum length of a text in tokens."""
        return self.max_target_positions

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return


class _Layer(CrossedLayer):
    def __init__(self, c: WhisperConfig, b: Builder, index: int) -> None:
        super().__init__(
            b, hidden=c.d_model, heads=c.decoder_attention_heads, inner=c.decoder_ffn_dim,
            act=c.activation_function, longest=c.max_source_positions, eps=_EPS,
        )  # fmt: skip


class WhisperForConditionalGeneration(DecoderForCausalLM):
    """The text decoder with the audio encoder, 30 seconds at a time."""

    api = 1
    config_type = WhisperConfig
    layer = _Layer
    root = "model.decoder"
    media = ("audio",)
    pooler = "whisper_alignment"
    takes_embeds = False
    names = WeightNames(
        rewrite=(zero_key_biases(""),),
        ignore=(r"^model\.encoder\.embed_positions\.inv_freq$",),
    )

    def __init__(self, config: WhisperConfig, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline_parallel_size: not supported yet for encoder-decoder models"
            )
        super().__init__(config, build)
        self.device = build.shared.device
        self.encoder = WhisperTower(config, build.at("model.encoder"))

    def make_embedding(self, config: Any, b: Builder) -> Any:
        scale = config.d_model**0.5 if config.scale_embedding else 1.0
        tokens = b.embedding("embed_tokens", config.vocab_size, config.d_model, scale=scale)
        positions = b.embedding("embed_positions", config.max_target_positions, config.d_model)
        return LearnedPositions(tokens, positions)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("layer_norm", config.d_model, _EPS)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed.tokens if config.tie_word_embeddings else None
        return b.head("proj_out", config.d_model, config.vocab_size, tied=tied)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return whole(self.encode_in_pieces(items))

    def encode_in_pieces(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        """Encode sounds: [max_source_positions, hidden] of each."""
        mel = torch.from_numpy(np.stack([item.tensors["mel"] for item in items]))
        return list((yield from self.encoder.run(mel.to(self.device))))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": [cls.__name__],
            "model_type": "whisper",
            "vocab_size": 512,
            "d_model": 64,
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_layers": 3,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "max_source_positions": 50,
            "max_target_positions": 64,
            "decoder_start_token_id": 1,
            "eos_token_id": 2,
            "bos_token_id": 2,
            "pad_token_id": 2,
            "begin_suppress_tokens": None,
        }
