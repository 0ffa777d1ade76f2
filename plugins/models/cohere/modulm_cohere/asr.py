"""Cohere Transcribe: a fast conformer, and a text decoder that reads it by cross attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, Embedding, Head, Linear, Norm, WeightNames, read_config
from modulm_layers import CrossedLayer, DecoderForCausalLM, LearnedPositions, only, size
from modulm_towers.parakeet import ParakeetConfig, ParakeetTower
from modulm_towers.pieces import Pieces, whole
from modulm_towers.text import complete_config

__all__ = ["CohereAsrConfig", "CohereAsrForConditionalGeneration", "Decoder"]

_EPS = 1e-5
#: NeMo's names, in which files are published, and transformers'.
_NEMO = (
    (r"^model\.(?=encoder\.(pre_encode|layers)|transf_decoder|encoder_decoder_proj)", ""),
    (r"^encoder\.pre_encode\.conv\.", "model.encoder.subsampling.layers."),
    (r"^encoder\.pre_encode\.out\.", "model.encoder.subsampling.linear."),
    (r"^encoder\.layers\.", "model.encoder.layers."),
    (r"(encoder\..*\.self_attn\.)linear_([qkv])\.", r"\1\2_proj."),
    (r"(encoder\..*\.self_attn\.)linear_out\.", r"\1o_proj."),
    (r"(encoder\..*\.self_attn\.)linear_pos\.", r"\1relative_k_proj."),
    (r"(encoder\..*\.self_attn\.)pos_bias_([uv])$", r"\1bias_\2"),
    (r"\.conv\.batch_norm\.", ".conv.norm."),
    (
        r"^transf_decoder\._embedding\.position_embedding\.pos_enc$",
        "model.decoder.pos_emb.weight",
    ),
    (r"^transf_decoder\._embedding\.token_embedding\.", "model.decoder.embed_tokens."),
    (
        r"^transf_decoder\._embedding\.layer_norm\.",
        "model.decoder.embedding_layernorm.",
    ),
    (r"^transf_decoder\._decoder\.final_layer_norm\.", "model.decoder.norm."),
    (r"^transf_decoder\._decoder\.layers\.", "model.decoder.layers."),
    (r"^encoder_decoder_proj\.", "model.decoder.proj."),
    (r"\.first_sub_layer\.", ".self_attn."),
    (r"\.second_sub_layer\.", ".encoder_attn."),
    (r"\.query_net\.", ".q_proj."),
    (r"\.key_net\.", ".k_proj."),
    (r"\.value_net\.", ".v_proj."),
    (r"\.out_projection\.", ".o_proj."),
    (r"\.third_sub_layer\.dense_in\.", ".mlp.fc1."),
    (r"\.third_sub_layer\.dense_out\.", ".mlp.fc2."),
    (r"\.layer_norm_1\.", ".input_layernorm."),
    (r"\.layer_norm_2\.", ".post_attention_layernorm."),
    (r"\.layer_norm_3\.", ".final_layernorm."),
    (r"^log_softmax\.mlp\.layer0\.", "proj_out."),
)
#: transformers' names of a decoder's layers, and those of crossed layers.
_CROSSED = (
    (r"(decoder\.layers\.\d+\.)input_layernorm\.", r"\1self_attn_layer_norm."),
    (r"(decoder\.layers\.\d+\.)post_attention_layernorm\.", r"\1encoder_attn_layer_norm."),
    (r"(decoder\.layers\.\d+\.)final_layernorm\.", r"\1final_layer_norm."),
    (r"(decoder\.layers\.\d+\.)mlp\.", r"\1"),
    (r"(decoder\.layers\.\d+\..*_attn\.)o_proj\.", r"\1out_proj."),
)


@frozen(kw_only=True)
class Decoder:
    """The decoder's keys."""

    vocab_size: int = size()
    hidden_size: int = size()
    num_hidden_layers: int = size()
    num_attention_heads: int = size()
    num_key_value_heads: int | None = size(None)
    head_dim: int | None = size(None)
    intermediate_size: int = size()
    hidden_act: str = "relu"
    max_position_embeddings: int = size(1024)
    attention_bias: bool = True
    tie_word_embeddings: bool = False

    def __attrs_post_init__(self) -> None:
        only(self, attention_bias=(True,))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("num_attention_heads: does not divide hidden_size")
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError("num_key_value_heads: must be num_attention_heads")
        if self.head_dim not in (None, self.hidden_size // self.num_attention_heads):
            raise ValueError("head_dim: must be hidden_size / num_attention_heads")


@frozen(eq=False, kw_only=True)
class CohereAsrConfig(Decoder):
    """config.json of Cohere Transcribe. encoder: settings of the fast conformer."""

    encoder: ParakeetConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        name = "CohereAsrForConditionalGeneration"
        known = complete_config(name, table, file)
        if known is None:
            raise UnsupportedError(f"{name}: not supported by the installed transformers")
        keys = known.to_dict()
        encoder = keys.get("encoder_config")
        if not isinstance(encoder, Mapping):
            raise CheckpointError(f"{file}: encoder_config: must be a table")
        decoder = read_config(keys, Decoder, file)
        fields = {field: getattr(decoder, field) for field in Decoder.__annotations__}
        return cls(**fields, encoder=read_config(encoder, ParakeetConfig, file))

    @property
    def max_length(self) -> int:
        """The maximum length of a text in tokens."""
        return self.max_position_embeddings

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return


class _Layer(CrossedLayer):
    def __init__(self, c: CohereAsrConfig, b: Builder, index: int) -> None:
        super().__init__(
            b, hidden=c.hidden_size, heads=c.num_attention_heads, inner=c.intermediate_size,
            act=c.hidden_act, longest=c.encoder.max_position_embeddings, eps=_EPS,
        )  # fmt: skip


class _Placed(LearnedPositions):
    """Tokens and positions, normed."""

    def __init__(self, tokens: Embedding, positions: Embedding, norm: Norm) -> None:
        super().__init__(tokens, positions)
        self.norm = norm

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        x: Tensor = self.norm(super().forward(batch))
        return x


class CohereAsrForConditionalGeneration(DecoderForCausalLM):
    """The text decoder with the encoder, 35 seconds at a time."""

    api = 1
    config_type: ClassVar[type] = CohereAsrConfig
    layer = _Layer
    root = "model.decoder"
    media = ("audio",)
    takes_embeds = False
    names = WeightNames(
        rename=(*_NEMO, *_CROSSED), ignore=(r"^(model\.)?preprocessor\.", r"\.num_batches_tracked$")
    )

    def __init__(self, config: CohereAsrConfig, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline_parallel_size: not supported yet for encoder-decoder models"
            )
        super().__init__(config, build)
        self.device = build.shared.device
        self.encoder = ParakeetTower(config.encoder, build.at("model.encoder"))
        self.projector = self.make_projector(config, build.at("model.decoder"))

    def make_projector(self, config: Any, b: Builder) -> Linear | None:
        """Create the layer between encoder and decoder; None without one."""
        width = config.encoder.hidden_size
        return b.linear("proj", width, config.hidden_size, bias=True, split=False)

    def make_embedding(self, config: Any, b: Builder) -> Any:
        tokens = b.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        positions = b.embedding("pos_emb", config.max_position_embeddings, config.hidden_size)
        norm = b.layer_norm("embedding_layernorm", config.hidden_size, _EPS)
        return _Placed(tokens, positions, norm)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("norm", config.hidden_size, _EPS)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed.tokens if config.tie_word_embeddings else None
        return b.head("proj_out", config.hidden_size, config.vocab_size, tied=tied, bias=True)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return whole(self.encode_in_pieces(items))

    def encode_in_pieces(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        """Encode sounds: [encoder frames, hidden] of each."""
        encoded = []
        for item in items:
            mel = torch.from_numpy(item.tensors["mel"].copy()).to(self.device)
            states = yield from self.encoder.run(mel)
            encoded.append(states if self.projector is None else self.projector(states))
        return encoded

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": [cls.__name__],
            "model_type": "cohere_asr",
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            "eos_token_id": 2,
            "bos_token_id": 2,
            "pad_token_id": 2,
            "encoder_config": {
                "model_type": "parakeet_encoder",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "conv_kernel_size": 5,
                "subsampling_factor": 4,
                "subsampling_conv_channels": 8,
                "num_mel_bins": 16,
                "max_position_embeddings": 200,
                "scale_input": False,
            },
        }
