"""FireRedLID: FireRedASR's conformer and a text decoder that names the language of a sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.media import MediaItem
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Head, Norm, WeightNames, read_config
from modulm_firered.asr import FireRedTower, FireRedTowerConfig
from modulm_layers import CrossedLayer, DecoderForCausalLM, LearnedPositions, size
from modulm_towers import distance_sines, zero_key_biases
from modulm_towers.pieces import Pieces, whole

__all__ = ["FireRedLidConfig", "FireRedLidForConditionalGeneration"]

_EPS = 1e-5
#: FireRedLID's names of a decoder's layers, and those of crossed layers.
_CROSSED = (
    (r"^(lid_decoder)\.layer_stack\.", r"\1.layers."),
    (r"^(lid_decoder\..*)\.cross_attn\.", r"\1.encoder_attn."),
    (r"^(lid_decoder\..*_attn)\.w_([qkv])s\.", r"\1.\2_proj."),
    (r"^(lid_decoder\..*_attn)\.fc\.", r"\1.out_proj."),
    (r"^(lid_decoder\..*)\.self_attn_norm\.", r"\1.self_attn_layer_norm."),
    (r"^(lid_decoder\..*)\.cross_attn_norm\.", r"\1.encoder_attn_layer_norm."),
    (r"^(lid_decoder\..*)\.mlp_norm\.", r"\1.final_layer_norm."),
    (r"^(lid_decoder\..*)\.mlp\.w_([12])\.", r"\1.fc\2."),
)


@frozen(kw_only=True)
class _Decoder:
    """The decoder's keys, beside those of the encoder."""

    vocab_size: int = size(120)
    d_model: int = size(1280)
    n_head: int = size(20)
    n_layers_lid_dec: int = size(6)
    pe_maxlen: int = size(5000)


@frozen(eq=False, kw_only=True)
class FireRedLidConfig(_Decoder):
    """config.json of FireRedLID. encoder: settings of the conformer."""

    tie_word_embeddings: ClassVar[bool] = True

    encoder: FireRedTowerConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError."""
        decoder = read_config(dict(table), _Decoder, file)
        fields = {field: getattr(decoder, field) for field in _Decoder.__annotations__}
        return cls(**fields, encoder=read_config(dict(table), FireRedTowerConfig, file))

    @property
    def hidden_size(self) -> int:
        """The decoder's width."""
        return self.d_model

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder."""
        return self.n_layers_lid_dec

    @property
    def max_length(self) -> int:
        """The maximum length of a text in tokens."""
        return self.pe_maxlen

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return


class _Layer(CrossedLayer):
    def __init__(self, c: FireRedLidConfig, b: Builder, index: int) -> None:
        super().__init__(
            b, hidden=c.d_model, heads=c.n_head, inner=4 * c.d_model, act="gelu",
            longest=c.pe_maxlen, eps=_EPS,
        )  # fmt: skip


class _Sines(Module):
    """Position vectors: [rows, width]."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def lookup(self, positions: Tensor) -> Tensor:
        """positions: [n] int64 -> [n, width]."""
        return self.table[positions]


class FireRedLidForConditionalGeneration(DecoderForCausalLM):
    """FireRedLID: 120 tokens of languages and dialects."""

    api = 1
    config_type: ClassVar[type] = FireRedLidConfig
    layer = _Layer
    root = "lid_decoder"
    media = ("audio",)
    takes_embeds = False
    names = WeightNames(
        rename=_CROSSED,
        ignore=(r"\.positional_encoding\.", r"^lid_decoder\.tgt_word_prj\."),
        rewrite=(zero_key_biases(r"^lid_decoder\."),),
    )

    def __init__(self, config: FireRedLidConfig, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline_parallel_size: not supported yet for encoder-decoder models"
            )
        super().__init__(config, build)
        self.device = build.shared.device
        self.encoder = FireRedTower(config.encoder, build.at("encoder"))

    def make_embedding(self, config: Any, b: Builder) -> Any:
        width, count = config.d_model, config.max_length
        tokens = b.embedding("tgt_word_emb", config.vocab_size, width, scale=width**0.5)
        table = distance_sines(count, width)[:count].flip(0)
        return LearnedPositions(tokens, _Sines(table.to(b.shared.device, b.shared.dtype)))

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("layer_norm_out", config.d_model, _EPS)

    def make_head(self, config: Any, b: Builder) -> Head:
        return b.head("proj_out", config.d_model, config.vocab_size, tied=self.embed.tokens)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return whole(self.encode_in_pieces(items))

    def encode_in_pieces(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        """Encode sounds: [encoder frames, width] of each."""
        encoded = []
        for item in items:
            frames = torch.from_numpy(item.tensors["input_features"].copy()).to(self.device)
            encoded.append((yield from self.encoder.run(frames)))
        return encoded

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["FireRedLIDForConditionalGeneration"],
            "model_type": "fireredlid",
            "vocab_size": 512,
            "d_model": 32,
            "n_head": 2,
            "idim": 16,
            "n_layers_enc": 2,
            "n_layers_lid_dec": 2,
            "kernel_size": 5,
            "pe_maxlen": 2048,
            "decoder_start_token_id": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
