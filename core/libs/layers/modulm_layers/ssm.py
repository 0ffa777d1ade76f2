"""Recurrent layers: causal convolution, the Mamba-2 mixer, and model-specific recurrences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import StateSpec
from modulm.contracts.quantization import Shard
from modulm.errors import UnsupportedError
from modulm_layers.chunked_scan import chunked_scan

if TYPE_CHECKING:
    from modulm.contracts.model import Batch, StatePlan
    from modulm.nn.builder import Builder

__all__ = ["CausalConv", "GatedNorm", "StateSpaceMixer", "recur"]

Step = Callable[[Tensor, Tensor], Tensor]


def recur(states: Tensor, plan: StatePlan, step: Step, out: Tensor) -> None:
    """Scan all rows side by side, updating their states in `states` [slots, ...].

    For recurrences without an op. `step(state, tokens)` gets the states [n, ...] of the rows that
    have a next token and those tokens' indices [n]; it updates the states in place and returns the
    tokens' outputs, which are written to `out` [tokens, ...]. It is called once per token of the
    longest row.
    """

    def segment(state: Tensor, at: Tensor) -> Tensor:
        outputs = out.new_empty(*at.shape, *out.shape[1:])
        for index in range(at.shape[1]):
            active = (at[:, index] < out.shape[0]).nonzero().squeeze(1)
            advanced = state[active]
            outputs[active, index] = step(advanced, at[active, index])
            state[active] = advanced
        return outputs

    chunked_scan(states, plan, step, segment, out)


class CausalConv(Module):
    """A depthwise convolution along each row over the last `width` tokens.

    Its state is the row's last width - 1 inputs: [slots, width - 1, channels]. channels: channels
    of each of the stacked parts. least: for each part, the smallest unit that ranks cannot split.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        b: Builder,
        name: str,
        channels: int | Sequence[int],
        width: int,
        *,
        bias: bool,
        act: str | None,
        least: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__()
        if act not in (None, "silu", "swish"):
            at = b.name(name)
            raise UnsupportedError(f"hidden_act: {at}: not supported yet for convolutions: {act!r}")
        self.convolve, self.silu = b.ops.causal_conv, act is not None
        parts = [channels] if isinstance(channels, int) else channels
        cuts = zip(parts, least or [None] * len(parts), strict=True)
        shards = [b.shard(size, smallest) for size, smallest in cuts]
        self.state = (width - 1, sum(shard.size for shard in shards))
        self.register_parameter("bias", None)
        b.cut_parameter(f"{name}.weight", self, "weight", shards, (1, width))
        if bias:
            b.cut_parameter(f"{name}.bias", self, "bias", shards)

    def forward(self, x: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
        """x: [tokens, channels] -> the same shape."""
        y: Tensor = self.convolve(x, self.weight, self.bias, self.silu, states, plan)
        return y


class GatedNorm(Module):
    """Gated norm of a recurrence's output, over each of `groups` parts.

    Ranks that share a part exchange their sums of squares.
    """

    weight: Tensor

    def __init__(
        self, b: Builder, name: str, size: int, groups: int, eps: float, *, first: bool = False
    ) -> None:
        super().__init__()
        ranks = b.shared.mesh.tensor
        self.ops, self.eps, self.first = b.ops, eps, first
        self.ranks = ranks if groups % ranks.size else None
        self.groups = groups if self.ranks else groups // ranks.size
        whole = Shard(0, size, size)
        b.cut_parameter(f"{name}.weight", self, "weight", (whole if self.ranks else b.shard(size),))

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate: [tokens, size of this rank], y in fp32 -> like gate."""
        if self.ranks is not None:
            y, gate = self.ranks.all_gather(y), self.ranks.all_gather(gate)
        normed: Tensor = self.ops.gated_rms_norm(
            y, gate, self.weight, self.eps, self.groups, norm_first=self.first
        )
        if self.ranks is None:
            return normed
        return normed.tensor_split(self.ranks.size, -1)[self.ranks.rank].contiguous()


class StateSpaceMixer(Module):
    """Selective state spaces with one decay per head (Dao and Gu, arXiv 2405.21060, section 7).

    One projection yields the gate, the convolved inputs (x, b and c) and the step sizes, which are
    bounded by `dt_limit`. The output is gated and then normed over each of `groups` parts. `b`
    points at the layer.
    """

    a_log: Tensor
    skip: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        heads: int,
        head_dim: int,
        size: int,
        groups: int,
        width: int,
        eps: float,
        act: str = "silu",
        bias: bool = False,
        conv_bias: bool = True,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
    ) -> None:
        super().__init__()
        inner, state_size = heads * head_dim, groups * size
        self.ops, self.heads, self.groups = b.ops, b.share(heads), b.share(groups, 1)
        self.dt_limit = dt_limit
        rank_inner, rank_state = self.heads * head_dim, self.groups * size
        self.parts, self.mixed = (
            [rank_inner, rank_inner + 2 * rank_state, self.heads],
            [rank_inner, rank_state, rank_state],
        )
        pieces, least = (
            [inner, inner, state_size, state_size, heads],
            [head_dim, head_dim, size, size, 1],
        )
        self.project = b.pieces("in_proj", hidden, pieces, least, bias=bias)
        self.conv = CausalConv(
            b, "conv1d", pieces[1:4], width, bias=conv_bias, act=act, least=least[1:4]
        )
        for name, attribute in (("A_log", "a_log"), ("D", "skip"), ("dt_bias", "dt_bias")):
            b.cut_parameter(name, self, attribute, (b.shard(heads),), dtype=torch.float32)
        self.norm = GatedNorm(b, "norm", inner, groups, eps)
        self.out = b.row_linear("out_proj", inner, hidden, bias=bias)
        state = ("state", (self.heads, head_dim, size), "float32")
        self.cache = b.cache(StateSpec((("conv", self.conv.state, b.dtype), state)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan, tokens = batch.caches[self.cache], batch.plan(self.cache), x.shape[0]
        gate, mixed, step = self.project(x).split(self.parts, -1)
        inputs, b, c = self.conv(mixed, cache["conv"], plan).split(self.mixed, -1)
        inputs = inputs.view(tokens, self.heads, -1)
        b, c = (part.view(tokens, self.groups, -1) for part in (b, c))
        parts = (inputs, step, self.a_log.unsqueeze(-1), b, c, self.skip)
        y = self.ops.selective_scan(*parts, cache["state"], plan, self.dt_bias, self.dt_limit)
        mixed_out: Tensor = self.out(self.norm(y.flatten(1), gate))
        return mixed_out
