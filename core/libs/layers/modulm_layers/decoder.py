"""Base class of decoder models: embedding, layers, final norm, LM head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.contracts.weight_names import WeightNames
from modulm.errors import UnsupportedError
from modulm.nn.embedding import Embedding
from modulm_layers.attention import Attention
from modulm_layers.bidirectional import WholeRowAttention
from modulm_layers.config import DecoderConfig
from modulm_layers.mlp import GatedMLP
from modulm_layers.stages import even_stages, weight_of

if TYPE_CHECKING:
    from modulm.nn.builder import Builder
    from modulm.nn.embedding import Head
    from modulm.nn.norm import Norm

__all__ = [
    "DecoderForCausalLM",
    "ParallelLayer",
    "PreNormLayer",
    "SandwichLayer",
    "standard_attention",
    "standard_mlp",
    "tiny_config",
]


class DecoderForCausalLM(Module, Model):
    """A decoder with a language-model head.

    A family sets `api`, `config_type`, `layer` (built as `layer(config, builder, index)`, called as
    `layer(x, residual, batch)`) and, if the checkpoint's names or layouts differ, `names`. It
    overrides a `make_` method for each part that is not standard.
    """

    config_type: ClassVar[type] = DecoderConfig
    layer: ClassVar[Any]
    names: ClassVar[WeightNames] = WeightNames()
    root: ClassVar[str] = "model"

    def __init__(self, config: Any, build: Builder) -> None:
        super().__init__()
        stages, count = build.shared.mesh.pipeline, config.num_hidden_layers
        if stages.size > 1 and type(self).forward is not DecoderForCausalLM.forward:
            raise UnsupportedError(
                f"pipeline parallelism: not supported yet: {type(self).__name__}"
            )
        causal = getattr(config, "is_causal", True)  # decoders beside an encoder have no such key
        if not causal and "generate" in self.tasks:
            raise UnsupportedError(
                f"is_causal: {type(self).__name__}: tokens see those after them, so the model can "
                "only make vectors or classes: use --runner pooling"
            )
        b = build.at(self.root)
        self.config = config
        embeds = stages.first or (stages.last and config.tie_word_embeddings)
        self.embed = self.make_embedding(config, b.stage(embeds))
        if count >= stages.size > 1 and not stages.layers:
            stages = evolve(stages, layers=self._even_stages(config, b, build, stages.size))
        stage_layers = stages.stage(count)
        layers = [
            self.layer(config, b.at(f"layers.{i}").stage(i in stage_layers), i)
            for i in range(count)
        ]
        self.layers = ModuleList(layers[stage_layers.start : stage_layers.stop])
        self.norm = self.make_norm(config, b.stage(stages.last))
        self.head = self.make_head(config, build.stage(stages.last))
        self._caches = tuple(build.shared.caches)

    def _even_stages(self, config: Any, b: Builder, build: Builder, stages: int) -> tuple[int, ...]:
        """Number of layers per stage. The first also has the embedding; the last, norm and head."""
        layers = [
            weight_of(partial(_layer, self.layer, config, i), b.at(f"layers.{i}"))
            for i in range(config.num_hidden_layers)
        ]
        first = weight_of(partial(self.make_embedding, config), b)
        last = weight_of(partial(self.make_norm, config), b)
        tied = config.tie_word_embeddings
        last += first if tied else weight_of(partial(self.make_head, config), build)
        return even_stages(layers, stages, first=first, last=last)

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        """Make the module that turns a batch into vectors; `b` points at the decoder."""
        return b.embedding("embed_tokens", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        """Make the final norm; `b` points at the decoder."""
        return b.rms_norm("norm", config.hidden_size, config.rms_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        """Make the language-model head; `b` points at the root of the model."""
        tied = self.embed if config.tie_word_embeddings else None
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return cls.names

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self._caches

    def forward(self, batch: Batch) -> Tensor:
        if batch.only_sampled and type(self).forward is not DecoderForCausalLM.forward:
            batch = evolve(batch, only_sampled=False)
        return self.norm.add(*self._run(batch))[0]

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        if type(self).forward is not DecoderForCausalLM.forward or batch.carried:
            return super().states(batch, layers)
        captured: dict[int, Tensor] = {}
        x, residual = self._run(batch, captured, frozenset(layers))
        missing = [index for index in layers if index not in captured]
        if missing:
            raise UnsupportedError(f"no layer {missing[0]}: the model has {len(self.layers)}")
        return (self.norm.add(x, residual)[0], *(captured[index] for index in layers))

    def embeddings(self, tokens: Tensor) -> Tensor:
        table: Module = self.embed
        if not isinstance(table, Embedding):
            return super().embeddings(tokens)
        return table.lookup(tokens)

    def carry(self, batch: Batch) -> tuple[Tensor, ...]:
        return tuple(x for x in self._run(batch) if x is not None)

    def _run(
        self,
        batch: Batch,
        captured: dict[int, Tensor] | None = None,
        selected: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers of this stage; store the residual stream after each `selected` layer."""
        x: Tensor = batch.carried[0] if batch.carried else self.embed(batch)
        residual: Tensor | None = batch.carried[1] if len(batch.carried) > 1 else None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if batch.only_sampled and index == last and isinstance(layer, _LAYERS):
                return layer.sampled(x, residual, batch)
            x, residual = layer(x, residual, batch)
            if index in selected and captured is not None:
                captured[index] = x if residual is None else self.norm.ops.add(x, residual)
        return x, residual

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


class PreNormLayer(Module):
    """norm, attention, norm, feed-forward, each branch added to the residual stream.

    The addition that ends a branch is fused with the next norm, so a layer takes and returns a
    pair: the last branch's output and the stream before it.
    """

    def __init__(self, attn_norm: Norm, attn: Module, mlp_norm: Norm, mlp: Module) -> None:
        super().__init__()
        self.attn_norm, self.attn = attn_norm, attn
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.attn_norm.add(x, residual)
        return self.feed_forward(self.attn(x, batch), residual)

    def feed_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what follows the attention; x: its output, residual: the stream before it."""
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual

    def norm_readers(self) -> tuple[tuple[Norm, tuple[Module, ...]], ...]:
        """Return each norm with the modules that read its result."""
        return (self.attn_norm, (self.attn,)), (self.mlp_norm, (self.mlp,))

    def sampled(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the last layer for the tokens in `batch.sample` only: [n, hidden].

        The other tokens go through the attention, whose keys and values are cached, but not through
        its output projection and the feed-forward part. Without samples, or in a layer with a
        `forward` of its own, this returns all tokens.
        """
        if type(self).forward is not PreNormLayer.forward:
            whole: tuple[Tensor, Tensor | None] = self(x, residual, batch)
            return whole
        x, residual = self.attn_norm.add(x, residual)
        attended = _attend_sampled(self.attn, x, batch)
        if not len(batch.sample):
            return x, residual
        return self.feed_forward(attended, residual[batch.sample])


class SandwichLayer(PreNormLayer):
    """A `PreNormLayer` with a norm at the end of each branch as well."""

    def __init__(
        self, attn_norm: Norm, attn: Module, attn_post: Norm, mlp_norm: Norm, mlp: Module,
        mlp_post: Norm,
    ) -> None:  # fmt: skip
        super().__init__(attn_norm, attn, mlp_norm, mlp)
        self.attn_post, self.mlp_post = attn_post, mlp_post

    def feed_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.mlp_norm.add(self.attn_post(x), residual)
        return self.mlp_post(self.mlp(x)), residual


class ParallelLayer(Module):
    """Attention and feed-forward side by side, both added to the stream at once.

    Both branches read the output of `norm`, unless the feed-forward branch has its own norm.
    """

    def __init__(self, norm: Norm, attn: Module, mlp: Module, mlp_norm: Norm | None = None) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp, self.mlp_norm = norm, attn, mlp, mlp_norm

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, stream = self.norm.add(x, residual)
        return self.add_feed_forward(self.attn(x, batch), x, stream), stream

    def add_feed_forward(self, attended: Tensor, x: Tensor, stream: Tensor) -> Tensor:
        """Add the feed-forward branch to the attention's output; x: the stream, normed."""
        inner = x if self.mlp_norm is None else self.mlp_norm(stream)
        return self.norm.ops.add(attended, self.mlp(inner))

    def sampled(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the last layer for sampled tokens only; see `PreNormLayer.sampled`."""
        if type(self).forward is not ParallelLayer.forward:
            whole: tuple[Tensor, Tensor | None] = self(x, residual, batch)
            return whole
        x, stream = self.norm.add(x, residual)
        attended = _attend_sampled(self.attn, x, batch)
        if not len(batch.sample):
            return x, stream
        x, stream = x[batch.sample], stream[batch.sample]
        return self.add_feed_forward(attended, x, stream), stream

    def norm_readers(self) -> tuple[tuple[Norm, tuple[Module, ...]], ...]:
        """Return each norm with the modules that read its result."""
        if self.mlp_norm is None:
            return ((self.norm, (self.attn, self.mlp)),)
        return (self.norm, (self.attn,)), (self.mlp_norm, (self.mlp,))


#: Layers that can leave out tokens that are not sampled.
_LAYERS = (PreNormLayer, ParallelLayer)


def _attend_sampled(attn: Module, x: Tensor, batch: Batch) -> Tensor:
    """Cache all tokens, and return the attention's output for those in `batch.sample`."""
    out: Tensor
    if isinstance(attn, Attention) and type(attn).forward is Attention.forward:
        out = attn(x, batch, only_sampled=True)
        return out
    out = attn(x, batch)
    return out[batch.sample]


def _layer(make: Any, config: Any, index: int, b: Builder) -> object:
    return make(config, b, index)


def standard_attention(
    c: DecoderConfig, b: Builder, index: int, *, at: str = "self_attn", **changes: Any
) -> Attention:
    """Make the attention layer that the common config keys describe; `at` is its weight name."""
    settings: dict[str, Any] = {
        "hidden": c.hidden_size,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_size,
        "rope": c.rope(c.layer_type(index)),
        "bias": c.attention_bias,
        "out_bias": c.attention_bias,
        "window": c.window(index),
    }
    layer = Attention if c.is_causal else WholeRowAttention
    return layer(b.at(at), **{**settings, **changes})


def standard_mlp(c: DecoderConfig, b: Builder, **changes: Any) -> GatedMLP:
    """Make the gated feed-forward block that the common config keys describe."""
    settings: dict[str, Any] = {
        "hidden": c.hidden_size,
        "inner": c.inner_size,
        "act": c.hidden_act,
        "bias": c.mlp_bias,
    }
    return GatedMLP(b.at("mlp"), **{**settings, **changes})


def tiny_config(model_type: str, architecture: str, **changes: Any) -> Mapping[str, Any]:
    """config.json of a tiny decoder with grouped keys and values, for `Model.tiny`."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **changes,
    }
