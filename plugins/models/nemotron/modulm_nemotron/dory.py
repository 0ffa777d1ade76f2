"""Nemotron-Labs Dory (NVIDIA, 2026): states of length 1 that layers turn towards their output
(nGPT, arXiv 2410.01131), and layers that run several times on the sum of their input and output.

A layer is attention or a feed-forward block. Learned scales are stored divided by the spread of
their initial values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import Factory, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Norm, WeightNames
from modulm.parallel import ProcessGroup
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    only,
    size,
    tiny_config,
)

__all__ = ["DoryConfig", "DoryForCausalLM", "DoryLayer"]

_EPS = 1e-6
_SLIDING, _FULL, _MLP = "sliding_attention", "full_attention", "mlp"


def _layer_kinds(config: DoryConfig) -> tuple[str, ...]:
    """By default every other layer is a feed-forward block, and one of eight sees all tokens."""
    return tuple(
        _MLP if i % 2 else _FULL if i % 8 == 6 else _SLIDING
        for i in range(config.num_hidden_layers)
    )


def _rest(config: DoryConfig) -> int:
    return config.num_hidden_layers - config.n_input_layers - config.n_output_layers


@frozen(kw_only=True)
class DoryConfig(DecoderConfig):
    """config.json of Dory. The layers between the first `n_input_layers` and the last
    `n_output_layers` run `n_recurrent_loops` times, each time with keys and values of its own.
    """

    head_dim: int | None = size(256)
    max_position_embeddings: int = size(8192)
    sliding_window: int | None = size(1024)
    layer_types: tuple[str, ...] | None = Factory(_layer_kinds, takes_self=True)
    initializer_range: float = 0.02
    ngpt_alpha_init: float = 0.05
    attention_output_gate_logit_scale_init: float | None = None
    n_input_layers: int = size(0, least=0)
    n_output_layers: int = size(0, least=0)
    n_recurrent_layers: int | None = size(None, least=0)
    n_recurrent_loops: int = size(1)
    recurrent_kv_cache_mode: str = "per_loop"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            attention_bias=(False,),
            hidden_act=("silu",),
            mlp_bias=(False,),
            n_recurrent_layers=(None, _rest(self)),
            recurrent_kv_cache_mode=("per_loop",),
            tie_word_embeddings=(False,),
        )
        if self.initializer_range <= 0:
            raise ValueError(f"initializer_range: {self.initializer_range} is not positive")
        if set(self.layer_types or ()) - {_SLIDING, _FULL, _MLP}:
            raise ValueError(f"layer_types: known are {_SLIDING}, {_FULL}, {_MLP}")

    def loops(self, index: int) -> int:
        """How often layer `index` runs."""
        inner = range(self.n_input_layers, self.num_hidden_layers - self.n_output_layers)
        return self.n_recurrent_loops if index in inner else 1


def _unit(x: Tensor, ranks: ProcessGroup | None = None) -> Tensor:
    """Scale vectors to length 1; ranks: hold parts of them."""
    wide = x.float()
    length = wide.square().sum(-1, keepdim=True)
    if ranks is not None and ranks.size > 1:
        length = ranks.all_reduce(length)
    return (wide * torch.rsqrt(length + _EPS)).to(x.dtype)


class DoryAttention(Attention):
    """Attention between rotated queries and keys of length 1, with a gate per number."""

    query_scales: Tensor
    gate_scales: Tensor

    def __init__(self, c: DoryConfig, b: Builder, index: int) -> None:
        self.loops = c.loops(index)
        super().__init__(
            b,
            hidden=c.hidden_size,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_size,
            rope=c.rope(c.layer_type(index)),
            window=c.window(index),
        )
        width, spread = c.heads * c.head_size, c.initializer_range
        shard = b.shard(width, c.head_size)
        b.cut_parameter("sqk", self, "query_scales", (shard,))
        b.cut_parameter("s_gate", self, "gate_scales", (shard,))
        self.gates = b.linear("g_proj", c.hidden_size, width, least=c.head_size)
        start = c.attention_output_gate_logit_scale_init
        start = c.hidden_size**0.5 if start is None else start
        self.factors = c.head_size**0.5 / spread, start**0.5 / spread
        self.fusable, self.ranks = False, b.shared.mesh.tensor

    def make_cache(
        self, b: Builder, spec: AttentionSpec, kv_heads: int, names: AttentionNames
    ) -> None:
        """Register the caches of all runs."""
        super().make_cache(b, spec, kv_heads, names)
        copies = max(b.shared.mesh.tensor.size // kv_heads, 1)
        more = [b.at(f"loop_{i}") for i in range(1, self.loops)]
        self.caches = [self.cache, *(at.attention_cache(spec, copies=copies)[0] for at in more)]

    def _project(
        self, qkv: Tensor, positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(qkv, positions, table)
        scales = (self.query_scales.float() * self.factors[0]).square().view(self.heads, -1)
        return (_unit(q).float() * scales).to(q.dtype), _unit(k), v

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        scales = (self.gate_scales.float() * self.factors[1]).square()
        seen = (out.flatten(1).float() * (self.gates(x).float() * scales).sigmoid()).to(out.dtype)
        attended: Tensor = self.out(_unit(seen, self.ranks))
        return attended


class DoryMLP(Module):
    """A gated feed-forward block with a scale per number, whose inner vector has length 1."""

    gate_scales: Tensor
    up_scales: Tensor

    def __init__(self, c: DoryConfig, b: Builder) -> None:
        super().__init__()
        hidden, inner = c.hidden_size, c.inner_size
        self.gate_up = b.linear("gate_up_proj", hidden, {"gate_proj": inner, "up_proj": inner})
        self.down = b.row_linear("down_proj", inner, hidden)
        for name, attribute in (("suv_gate", "gate_scales"), ("suv_up", "up_scales")):
            b.cut_parameter(name, self, attribute, (b.shard(inner),))
        self.factor, self.ranks = hidden**0.5, b.shared.mesh.tensor

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up(x).float().chunk(2, dim=-1)
        gate = torch.nn.functional.silu(gate * (self.gate_scales.float() * self.factor))
        inner = (gate * (up * (self.up_scales.float() * self.factor))).to(x.dtype)
        out: Tensor = self.down(_unit(inner, self.ranks))
        return out


class DoryLayer(Module):
    """Attention or a feed-forward block, towards whose output the state turns."""

    speed: Tensor

    def __init__(self, c: DoryConfig, b: Builder, index: int) -> None:
        super().__init__()
        self.attends, at = c.layer_type(index) != _MLP, b.at("mixer")
        self.mixer: Any = DoryAttention(c, at, index) if self.attends else DoryMLP(c, at)
        name = "attn_alpha" if self.attends else "mlp_alpha"
        b.parameter(name, self, "speed", (c.hidden_size,))
        self.factor = c.ngpt_alpha_init / c.initializer_range

    def forward(self, x: Tensor, batch: Batch, loop: int = 0) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        if self.attends:
            self.mixer.cache = self.mixer.caches[loop]
        out = self.mixer(x, batch) if self.attends else self.mixer(x)
        old, new = _unit(x).float(), _unit(out).float()
        return _unit(old + (self.speed.float() * self.factor).abs() * (new - old)).to(x.dtype)


class _NoNorm(Norm):
    """States have length 1 already."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class DoryForCausalLM(DecoderForCausalLM):
    """Dory with a language-model head; each token's logits have a scale of their own."""

    api = 1
    config_type = DoryConfig
    layer = DoryLayer
    names = WeightNames(rename=((r"^backbone\.", "model."),))
    oracle = "modulm_nemotron.dory_oracle:Dory"
    token_scales: Tensor

    def __init__(self, config: DoryConfig, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline parallelism: not supported yet: DoryForCausalLM, whose layers run "
                "several times; use --tensor-parallel-size"
            )
        super().__init__(config, build)
        build.parameter("lm_head.logit_scale", self, "token_scales", (config.vocab_size,))

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("embeddings", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return _NoNorm()

    def forward(self, batch: Batch) -> Tensor:
        c, layers = self.config, list(self.layers)
        first, last = c.n_input_layers, c.num_hidden_layers - c.n_output_layers
        x: Tensor = self.embed(batch)
        for layer in layers[:first]:
            x = layer(x, batch)
        start = x
        for loop in range(c.n_recurrent_loops):
            x = _unit(x + start)
            for layer in layers[first:last]:
                x = layer(x, batch, loop)
            x = _unit(x)
        for layer in layers[last:]:
            x = layer(x, batch)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        scales = self.token_scales.float() / self.config.initializer_range
        return super().logits(hidden).float() * scales

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return tiny_config(
            "dory",
            "DoryForCausalLM",
            num_hidden_layers=6,
            head_dim=24,
            sliding_window=12,
            layer_types=[_SLIDING, _MLP, _FULL, _MLP, _SLIDING, _MLP],
            rope_parameters={_SLIDING: rope, _FULL: {**rope, "partial_rotary_factor": 0.5}},
            n_input_layers=2,
            n_output_layers=2,
            n_recurrent_loops=2,
        )
