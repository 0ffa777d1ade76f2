"""The layers of DFlash heads: a block of masked tokens attends to the target's hidden states.

DFlash (Chen, Liang and Liu, "Block diffusion for flash speculative decoding", 2026) drafts a block
in one step. Keys and values of the text are projections of the target's hidden states; those of the
block come from the head's own layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Head, Rewrite, WeightNames
from modulm_layers import Attention, DecoderConfig, Rope, standard_mlp, tiny_config
from modulm_layers.attention import AttentionNames
from modulm_layers.config import only, size

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionSpec
    from modulm_speculation import Target

__all__ = [
    "ANCHORS", "CONTEXTS", "CONTEXT_AT", "QUERIES", "STATE", "Block", "BlockAttention",
    "BlockLayer", "DFlashConfig", "DFlashHead",
]  # fmt: skip

#: Keys in `Batch.extras`. Contexts of accepted tokens, [n, hidden], and their indices in the batch.
CONTEXTS, CONTEXT_AT = "contexts", "context_at"
#: Indices in the batch of the blocks' tokens, and the first token of each block.
QUERIES, ANCHORS = "queries", "anchors"
#: Prefix of keys in `Batch.extras` of the states of the target's layers, in batches of contexts
#: alone: [tokens, hidden].
STATE = "state "


@frozen(kw_only=True)
class DFlashConfig(DecoderConfig):
    """config.json of a head, with the keys of its `dflash_config`.

    own_embedding, own_head: whether the checkpoint has these weights. The states of `aux` layers
    of the target, each `target_hidden_size` wide, are concatenated (0: only the last). causal:
    whether the tokens of a block see only those before them; None: in sliding layers.
    sample_from_anchor: each token of the block predicts the one after it, else a masked token
    predicts itself.
    """

    BIDIRECTIONAL: ClassVar[bool] = True

    rope_theta: float = 1e6
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = size(None)
    target_hidden_size: int | None = size(None)
    aux: int = 1
    mask_token_id: int = size(0, least=0)
    block_size: int | None = size(None)
    causal: bool | None = None
    sample_from_anchor: bool = False
    use_swa: bool = False
    swa_window_size: int | None = size(None)
    attention_sink_bias: bool = False
    attention_value_scale: float | None = None
    is_neox_style: bool = True
    logit_scale: float = 1.0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    xpress_block_size: int | None = size(None)
    xpress_rank: int = 256
    xpress_mlp_hidden: int = 512
    xpress_topc: int = 512
    xpress_num_passes: int = 6
    lilicorr_hidden_size: int | None = size(None, least=0)
    lilicorr_candidate_topk: int = 4
    lilicorr_num_heads: int = 4
    lilicorr_num_layers: int = 1
    lilicorr_mlp_ratio: float = 4.0
    lilicorr_factor_dim: int = 64
    lilicorr_vector_eps: float = 1e-6
    lilicorr_logit_scale: float = 1.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, markov_head_type=("vanilla",))
        if self.conv_kernel_size and self.hidden_size % (self.conv_group_size or 1):
            raise ValueError(
                f"conv_group_size: {self.conv_group_size} does not divide hidden_size "
                f"{self.hidden_size}"
            )

    def is_causal_layer(self, index: int) -> bool:
        """Return whether a block's tokens see only those before them in layer `index`."""
        if self.causal is not None:
            return self.causal
        return self.layer_type(index) == "sliding_attention"

    def window(self, index: int) -> int | None:
        kinds = self.layer_types or ()
        sliding = self.layer_type(index) == "sliding_attention"
        if not kinds or (self.use_swa and "sliding_attention" not in kinds):
            sliding = self.use_swa
        if not sliding:
            return None
        window = self.swa_window_size or self.sliding_window
        if window is None:
            raise ValueError("sliding_window: required by layers of type sliding_attention")
        return window

    def rope(self, layer_type: str = "") -> Rope:
        return evolve(super().rope(layer_type), neox=self.is_neox_style)


class BlockAttention(Attention):
    """Attention of Qwen 3 whose tokens may see those after them, up to the end of their block."""

    def __init__(self, c: DFlashConfig, b: Builder, index: int, **changes: Any) -> None:
        self.causal, size = c.is_causal_layer(index), changes.get("head_dim", c.head_size)
        norms = tuple(b.rms_norm(name, size, c.rms_norm_eps) for name in ("q_norm", "k_norm"))
        settings: dict[str, Any] = {
            "hidden": c.hidden_size,
            "heads": c.heads,
            "kv_heads": c.kv_heads,
            "head_dim": c.head_size,
            "rope": None if "rope" in changes else c.rope(c.layer_type(index)),
            "bias": c.attention_bias,
            "out_bias": c.attention_bias,
            "window": c.window(index),
            "sinks": c.attention_sink_bias,
            "qk_norm": norms,
        }
        super().__init__(b, **{**settings, **changes})
        self.value_scale = c.attention_value_scale
        self.fusable = self.fusable and self.value_scale is None

    def make_cache(
        self, b: Builder, spec: AttentionSpec, kv_heads: int, names: AttentionNames
    ) -> None:
        super().make_cache(b, evolve(spec, causal=self.causal), kv_heads, names)

    def _project(
        self, qkv: Tensor, positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(qkv, positions, table)
        return q, k, v if self.value_scale is None else v * self.value_scale


class GroupedConvolution(Module):
    """A convolution over the tokens of a block, whose kernel depends on the token (DFlash 2).

    The kernel has a learned part per channel and one per group of channels, projected from the
    token's vector. It is used twice: on the input of a branch and on its output.
    """

    base: Tensor

    def __init__(self, c: DFlashConfig, b: Builder) -> None:
        super().__init__()
        self.taps, self.size = c.conv_kernel_size, c.conv_group_size
        groups = c.hidden_size // self.size
        self.project = b.linear(
            "kernel_projection", c.hidden_size, 2 * self.taps * groups, split=False
        )
        b.parameter("base_kernel", self, "base", (2, self.taps, c.hidden_size))

    def prepare(self, x: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Return the convolved input and what `finish` needs. x: [tokens, hidden]."""
        kernels = self.project(x).view(len(x), 2, self.taps, -1)
        return self._convolve(x, kernels[:, 0], 0, block), kernels[:, 1]

    def finish(self, x: Tensor, kernels: Tensor, block: int) -> Tensor:
        """Convolve the branch's output: [tokens, hidden]."""
        return self._convolve(x, kernels, 1, block)

    def _convolve(self, x: Tensor, kernels: Tensor, side: int, block: int) -> Tensor:
        """kernels: [tokens, taps, groups]; block: tokens per block."""
        groups = x.view(-1, block, x.shape[1] // self.size, self.size)
        base = self.base[side].view(self.taps, *groups.shape[2:])
        weights = kernels.view(*groups.shape[:2], *kernels.shape[1:], 1) + base
        out = weights[:, :, 0] * groups
        for tap in range(1, min(self.taps, block)):
            out[:, tap:] += weights[:, tap:, tap] * groups[:, :-tap]
        return out.view_as(x)


class BlockLayer(Module):
    """Qwen 3's layer over the tokens of blocks; its attention also caches their contexts."""

    def __init__(self, c: DFlashConfig, b: Builder, index: int) -> None:
        super().__init__()
        self.attn = self.make_attention(c, b.at("self_attn"), index)
        self.make_rest(c, b)
        self.attn_conv = self.mlp_conv = None
        if c.conv_kernel_size:
            self.attn_conv = GroupedConvolution(c, b.at("attention_conv"))
            self.mlp_conv = GroupedConvolution(c, b.at("mlp_conv"))

    def make_attention(self, c: Any, b: Builder, index: int) -> Module:
        """Make the attention; `b` points at it."""
        return BlockAttention(c, b, index)

    def make_rest(self, c: Any, b: Builder) -> None:
        """Make the norms and the feed-forward block."""
        self.mlp = standard_mlp(c, b)
        self.attn_norm = b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp_norm = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)

    def context(self, contexts: Tensor) -> Tensor:
        """Return what keys and values of the text are projected from: [tokens, hidden]."""
        return contexts

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch, block: int) -> Any:
        """x: [queries, hidden], the blocks' tokens; block: tokens per block, 0 without blocks."""
        if not block:
            self.attend(x, batch)
            return x, residual
        x, residual = self.attn_norm.add(x, residual)
        if self.attn_conv is None or self.mlp_conv is None:
            x, residual = self.mlp_norm.add(self.attend(x, batch), residual)
            return self.mlp(x), residual
        x, kernels = self.attn_conv.prepare(x, block)
        x = self.attn_conv.finish(self.attend(x, batch), kernels, block)
        x, residual = self.mlp_norm.add(x, residual)
        x, kernels = self.mlp_conv.prepare(x, block)
        return self.mlp_conv.finish(self.mlp(x), kernels, block), residual

    def attend(self, x: Tensor, batch: Batch) -> Tensor:
        """Cache contexts and blocks, and attend with the blocks: [queries, hidden].

        Without QUERIES, all tokens are contexts, or all are of blocks.
        """
        contexts, queries = batch.extras.get(CONTEXTS), batch.extras.get(QUERIES)
        if contexts is None or queries is None:
            inputs = x if contexts is None else self.context(contexts).to(x.dtype)
            alone: Tensor = self.attn(inputs, batch)
            return alone
        inputs = x.new_empty(len(batch.tokens), x.shape[1])
        inputs[batch.extras[CONTEXT_AT]] = self.context(contexts).to(x.dtype)
        inputs[queries] = x
        attended: Tensor = self.attn(inputs, batch)
        return attended[queries]


@frozen(eq=False)
class Block:
    """What a head chooses tokens from.

    states: [rows, tokens, hidden]. anchors: [rows] int64, the first token of each block. contexts:
    [rows, hidden], the context of the token before it.
    """

    states: Tensor
    anchors: Tensor
    contexts: Tensor


class DFlashHead(Module, Model):
    """A head whose masked tokens are chosen independently. `target` must be set before it runs."""

    api = 1
    config_type: ClassVar[type] = DFlashConfig
    layer: ClassVar[type[BlockLayer]] = BlockLayer
    target: Target | None = None
    d2t: Tensor | None
    names: ClassVar[WeightNames] = WeightNames(
        rename=(
            (r"^model\.", ""),
            (r"^midlayer\.", "layers.0."),
            (r"^encoder\.fc\.", "fc."),
            (r"^encoder\.output_norm_enc\.", "hidden_norm."),
            (r"^draft_id_to_target_id$", "d2t"),
            (r"\.attention_sink_bias$", ".sinks"),
        ),
        ignore=(r"^t2d$", r"^verifier_", r"^confidence_head\."),
    )

    def __init__(self, config: DFlashConfig, build: Builder) -> None:
        super().__init__()
        self.config, self.ops = config, build.ops
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.vocabulary = config.draft_vocab_size or config.vocab_size
        self.embed = self.head = None
        if config.own_embedding:
            self.embed = self.make_embedding(config, build)
        if config.own_head:
            self.head = self.make_head(config, build)
        width = config.target_hidden_size or hidden
        self.fc = None
        if config.aux:
            self.fc = build.linear("fc", width * config.aux, hidden, split=False)
        self.hidden_norm = build.rms_norm("hidden_norm", hidden, eps)
        self.layers = ModuleList(
            self.layer(config, build.at(f"layers.{i}"), i) for i in range(config.num_hidden_layers)
        )
        self.norm = build.rms_norm("norm", hidden, eps)
        self.register_parameter("d2t", None)
        if config.own_head and self.vocabulary < config.vocab_size:
            build.parameter("d2t", self, "d2t", (self.vocabulary,), torch.int64)
        #: [hidden], replaces the embedding of masked tokens; or None.
        self.mask_embedding: Tensor | None = None
        self._caches = tuple(build.shared.caches)

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        """Make the head's own embedding."""
        return b.embedding("embed_tokens", config.vocab_size, config.hidden_size)

    def make_head(self, config: Any, b: Builder) -> Head:
        """Make the head's own LM head."""
        return b.head("lm_head", config.hidden_size, self.vocabulary, scale=config.logit_scale)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        left = [] if config.own_embedding else [r"^embed_tokens\."]
        left += [] if config.own_head else [r"^lm_head\."]
        if not config.own_head or (config.draft_vocab_size or config.vocab_size) >= (
            config.vocab_size
        ):
            left.append(r"^d2t$")
        return evolve(cls.names, ignore=(*cls.names.ignore, *left))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("qwen3", cls.__name__, num_hidden_layers=2)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self._caches

    def combined(self, states: Sequence[Tensor]) -> Tensor:
        """Combine the states of the target's layers: [tokens, hidden]."""
        joined = torch.cat(tuple(states), dim=-1)
        context: Tensor = self.hidden_norm(joined if self.fc is None else self.fc(joined))
        return context

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embed tokens: [n] -> [n, hidden]."""
        x = self._of().embeddings(tokens) if self.embed is None else self.embed.lookup(tokens)
        if self.mask_embedding is not None:
            masked = (tokens == self.config.mask_token_id)[:, None]
            x = torch.where(masked, self.mask_embedding.to(x), x)
        scale = self.config.input_embedding_scale
        return x if scale == 1.0 else x * scale

    def forward(self, batch: Batch) -> Tensor:
        """Compute the states of the blocks' tokens, normed: [queries, hidden]."""
        if QUERIES not in batch.extras:
            return self.alone(batch)
        queries, anchors = batch.extras[QUERIES], batch.extras[ANCHORS]
        block = len(queries) // len(anchors) if len(anchors) else 0
        if block:
            x = self.embedded(batch.tokens[queries])
        else:
            x = batch.extras[CONTEXTS].new_empty(0, self.config.hidden_size)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, batch, block)
        normed: Tensor = self.norm.add(x, residual)[0] if block else x
        return normed

    def alone(self, batch: Batch) -> Tensor:
        """Run a batch of contexts, from the target's states, or of blocks: [tokens, hidden]."""
        names = [name for name in batch.extras if name.startswith(STATE)]
        if names:
            states = [batch.extras[f"{STATE}{at}"] for at in range(len(names))]
            contexts = self.combined(states)
            batch = evolve(batch, extras={CONTEXTS: contexts})
            for layer in self.layers:
                layer(contexts, None, batch, 0)
            return contexts
        x, residual = self.embedded(batch.tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch, 1)
        normed: Tensor = self.norm.add(x, residual)[0]
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._of().logits(hidden) if self.head is None else self.head(hidden)
        return logits

    def predictions(self, block: Block) -> Tensor:
        """Return the states that tokens are chosen from: [rows, drafts, hidden]."""
        return block.states if self.config.sample_from_anchor else block.states[:, 1:]

    def block_logits(self, states: Tensor) -> Tensor:
        """Compute logits: [rows, drafts, hidden] -> [rows, drafts, draft vocabulary]."""
        return self.logits(states.flatten(0, 1)).view(*states.shape[:2], -1)

    def in_target(self, tokens: Tensor) -> Tensor:
        """Map the head's token ids to the target's."""
        return tokens if self.d2t is None else tokens + self.d2t[tokens]

    def select(self, block: Block) -> Tensor:
        """Choose the drafts: [rows, drafts] int64, ids of the target."""
        return self.in_target(self.block_logits(self.predictions(block)).argmax(-1))

    def _of(self) -> Target:
        if self.target is None:
            raise UnsupportedError("a DFlash head requires its target model")
        return self.target


def renamed_in_projection() -> tuple[tuple[str, str], ...]:
    """Rules for torch's multi-head attention, whose fused layer has no module of its own."""
    return ((r"\.in_proj_(weight|bias)$", r".in_proj.\1"),)


def reshaped(pattern: str, *shape: int) -> Rewrite:
    """A rewrite that gives a tensor another shape."""
    return Rewrite(pattern, lambda name, t: [(name, t.reshape(shape))])
