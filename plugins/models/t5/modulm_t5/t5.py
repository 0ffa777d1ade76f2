"""T5 (Raffel et al., arXiv 1910.10683), also 1.1 and FLAN, mT5 (Xue et al., arXiv 2010.11934) and
UMT5 (Chung et al., arXiv 2304.09151).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Head, Norm, WeightNames
from modulm_layers import (
    Attention,
    AttentionNames,
    CrossAttention,
    DecoderForCausalLM,
    GatedMLP,
    PlainMLP,
    RelativePositions,
    size,
)
from modulm_t5.limits import LONGEST

__all__ = [
    "MT5ForConditionalGeneration",
    "T5Config",
    "T5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
]

_NAMES = AttentionNames("q", "k", "v", "o", "qkv")


@frozen(kw_only=True)
class T5Config:
    """config.json of T5 and its relatives.

    `tie_word_embeddings` also determines whether outputs are scaled before the head, except in
    files of transformers 5, which have `scale_decoder_outputs` for that.
    """

    vocab_size: int = size()
    d_model: int = size()
    d_kv: int = size(64)
    d_ff: int = size()
    num_layers: int = size()
    num_decoder_layers: int | None = size(None)
    num_heads: int = size()
    n_positions: int = size(LONGEST)
    relative_attention_num_buckets: int = size(32, least=4)
    relative_attention_max_distance: int = size(128)
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None

    def __attrs_post_init__(self) -> None:
        kind = self.feed_forward_proj.split("-")
        if len(kind) > 2 or (len(kind) == 2 and kind[0] != "gated"):
            raise ValueError(f"feed_forward_proj: {self.feed_forward_proj!r} is unknown")
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise ValueError("relative_attention_max_distance: less than its buckets hold")

    @property
    def act(self) -> str:
        """The activation of the feed-forward blocks; "gated-gelu" means the tanh approximation."""
        gelu = self.feed_forward_proj == "gated-gelu"
        return "gelu_new" if gelu else self.feed_forward_proj.split("-")[-1]

    @property
    def gated(self) -> bool:
        """Whether these blocks have a gate (T5 1.1)."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def scaled(self) -> bool:
        """Whether outputs are scaled before the head."""
        return self.tie_word_embeddings and self.scale_decoder_outputs is not False

    @property
    def hidden_size(self) -> int:
        """The model's width."""
        return self.d_model

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder."""
        return self.num_decoder_layers or self.num_layers

    @property
    def max_length(self) -> int:
        """The maximum length of either side in tokens."""
        return self.n_positions

    @property
    def sliding_window(self) -> None:
        """None: no window limits the length of a row."""
        return


def _relative(c: T5Config, b: Builder, both: bool) -> RelativePositions:
    return RelativePositions(
        b.at("SelfAttention"), heads=c.num_heads, buckets=c.relative_attention_num_buckets,
        furthest=c.relative_attention_max_distance, both=both,
    )  # fmt: skip


def _mlp(c: T5Config, b: Builder) -> Module:
    b = b.at("DenseReluDense")
    if not c.gated:
        return PlainMLP(b, c.d_model, c.d_ff, c.act, bias=False, up="wi", down="wo")
    names = {"gate": "wi_0", "up": "wi_1", "down": "wo", "fused": "wi"}
    return GatedMLP(b, c.d_model, c.d_ff, c.act, **names)


class _EncoderAttention(Module):
    """Bidirectional attention; position biases are passed in."""

    def __init__(self, c: T5Config, b: Builder) -> None:
        super().__init__()
        self.heads = b.shared.mesh.tensor.part(c.num_heads, f"attention heads of {b.prefix}")
        whole = c.num_heads * c.d_kv
        self.qkv = b.linear("qkv", c.d_model, dict.fromkeys("qkv", whole))
        self.out = b.row_linear("o", whole, c.d_model)

    def forward(self, x: Tensor, lengths: Sequence[int], added: Mapping[int, Tensor]) -> Tensor:
        """x: [tokens of all, hidden]; lengths: tokens of each text; added: length -> biases [heads,
        length, length] in the dtype of x.
        """
        rows = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3).split(lengths, 2)
        seen = [
            F.scaled_dot_product_attention(
                *row[:, None].unbind(0), attn_mask=added[length][None], scale=1.0
            )[0]
            for row, length in zip(rows, lengths, strict=True)
        ]
        out: Tensor = self.out(torch.cat(seen, 1).transpose(0, 1).flatten(1))
        return out


class _EncoderLayer(Module):
    """norm, attention, norm, feed-forward, each branch added to the stream."""

    def __init__(self, c: T5Config, b: Builder, relative: RelativePositions) -> None:
        super().__init__()
        self.relative = relative
        self.attn_norm = b.rms_norm("layer.0.layer_norm", c.d_model, c.layer_norm_epsilon)
        self.attn = _EncoderAttention(c, b.at("layer.0.SelfAttention"))
        self.mlp_norm = b.rms_norm("layer.1.layer_norm", c.d_model, c.layer_norm_epsilon)
        self.mlp = _mlp(c, b.at("layer.1"))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        lengths: Sequence[int],
        added: Mapping[int, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Like `_EncoderAttention`; returns the last branch's output and the stream before it."""
        x, residual = self.attn_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attn(x, lengths, added), residual)
        return self.mlp(x), residual


class _DecoderLayer(Module):
    """Causal self-attention, cross-attention, feed-forward."""

    def __init__(self, c: T5Config, b: Builder, relative: RelativePositions) -> None:
        super().__init__()
        width, heads, eps = c.d_model, c.num_heads, c.layer_norm_epsilon
        self.attn_norm = b.rms_norm("layer.0.layer_norm", width, eps)
        self.attn = Attention(
            b.at("layer.0.SelfAttention"), hidden=width, heads=heads, kv_heads=heads,
            head_dim=c.d_kv, scale=1.0, relative=relative, names=_NAMES,
        )  # fmt: skip
        self.cross_norm = b.rms_norm("layer.1.layer_norm", width, eps)
        self.cross = CrossAttention(
            b.at("layer.1.EncDecAttention"), hidden=width, heads=heads, head_dim=c.d_kv,
            longest=c.max_length, bias=False, scale=1.0, names=_NAMES,
        )  # fmt: skip
        self.mlp_norm = b.rms_norm("layer.2.layer_norm", width, eps)
        self.mlp = _mlp(c, b.at("layer.2"))

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.attn_norm.add(x, residual)
        x, residual = self.cross_norm.add(self.attn(x, batch), residual)
        x, residual = self.mlp_norm.add(self.cross(x, batch), residual)
        return self.mlp(x), residual


class T5ForConditionalGeneration(DecoderForCausalLM):
    """T5: all layers of a side share one table of position biases."""

    api = 1
    config_type: ClassVar[type] = T5Config
    root = "decoder"
    media = ("text",)
    takes_embeds = False
    names = WeightNames(
        rename=((r"\.block\.", ".layers."),),
        ignore=(
            r"(encoder|decoder)\.embed_tokens\.",
            r"EncDecAttention\.relative_attention_bias\.",
        ),
    )
    #: Whether each layer has its own bias table.
    each: ClassVar[bool] = False
    #: Whether outputs may be scaled before the head; without a stored head the embedding is used.
    scales: ClassVar[bool] = True
    _tokens: Embedding
    _relative: dict[tuple[bool, int], RelativePositions]

    def __init__(self, config: T5Config, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline_parallel_size: not supported yet for encoder-decoder models"
            )
        # The base class uses these modules before they can be submodules.
        shared = build.embedding("shared", config.vocab_size, config.d_model)
        self.__dict__.update(_tokens=shared, _relative={})
        super().__init__(config, build)
        self.device, self.dtype = build.shared.device, build.shared.dtype
        b = build.at("encoder")
        self.encoder_layers = ModuleList(
            _EncoderLayer(config, at, self._positions(config, at, i, both=True))
            for i, at in enumerate(b.at(f"layers.{i}") for i in range(config.num_layers))
        )
        self.encoder_norm = self.make_norm(config, b)

    def layer(self, c: T5Config, b: Builder, index: int) -> _DecoderLayer:
        """A layer of the decoder."""
        return _DecoderLayer(c, b, self._positions(c, b, index, both=False))

    def _positions(self, c: T5Config, b: Builder, index: int, *, both: bool) -> RelativePositions:
        """The position biases of a layer: its own, or the first layer's."""
        key, tables = (both, index if self.each else 0), self._relative
        if key not in tables:
            tables[key] = _relative(c, b.at("layer.0"), both)
        return tables[key]

    def make_embedding(self, config: T5Config, b: Builder) -> Embedding:
        return self._tokens

    def make_norm(self, config: T5Config, b: Builder) -> Norm:
        return b.rms_norm("final_layer_norm", config.d_model, config.layer_norm_epsilon)

    def make_head(self, config: T5Config, b: Builder) -> Head:
        scale = config.d_model**-0.5 if self.scales and config.scaled else 1.0
        width, rows = config.d_model, config.vocab_size
        return b.head("lm_head", width, rows, scale=scale, instead=("shared",))

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        """[tokens, hidden] of each text."""
        lengths = [len(item.tensors["input_ids"]) for item in items]
        tokens = np.concatenate([item.tensors["input_ids"] for item in items])
        x = self._tokens.lookup(torch.from_numpy(tokens).to(self.device))
        residual, tables = None, {}
        for layer in self.encoder_layers:
            if layer.relative not in tables:
                tables[layer.relative] = {
                    n: layer.relative.between(n).to(self.dtype) for n in set(lengths)
                }
            x, residual = layer(x, residual, lengths, tables[layer.relative])
        return self.encoder_norm.add(x, residual)[0].split(lengths)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": [cls.__name__],
            "model_type": "t5",
            "vocab_size": 512,
            "d_model": 64,
            "d_kv": 8,
            "d_ff": 96,
            "num_layers": 3,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "n_positions": 128,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "decoder_start_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


@frozen(kw_only=True)
class _GatedConfig(T5Config):
    feed_forward_proj: str = "gated-gelu"


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """mT5: T5 1.1 without output scaling."""

    config_type: ClassVar[type] = _GatedConfig
    scales = False

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "model_type": "mt5"}


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    """UMT5: mT5 with a bias table per layer; outputs are scaled if config.json says so."""

    config_type: ClassVar[type] = _GatedConfig
    each = True

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "model_type": "umt5"}
