"""BART (Lewis et al., arXiv 1910.13461) and mBART (Liu et al., arXiv 2001.08210)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Head, Norm, Rewrite, WeightNames
from modulm_layers import CrossedLayer, DecoderForCausalLM, PlainMLP, only, size
from modulm_towers.blocks import BlockShape, VisionAttention
from modulm_towers.pieces import Pieces, through, whole

__all__ = [
    "BartConfig",
    "BartForConditionalGeneration",
    "MBartForConditionalGeneration",
    "Positions",
    "TextEmbedding",
]

_EPS = 1e-5
#: Offset of the learned positions in their table.
_OFFSET = 2


@frozen(kw_only=True)
class BartConfig:
    """config.json of BART and its relatives.

    `num_hidden_layers` counts the encoder's layers there and is left unread.
    """

    vocab_size: int = size()
    d_model: int = size()
    encoder_layers: int = size()
    encoder_attention_heads: int = size()
    encoder_ffn_dim: int = size()
    decoder_layers: int = size()
    decoder_attention_heads: int = size()
    decoder_ffn_dim: int = size()
    max_position_embeddings: int = size(1024)
    activation_function: str = "gelu"
    scale_embedding: bool = False
    tie_word_embeddings: bool = True

    def __attrs_post_init__(self) -> None:
        only(self, tie_word_embeddings=(True,))
        for side, heads in (
            ("encoder", self.encoder_attention_heads),
            ("decoder", self.decoder_attention_heads),
        ):
            if self.d_model % heads:
                raise ValueError(f"{side}_attention_heads: does not divide d_model")

    @property
    def hidden_size(self) -> int:
        """The model's width."""
        return self.d_model

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder."""
        return self.decoder_layers

    @property
    def max_length(self) -> int:
        """The maximum length of either side in tokens."""
        return self.max_position_embeddings

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return


class Positions(Module):
    """Sinusoidal position vectors: [rows, width], on the device."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def lookup(self, positions: Tensor) -> Tensor:
        """positions: [n] int64 -> [n, width]."""
        return self.table[positions]


class TextEmbedding(Module):
    """Token plus position embeddings, normed or not."""

    def __init__(
        self, tokens: Embedding, positions: Embedding | Positions, norm: Norm | None
    ) -> None:
        super().__init__()
        self.tokens, self.positions, self.norm = tokens, positions, norm

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        return self._placed(self.tokens(batch), batch.positions)

    def of(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions: [n] int64 -> [n, hidden]."""
        return self._placed(self.tokens.lookup(tokens), positions)

    def _placed(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens.method.ops.add(x, self.positions.lookup(positions))
        return x if self.norm is None else self.norm(x)


class _EncoderLayer(Module):
    """Bidirectional attention within a text; norms before the branches, or after the additions."""

    def __init__(self, c: BartConfig, b: Builder, before: bool) -> None:
        super().__init__()
        width, inner, act = c.d_model, c.encoder_ffn_dim, c.activation_function
        shape = BlockShape(hidden=width, inner=inner, heads=c.encoder_attention_heads, act=act)
        self.ops, self.before = b.ops, before
        self.attn = VisionAttention(b.at("self_attn"), shape)
        self.attn_norm = b.layer_norm("self_attn_layer_norm", width, _EPS)
        self.mlp = PlainMLP(b, width, inner, act, up="fc1", down="fc2")
        self.mlp_norm = b.layer_norm("final_layer_norm", width, _EPS)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x: [tokens of all, hidden]; lengths: tokens of each text."""
        if self.before:
            x = self.ops.add(x, self.attn(self.attn_norm(x), lengths, None))
            wider: Tensor = self.ops.add(x, self.mlp(self.mlp_norm(x)))
            return wider
        x = self.attn_norm(self.ops.add(x, self.attn(x, lengths, None)))
        normed: Tensor = self.mlp_norm(self.ops.add(x, self.mlp(x)))
        return normed


def _from_first(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, tensor[_OFFSET:])]


class BartForConditionalGeneration(DecoderForCausalLM):
    """BART: norms after the additions and after the embedding."""

    api = 1
    config_type: ClassVar[type] = BartConfig
    root = "model.decoder"
    media = ("text",)
    takes_embeds = False
    names = WeightNames(
        ignore=(r"(encoder|decoder)\.embed_tokens\.", r"^lm_head\."),
        rewrite=(Rewrite(r"embed_positions\.weight$", _from_first),),
    )
    #: Whether norms precede the branches, follow the embedding, and end the model.
    before: ClassVar[bool] = False
    embed_norm: ClassVar[bool] = True
    last_norm: ClassVar[bool] = False
    #: Whether a bias is added to the logits.
    biased: ClassVar[bool] = True
    logits_bias: Tensor

    def __init__(self, config: Any, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline_parallel_size: not supported yet for encoder-decoder models"
            )
        width = config.d_model
        scale = width**0.5 if config.scale_embedding else 1.0
        tokens = build.embedding("model.shared", config.vocab_size, width, scale=scale)
        # The base class uses these modules before they can be submodules.
        self.__dict__["_tokens"] = tokens
        super().__init__(config, build)
        self.device = build.shared.device
        b = build.at("model.encoder")
        self.encoder_embed = self._embedding(config, b)
        layers = (b.at(f"layers.{i}") for i in range(config.encoder_layers))
        self.encoder_layers = ModuleList(_EncoderLayer(config, at, self.before) for at in layers)
        self.encoder_norm = b.layer_norm("layer_norm", width, _EPS) if self.last_norm else None
        if self.biased:
            shape = (1, config.vocab_size)
            build.parameter("final_logits_bias", self, "logits_bias", shape)

    def layer(self, c: Any, b: Builder, index: int) -> CrossedLayer:
        """A layer of the decoder."""
        return CrossedLayer(
            b, hidden=c.d_model, heads=c.decoder_attention_heads, inner=c.decoder_ffn_dim,
            act=c.activation_function, longest=c.max_length, before=self.before, eps=_EPS,
        )  # fmt: skip

    def make_positions(self, config: Any, b: Builder) -> Embedding | Positions:
        """Position vectors; `b` points at the encoder or at the decoder."""
        return b.embedding("embed_positions", config.max_length, config.d_model)

    def make_embedding(self, config: Any, b: Builder) -> Any:
        return self._embedding(config, b)

    def _embedding(self, config: Any, b: Builder) -> TextEmbedding:
        norm = (
            b.layer_norm("layernorm_embedding", config.d_model, _EPS) if self.embed_norm else None
        )
        return TextEmbedding(self._tokens, self.make_positions(config, b), norm)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        if self.last_norm:
            return b.layer_norm("layer_norm", config.d_model, _EPS)
        return _NoNorm(b)

    def make_head(self, config: Any, b: Builder) -> Head:
        return b.head("lm_head", config.d_model, config.vocab_size, tied=self._tokens)

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        return whole(self.encode_in_pieces(items))

    def encode_in_pieces(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        """Encode texts: [tokens, hidden] of each."""
        lengths = [len(item.tensors["input_ids"]) for item in items]
        tokens = np.concatenate([item.tensors["input_ids"] for item in items])
        positions = np.concatenate([np.arange(length) for length in lengths])
        inputs = (torch.from_numpy(array).to(self.device) for array in (tokens, positions))
        x = yield from through(self.encoder_layers, self.encoder_embed.of(*inputs), lengths)
        if self.encoder_norm is not None:
            x = self.encoder_norm(x)
        return x.split(lengths)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits + self.logits_bias if self.biased else logits

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": [cls.__name__],
            "model_type": "bart",
            "vocab_size": 512,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_layers": 3,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 128,
            "scale_embedding": True,
            "decoder_start_token_id": 1,
            "forced_eos_token_id": None,
            "eos_token_id": 2,
            "bos_token_id": 0,
            "pad_token_id": 0,
        }


class _NoNorm(Norm):
    """Identity, for models with a norm after each addition."""

    def __init__(self, b: Builder) -> None:
        super().__init__()
        self.ops = b.ops

    def forward(self, x: Tensor) -> Tensor:
        return x


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """mBART: norms before the branches, and at the end."""

    before = last_norm = True

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "model_type": "mbart"}
