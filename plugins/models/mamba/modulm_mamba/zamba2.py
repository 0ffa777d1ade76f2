"""Zamba 2 (Zyphra, arXiv 2411.15242): Mamba 2 with a few transformer blocks that many layers share.

A shared block reads the stream beside the embedding; each layer that runs it has low-rank
additions of its own, and keys and values of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import Factory, evolve, field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Norm, WeightNames
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    StateSpaceMixer,
    gated,
    only,
    size,
    tiny_config,
)

__all__ = ["Zamba2Config", "Zamba2ForCausalLM", "Zamba2Layer"]

_MAMBA, _HYBRID = "linear_attention", "hybrid"
_LONG = 16384


def _layer_kinds(config: Zamba2Config) -> tuple[str, ...]:
    """The layers of Zamba 2 2.7B and 7B."""
    gaps = (6, *[5] * 6, 4, 3)
    kinds = [kind for gap in gaps for kind in (*[_MAMBA] * gap, _HYBRID)]
    return (*kinds, _MAMBA, _MAMBA)


def _renamed(kinds: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if kinds is None else tuple(_MAMBA if k == "mamba" else k for k in kinds)


@frozen(kw_only=True)
class Zamba2Config(DecoderConfig):
    """config.json of Zamba 2. A hybrid layer runs a shared block before its state space; there are
    `num_mem_blocks` of them, which hybrid layers take in turn.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "layers_block_type": "layer_types",
        "attention_head_dim": "head_dim",
    }

    intermediate_size: int | None = size(None)
    hidden_act: str = "gelu"
    max_position_embeddings: int = size(4096)
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    layer_types: tuple[str, ...] | None = field(
        default=Factory(_layer_kinds, takes_self=True), converter=_renamed
    )
    mamba_d_state: int = size(64)
    mamba_d_conv: int = size(4, least=2)
    mamba_expand: int = size(2)
    mamba_ngroups: int = size(1)
    n_mamba_heads: int = size(8)
    time_step_min: float = 0.001
    add_bias_linear: bool = False
    num_mem_blocks: int = size(1)
    use_shared_attention_adapter: bool = False
    adapter_rank: int = size(128)
    use_mem_rope: bool = False
    use_long_context: bool = False

    def __attrs_post_init__(self) -> None:
        if self.use_long_context:
            object.__setattr__(self, "max_position_embeddings", _LONG)
        super().__attrs_post_init__()
        if set(self.layer_types or ()) - {_MAMBA, _HYBRID}:
            raise ValueError(f"layers_block_type: known are {_MAMBA}, {_HYBRID}")
        # Without tied weights, transformers gives each layer that runs a shared block its own.
        only(self, tie_word_embeddings=(True,))
        if self.use_shared_attention_adapter:
            only(self, num_key_value_heads=(None, self.num_attention_heads))
        if self.mamba_expand * self.hidden_size % self.n_mamba_heads:
            raise ValueError(
                f"n_mamba_heads: {self.mamba_expand * self.hidden_size} channels cannot be divided "
                f"evenly over {self.n_mamba_heads}"
            )

    @property
    def head_size(self) -> int:
        """Attention reads the stream and the embedding, so its heads are twice as wide."""
        return self.head_dim or 2 * self.hidden_size // self.num_attention_heads

    @property
    def hybrids(self) -> tuple[int, ...]:
        """The layers that run a shared block."""
        kinds = self.layer_types or ()
        return tuple(index for index, kind in enumerate(kinds) if kind == _HYBRID)


class LowRank(Module):
    """The product of two maps. parts: of the outputs; least: as in `Builder.linear`."""

    def __init__(
        self, b: Builder, inputs: int, rank: int, parts: Any, least: int | None = None
    ) -> None:
        super().__init__()
        self.narrow = b.linear("0", inputs, rank, split=False)
        self.widen = b.linear("1", rank, parts, least=least)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, inputs] -> [tokens, outputs]."""
        wide: Tensor = self.widen(self.narrow(x))
        return wide


class SharedAttention(Attention):
    """Attention with a cache, and maybe low-rank additions, for each of the layers that run it."""

    def __init__(self, c: Zamba2Config, b: Builder, places: tuple[int, ...]) -> None:
        self.places, hidden, width = places, 2 * c.hidden_size, c.heads * c.head_size
        super().__init__(
            b,
            hidden=hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_size,
            rope=c.rope() if c.use_mem_rope else None,
            scale=(c.head_size / 2) ** -0.5,
            outputs=c.hidden_size,
        )
        lists = [b.at(f"linear_{n}_adapter_list") for n in "qkv"]
        used = places if c.use_shared_attention_adapter else ()
        self.adapters = ModuleList(
            ModuleList(
                LowRank(at.at(str(place)), hidden, c.adapter_rank, width, c.head_size)
                for at in lists
            )
            for place in used
        )

    def make_cache(
        self, b: Builder, spec: AttentionSpec, kv_heads: int, names: AttentionNames
    ) -> None:
        """Register the caches of all layers."""
        super().make_cache(b, spec, kv_heads, names)
        copies = max(b.shared.mesh.tensor.size // kv_heads, 1)
        more = [b.at(f"place_{place}") for place in self.places[1:]]
        self.caches = [self.cache, *(at.attention_cache(spec, copies=copies)[0] for at in more)]

    def attend(self, x: Tensor, batch: Batch, turn: int) -> Tensor:
        """x: [tokens, 2 hidden] -> [tokens, hidden]; turn: which of the layers runs."""
        qkv = self.qkv(x)
        if len(self.adapters):
            added: Any = self.adapters[turn]
            qkv = qkv + torch.cat([adapter(x) for adapter in added], dim=-1)
        inputs, _ = self._constant or self._bind(qkv, batch.positions)
        q, k, v = self._project(qkv, batch.positions)
        cache, out = self.caches[turn], q.new_empty(q.shape)
        self.backend.forward(q, k, v, batch.caches[cache], batch.plan(cache), out, inputs)
        return self.project_out(out, x)


class SharedBlock(Module):
    """norm, attention, norm, feed-forward, without residuals; places: the layers that run it, by
    their places among hybrid layers.
    """

    def __init__(self, c: Zamba2Config, b: Builder, places: tuple[int, ...]) -> None:
        super().__init__()
        hidden, inner, bias, at = c.hidden_size, c.inner_size, c.add_bias_linear, "feed_forward"
        self.attn_norm = b.rms_norm("input_layernorm", 2 * hidden, c.rms_norm_eps)
        self.attn = SharedAttention(c, b.at("self_attn"), places)
        self.mlp_norm = b.rms_norm("pre_ff_layernorm", hidden, c.rms_norm_eps)
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = b.at(at).linear("gate_up_proj", hidden, parts, bias=bias)
        lists, rank = b.at(f"{at}.gate_up_proj_adapter_list"), c.adapter_rank
        made = [LowRank(lists.at(str(place)), hidden, rank, parts) for place in places]
        self.adapters = ModuleList(made)
        self.act = gated(c.hidden_act, b.ops)
        self.down = b.at(at).row_linear("down_proj", inner, hidden, bias=bias)

    def forward(self, x: Tensor, embedded: Tensor, batch: Batch, turn: int) -> Tensor:
        """x, embedded: [tokens, hidden] -> [tokens, hidden]."""
        x = self.attn.attend(self.attn_norm(torch.cat([x, embedded], dim=-1)), batch, turn)
        x = self.mlp_norm(x)
        out: Tensor = self.down(self.act(self.gate_up(x) + self.adapters[turn](x)))
        return out


class Zamba2Layer(Module):
    """A state space; a hybrid layer adds what a shared block returns to its input only."""

    def __init__(
        self, c: Zamba2Config, b: Builder, index: int, shared: SharedBlock | None, turn: int
    ) -> None:
        super().__init__()
        self.shared, self.turn, self.linear = shared, turn, None
        at = b
        if shared is not None:
            self.linear = b.linear("linear", c.hidden_size, c.hidden_size, split=False)
            at = b.at("mamba_decoder")
        self.norm = at.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mixer = StateSpaceMixer(
            at.at("mamba"),
            hidden=c.hidden_size,
            heads=c.n_mamba_heads,
            head_dim=c.mamba_expand * c.hidden_size // c.n_mamba_heads,
            size=c.mamba_d_state,
            groups=c.mamba_ngroups,
            width=c.mamba_d_conv,
            eps=1e-5,
            bias=c.add_bias_linear,
            dt_limit=(c.time_step_min, float("inf")),
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, embedded: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual, embedded: [tokens, hidden]."""
        if self.shared is None or self.linear is None:
            x, residual = self.norm.add(x, residual)
            return self.mixer(x, batch), residual
        stream = x if residual is None else x + residual
        added = self.linear(self.shared(stream, embedded, batch, self.turn))
        return self.mixer(self.norm(stream + added), batch), stream


class Zamba2ForCausalLM(DecoderForCausalLM):
    """Zamba 2 with a language-model head."""

    api = 1
    config_type = Zamba2Config

    def __init__(self, config: Zamba2Config, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline parallelism: not supported yet: Zamba2ForCausalLM, whose layers share "
                "blocks; use --tensor-parallel-size"
            )
        self._blocks: dict[int, SharedBlock] = {}
        super().__init__(config, build)

    def layer(self, c: Zamba2Config, b: Builder, index: int) -> Zamba2Layer:  # type: ignore[override]
        """Make layer `index`; the first that runs a shared block makes it."""
        if index not in c.hybrids:
            return Zamba2Layer(c, b, index, None, 0)
        place, count = c.hybrids.index(index), c.num_mem_blocks
        turn, block = divmod(place, count)
        if block not in self._blocks:
            places = tuple(range(block, len(c.hybrids), count))
            self._blocks[block] = SharedBlock(c, b.at("shared_transformer"), places)
        return Zamba2Layer(c, b, index, self._blocks[block], turn)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("final_layernorm", config.hidden_size, config.rms_norm_eps)

    @classmethod
    def weights(cls, config: Zamba2Config) -> WeightNames:
        copies = "|".join(map(str, config.hybrids[config.num_mem_blocks :])) or "none"
        ignored = (rf"^model\.layers\.({copies})\.shared_transformer\.",)
        return evolve(cls.names, ignore=ignored)

    def _run(
        self,
        batch: Batch,
        captured: dict[int, Tensor] | None = None,
        selected: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Tensor | None]:
        x: Tensor = self.embed(batch)
        embedded, residual = x.clone(), None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, batch, embedded)
            if index in selected and captured is not None:
                captured[index] = x if residual is None else x + residual
        return x, residual

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "zamba2",
            "Zamba2ForCausalLM",
            num_hidden_layers=4,
            num_key_value_heads=4,
            layers_block_type=[_MAMBA, _HYBRID, _HYBRID, _HYBRID],
            mamba_d_state=12,
            mamba_ngroups=2,
            num_mem_blocks=2,
            adapter_rank=8,
            use_mem_rope=True,
            chunk_size=16,
        )
