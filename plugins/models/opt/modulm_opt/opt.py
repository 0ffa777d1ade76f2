"""OPT (arXiv 2205.01068): learned positions with an offset of 2; 350m is post-norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from attrs import field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.kernels import Ops
from modulm.contracts.model import Batch
from modulm.nn import Builder, Embedding, Head, Norm, Rewrite, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    PlainMLP,
    only,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["OPTConfig", "OPTForCausalLM", "OPTLayer"]

_EPS = 1e-5
_OFFSET = 2


@frozen(kw_only=True)
class OPTConfig(DecoderConfig):
    """config.json of OPT."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
    }

    hidden_act: str = "relu"
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    word_embed_proj_dim: int | None = size(None)
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    _remove_final_layer_norm: bool = field(default=False, alias="_remove_final_layer_norm")

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, layer_norm_elementwise_affine=(True,))

    @property
    def ends_with_norm(self) -> bool:
        """Whether there is a final norm."""
        return self.do_layer_norm_before and not self._remove_final_layer_norm

    @property
    def embedding_size(self) -> int:
        """Width of the token embeddings."""
        return self.word_embed_proj_dim or self.hidden_size


class OPTLayer(Module):
    """Norms before the branches, or after the additions."""

    def __init__(self, c: OPTConfig, b: Builder, index: int) -> None:
        super().__init__()
        bias = c.enable_bias
        self.ops, self.before = b.ops, c.do_layer_norm_before
        self.attn = standard_attention(
            c,
            b,
            index,
            rope=None,
            bias=bias,
            out_bias=bias,
            names=AttentionNames(out="out_proj"),
        )
        self.attn_norm = b.layer_norm("self_attn_layer_norm", c.hidden_size, _EPS)
        inner, act = c.inner_size, c.hidden_act
        self.mlp = PlainMLP(b, c.hidden_size, inner, act, bias=bias, up="fc1", down="fc2")
        self.mlp_norm = b.layer_norm("final_layer_norm", c.hidden_size, _EPS)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        if not self.before:
            x = self.attn_norm(self.ops.add(x, self.attn(x, batch)))
            return self.mlp_norm(self.ops.add(x, self.mlp(x))), None
        x, residual = self.attn_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attn(x, batch), residual)
        return self.mlp(x), residual


class OPTEmbedding(Module):
    """Token embeddings, projected to the hidden size if narrower, plus positions."""

    def __init__(self, c: OPTConfig, b: Builder) -> None:
        super().__init__()
        self.ops = b.ops
        self.tokens: Embedding = b.embedding("embed_tokens", c.vocab_size, c.embedding_size)
        rows = c.max_position_embeddings
        self.positions = b.embedding("embed_positions", rows, c.hidden_size)
        self.widen = None
        if c.embedding_size != c.hidden_size:
            self.widen = b.linear("project_in", c.embedding_size, c.hidden_size, split=False)

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        x: Tensor = self.tokens(batch)
        if self.widen is not None:
            x = self.widen(x)
        both: Tensor = self.ops.add(x, self.positions.lookup(batch.positions))
        return both


class _NoNorm(Norm):
    """Identity, for models without a final norm."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return x


def _from_first(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Remove the rows before the first position from the table."""
    yield name, tensor[_OFFSET:]


class OPTForCausalLM(DecoderForCausalLM):
    """OPT with a language-model head."""

    api = 1
    config_type = OPTConfig
    layer = OPTLayer
    root = "model.decoder"
    names = WeightNames(
        rename=((r"^decoder\.", "model.decoder."),),
        rewrite=(Rewrite(r"embed_positions\.weight$", _from_first),),
    )

    def make_embedding(self, config: Any, b: Builder) -> OPTEmbedding:
        # Otherwise prompt embeddings would have another width than the model.
        self.takes_embeds = config.embedding_size == config.hidden_size
        return OPTEmbedding(config, b)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        self.narrow = None
        if config.embedding_size != config.hidden_size:
            sizes = (config.hidden_size, config.embedding_size)
            self.narrow = b.linear("project_out", *sizes, split=False)
        if not config.ends_with_norm:
            return _NoNorm(b.ops)
        return b.layer_norm("final_layer_norm", config.hidden_size, _EPS)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed.tokens if config.tie_word_embeddings else None
        return b.head("lm_head", config.embedding_size, config.vocab_size, tied=tied)

    def forward(self, batch: Batch) -> Tensor:
        hidden = super().forward(batch)
        return hidden if self.narrow is None else self.narrow(hidden)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        shape = tiny_config("opt", "OPTForCausalLM", ffn_dim=96, word_embed_proj_dim=64)
        return {**shape, "num_key_value_heads": 4}
