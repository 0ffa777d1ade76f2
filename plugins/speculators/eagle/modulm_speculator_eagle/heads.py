"""EAGLE heads as models: one or a few layers that continue from the target's hidden states.

EAGLE (Li et al., arXiv 2401.15077) predicts the target's last hidden state; EAGLE-3 (arXiv
2503.01840) combines the hidden states of three layers and continues from its own. If a checkpoint
omits the embedding or the LM head, the target's is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, CacheSpec, Model
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Norm, Rewrite, WeightNames
from modulm_layers import (
    DecoderConfig,
    PreNormLayer,
    standard_attention,
    standard_mlp,
    tiny_config,
)
from modulm_layers.config import size
from modulm_speculation.chain import HIDDEN

if TYPE_CHECKING:
    from modulm_speculation import Target

__all__ = [
    "LAYER",
    "MASKED",
    "Eagle3Head",
    "Eagle3Layer",
    "EagleConfig",
    "EagleHead",
    "Head",
    "halves",
    "without_shared",
]


#: Prefix of keys in `Batch.extras` of the states of the target's layers, in place of `HIDDEN`.
LAYER = "layer "
#: Key in `Batch.extras` of batches whose tokens all continue from the learned state: [tokens] bool.
MASKED = "masked"


@frozen(kw_only=True)
class EagleConfig(DecoderConfig):
    """config.json of a head.

    own_embedding, own_head, fc_bias, qkv_bias: whether the checkpoint has these weights. The
    target's states are `target_hidden_size` wide; those of `aux` layers are concatenated (0: only
    the last). fc_norm: each of them has a norm. norm_output: the next draft continues from the
    normed state. qk_norm: queries and keys have a norm per head. masked: all tokens are drafted in
    one step, from the token `ptd_token_id` and a learned state (P-EAGLE).
    """

    own_embedding: bool = False
    own_head: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    add_para_norm: bool = False
    draft_vocab_size: int | None = size(None)
    target_hidden_size: int | None = size(None)
    aux: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    masked: bool = False
    ptd_token_id: int | None = size(None, least=0)


class Head(Module, Model):
    """Base of both kinds. `target` must be set before it runs."""

    api = 1
    config_type = EagleConfig
    target: Target | None = None

    def __init__(self, config: EagleConfig, build: Builder) -> None:
        super().__init__()
        self.config, self.ops = config, build.ops
        hidden, vocabulary = config.hidden_size, config.draft_vocab_size or config.vocab_size
        self.embed = self.head = None
        if config.own_embedding:
            self.embed = build.embedding("embed_tokens", config.vocab_size, hidden)
        if config.own_head:
            self.head = build.head("lm_head", hidden, vocabulary)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self._caches

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embed tokens: [n] -> [n, hidden]."""
        if self.embed is not None:
            return self.embed.lookup(tokens)
        return self._of().embeddings(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._of().logits(hidden) if self.head is None else self.head(hidden)
        return logits

    def _of(self) -> Target:
        if self.target is None:
            raise UnsupportedError("an EAGLE head requires its target model")
        return self.target

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("llama", cls.__name__, num_hidden_layers=1)


class EagleLayer(PreNormLayer):
    """Llama's layer; the first one has no norm before attention."""

    def __init__(self, c: EagleConfig, b: Builder, index: int) -> None:
        norm = b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps) if index else NoNorm()
        super().__init__(
            norm,
            standard_attention(c, b, index, bias=c.qkv_bias),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class NoNorm(Norm):
    """The identity."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class EagleHead(Head):
    """EAGLE 1 and 2: the layers run on a projection of token embedding and previous state."""

    names: ClassVar[WeightNames] = WeightNames(
        rename=(
            (r"^model\.", ""),
            (r"^fusion_fc\.", "fc."),
            (r"^transformer\.", "layers.0."),
            (r"^embedding_layernorm", "embed_norm"),
            (r"^(hidden_states|pre_lm_head)_layernorm", "state_norm"),
        ),
        ignore=(r"^layers\.0\.input_layernorm\.",),
        rewrite=(
            Rewrite(r"^fc\.weight$", lambda _, t: halves(t, "embed_fc", "state_fc")),
            Rewrite(r"^fc\.bias$", lambda _, t: [("state_fc.bias", t)]),
        ),
    )

    def __init__(self, config: EagleConfig, build: Builder) -> None:
        super().__init__(config, build)
        hidden, target_hidden = config.hidden_size, config.target_hidden_size or config.hidden_size
        self.embed_fc = build.linear("embed_fc", hidden, hidden, split=False)
        self.state_fc = build.linear(
            "state_fc", target_hidden, hidden, bias=config.fc_bias, split=False
        )
        self.norms = ModuleList()
        if config.add_para_norm:
            self.norms.extend(
                build.rms_norm(name, hidden, config.rms_norm_eps)
                for name in ("embed_norm", "state_norm")
            )
        self.layers = ModuleList(
            EagleLayer(config, build.at(f"layers.{i}"), i) for i in range(config.num_hidden_layers)
        )
        self._caches = tuple(build.shared.caches)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        return without_shared(cls.names, config)

    def forward(self, batch: Batch) -> Tensor:
        x, state = self.embedded(batch.tokens), batch.extras[HIDDEN]
        if self.config.add_para_norm:
            x, state = self.norms[0](x), self.norms[1](state)
        x = self.ops.add(self.embed_fc(x), self.state_fc(state))
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return x if residual is None else self.ops.add(x, residual)


class Eagle3Layer(Module):
    """Llama's layer; attention of the first one reads the embedding and the state concatenated."""

    def __init__(self, c: EagleConfig, b: Builder, index: int) -> None:
        super().__init__()
        hidden, eps = c.hidden_size, c.rms_norm_eps
        self.first = not index
        self.make_attention(c, b, index)
        if self.first:
            self.hidden_norm = b.rms_norm("hidden_norm", hidden, eps)
        self.attn_norm = b.rms_norm("input_layernorm", hidden, eps)
        self.mlp_norm = b.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = standard_mlp(c, b)
        self.norm_before_residual = c.norm_before_residual

    def make_attention(self, c: EagleConfig, b: Builder, index: int) -> None:
        """Make the attention."""
        at, norms = b.at("self_attn"), None
        if c.qk_norm:
            names = "q_norm", "k_norm"
            norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in names)
        self.attn: Module = standard_attention(c, b, index, bias=c.qkv_bias, qk_norm=norms)
        if self.first:
            heads, shared = c.heads * c.head_size, c.kv_heads * c.head_size
            parts = {"q_proj": heads, "k_proj": shared, "v_proj": shared}
            second = b.at("beside").linear("qkv_proj", c.hidden_size, parts)
            self.attn.qkv = self.beside = Beside(self.attn.qkv, second)

    def inputs(self, x: Tensor, state: Tensor) -> Tensor:
        """Combine the normed embedding and state for the first layer's attention."""
        self.beside.state = state
        return x

    def forward(
        self, x: Tensor, state: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """x: token embeddings in the first layer, else the last branch.

        state: [tokens, hidden], for the first layer.
        """
        if not self.first:
            x, residual = self.attn_norm.add(x, residual)
        else:
            normed = self.hidden_norm(state)
            residual = normed if self.norm_before_residual else state
            x = self.inputs(self.attn_norm(x), normed)
        x, residual = self.mlp_norm.add(self.attn(x, batch), residual)
        return self.mlp(x), residual


class Beside(Module):
    """A linear layer of two concatenated inputs, computed as the sum of two linear layers."""

    def __init__(self, first: Module, second: Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, inputs], the first input; the second is `state`."""
        own, state, self.state = self.first(x), self.state, None
        if state is None:
            raise UnsupportedError("an EAGLE-3 layer requires hidden states")
        both: Tensor = self.first.method.ops.add(own, self.second(state))
        return both


def halves(tensor: Tensor, first: str, second: str) -> Iterator[tuple[str, Tensor]]:
    """Split a weight [outputs, 2 inputs] into the parts for the two inputs."""
    width = tensor.shape[-1] // 2
    yield f"{first}.weight", tensor[:, :width]
    yield f"{second}.weight", tensor[:, width:]


def _beside(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    layer = name.removesuffix(".weight")
    return halves(tensor, layer, layer.replace("self_attn", "beside"))


class Eagle3Head(Head):
    """EAGLE-3: combines the states of three layers; may draft from a smaller vocabulary.

    `d2t`: [draft_vocab_size], the target's token id minus the head's.
    """

    d2t: Tensor | None
    mask_hidden: Tensor | None
    layer: ClassVar[type[Eagle3Layer]] = Eagle3Layer
    names: ClassVar[WeightNames] = WeightNames(
        rename=(
            (r"^model\.", ""),
            (r"^midlayer\.", "layers.0."),
            (r"^draft_id_to_target_id$", "d2t"),
        ),
        ignore=(r"^t2d$", r"^verifier_"),
        rewrite=(
            Rewrite(r"^layers\.0\.self_attn\.[qkv]_proj\.weight$", _beside),
            Rewrite(r"^mask_hidden$", lambda name, t: [(name, t.flatten())]),
        ),
    )

    def __init__(self, config: EagleConfig, build: Builder) -> None:
        super().__init__(config, build)
        hidden, vocabulary = config.hidden_size, config.draft_vocab_size
        state_width = (config.target_hidden_size or hidden) * config.aux
        self.state_size = config.target_hidden_size or hidden
        self.fc = (
            build.linear("fc", state_width, hidden, bias=config.fc_bias, split=False)
            if state_width
            else None
        )
        self.input_norm = None
        if config.norm_before_fc:
            self.input_norm = build.rms_norm("input_norm", state_width, config.rms_norm_eps)
        self.state_norms = ModuleList(
            build.rms_norm(f"fc_norm.{i}", state_width // config.aux, config.rms_norm_eps)
            for i in range(config.aux if config.fc_norm else 0)
        )
        self.layers = ModuleList(
            self.layer(config, build.at(f"layers.{i}"), i) for i in range(config.num_hidden_layers)
        )
        self.norm = build.rms_norm("norm", hidden, config.rms_norm_eps)
        self.register_parameter("d2t", None)
        self.register_parameter("mask_hidden", None)
        if config.masked:
            build.parameter("mask_hidden", self, "mask_hidden", (state_width,))
        if config.own_head and vocabulary is not None and vocabulary != config.vocab_size:
            build.parameter("d2t", self, "d2t", (vocabulary,), torch.int64)
        self._caches = tuple(build.shared.caches)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = without_shared(cls.names, config)
        return names if config.masked else evolve(names, ignore=(*names.ignore, r"^mask_hidden$"))

    @property
    def masked(self) -> bool:
        """Whether the head has a state for tokens that are drafted in one step."""
        return self.mask_hidden is not None and self.config.ptd_token_id is not None

    def mask_states(self, count: int) -> Tensor:
        """Return the state of `count` tokens that are drafted in one step: [count, hidden]."""
        if self.mask_hidden is None:
            raise UnsupportedError("the head has no mask_hidden")
        state = self.combined(self.mask_hidden[None].split(self.state_size, dim=-1))
        return state.expand(count, -1).contiguous()

    def combined(self, states: Sequence[Tensor]) -> Tensor:
        """Combine the states of the target's layers into the first state: [tokens, hidden]."""
        if self.state_norms:
            states = [norm(state) for norm, state in zip(self.state_norms, states, strict=True)]
        joined = torch.cat(tuple(states), dim=-1)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return joined if self.fc is None else self.fc(joined)

    def forward(self, batch: Batch) -> Tensor:
        x, residual = self.embedded(batch.tokens), None
        state = batch.extras.get(HIDDEN)
        if MASKED in batch.extras:
            state = self.mask_states(len(batch.tokens))
        elif state is None:
            names = (f"{LAYER}{at}" for at in range(self.config.aux))
            state = self.combined([batch.extras[name] for name in names])
        for layer in self.layers:
            x, residual = layer(x, state, residual, batch)
        x = x if residual is None else self.ops.add(x, residual)
        return self.norm(x) if self.config.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden if self.config.norm_output else self.norm(hidden))


def without_shared(names: WeightNames, config: EagleConfig) -> WeightNames:
    """Leave out the weights that a head shares with its target."""
    left = [] if config.own_embedding else [r"^embed_tokens\."]
    left += [] if config.own_head else [r"^lm_head\.", r"^d2t$"]
    return evolve(names, ignore=(*names.ignore, *left))
