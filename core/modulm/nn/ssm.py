"""Recurrent layers: what they keep per row, stepped over rows of any mix of lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import StateSpec
from modulm.errors import UnsupportedError
from modulm.nn.activation import activation
from modulm.ops.recurrence import selective_scan
from modulm.ops.walk import begin, walk

if TYPE_CHECKING:
    from modulm.contracts.model import Batch, StatePlan
    from modulm.nn.builder import Builder

__all__ = ["CausalConv", "StateSpaceMixer", "recur", "selective_scan", "single_rank"]

Step = Callable[[Tensor, Tensor], Tensor]


def single_rank(b: Builder) -> None:
    """Raise UnsupportedError where several ranks would share a recurrent layer."""
    if b.ranks > 1:
        raise UnsupportedError(f"{b.prefix}: recurrent layers on several ranks: not yet")


def recur(states: Tensor, plan: StatePlan, step: Step, out: Tensor) -> None:
    """Walk all rows forward side by side, from their states in `states` [slots, ...] to new ones.

    For recurrences that have no op. `step(state, tokens)` takes the states [n, ...] of the rows
    that have a next token and those tokens' indices [n]; it changes the states in place and
    returns what the tokens give, which goes to `out` [tokens, ...]. It is called as often as the
    longest row has tokens: once when every row has one.
    """

    def segment(state: Tensor, at: Tensor) -> Tensor:
        given = out.new_empty(*at.shape, *out.shape[1:])
        for place in range(at.shape[1]):
            here = (at[:, place] < out.shape[0]).nonzero().squeeze(1)
            moved = state[here]
            given[here, place] = step(moved, at[here, place])
            state[here] = moved
        return given

    walk(states, plan, step, segment, out)


class CausalConv(Module):
    """A convolution along each row, channel by channel, over the last `width` tokens.

    Its state is the row's last width - 1 inputs: [slots, width - 1, channels].
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, b: Builder, name: str, channels: int, width: int, *, bias: bool, act: str | None
    ) -> None:
        super().__init__()
        self.act = None if act is None else activation(act, b.ops)
        self.state = (width - 1, channels)
        self.register_parameter("bias", None)
        shapes = {"weight": (channels, 1, width), **({"bias": (channels,)} if bias else {})}
        b.parameters(name, self, **shapes)

    def forward(self, x: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
        """x: [tokens, channels] -> the same shape."""
        past = begin(states, plan)
        if max(plan.counts) == 1:
            seen = torch.cat([past, x.unsqueeze(1)], 1)
            states[plan.slots] = seen[:, 1:]
            return self._convolve(seen).squeeze(1)
        rows = [torch.cat(row) for row in zip(past, torch.split(x, list(plan.counts)), strict=True)]
        states[plan.slots] = torch.stack([row[row.shape[0] - self.state[0] :] for row in rows])
        for row, tokens, slot in plan.kept:
            states[slot] = rows[row][tokens : tokens + self.state[0]]
        return torch.cat([self._convolve(row) for row in rows])

    def _convolve(self, seen: Tensor) -> Tensor:
        """seen: [..., width - 1 + n, channels] -> [..., n, channels]."""
        places = seen.shape[-2] - self.state[0]
        weight = self.weight.squeeze(1).float()
        lags = range(weight.shape[1])
        total = sum(seen[..., lag : lag + places, :].float() * weight[:, lag] for lag in lags)
        y = torch.as_tensor(total) if self.bias is None else total + self.bias.float()
        return (y if self.act is None else self.act(y)).to(seen.dtype)


class StateSpaceMixer(Module):
    """Selective state spaces with one decay per head (Dao and Gu, arXiv 2405.21060, section 7).

    One projection gives gate, convolved inputs (x, b and c) and step sizes, which are bounded by
    `dt_limit`. The output is gated and then normed over each of `groups` parts. `b` stands at
    the layer.
    """

    a_log: Tensor
    skip: Tensor
    dt_bias: Tensor
    norm_weight: Tensor

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
        single_rank(b)
        inner = heads * head_dim
        self.heads, self.groups, self.eps, self.dt_limit = heads, groups, eps, dt_limit
        self.parts = [inner, inner + 2 * groups * size, heads]
        self.mixed = [inner, groups * size, groups * size]
        self.project = b.linear("in_proj", hidden, sum(self.parts), bias=bias)
        self.conv = CausalConv(b, "conv1d", self.parts[1], width, bias=conv_bias, act=act)
        b.parameter("A_log", self, "a_log", (heads,), torch.float32)
        b.parameter("D", self, "skip", (heads,), torch.float32)
        b.parameter("dt_bias", self, "dt_bias", (heads,), torch.float32)
        b.parameter("norm.weight", self, "norm_weight", (inner,))
        self.out = b.row_linear("out_proj", inner, hidden, bias=bias)
        state = ("state", (heads, head_dim, size), "float32")
        self.cache = b.cache(StateSpec((("conv", self.conv.state, b.dtype), state)))
        self.scan, self.silu = b.ops.selective_scan, activation("silu", b.ops)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan, tokens = batch.caches[self.cache], batch.plan(self.cache), x.shape[0]
        gate, mixed, dt = self.project(x).split(self.parts, -1)
        inputs, b, c = self.conv(mixed, cache["conv"], plan).split(self.mixed, -1)
        # In fp64, as torch's fp32 functions round otherwise where a row's numbers fill no register.
        dt = F.softplus((dt.float() + self.dt_bias).double()).float().clamp(*self.dt_limit)
        inputs = inputs.reshape(tokens, self.heads, -1).float()
        b, c = (part.reshape(tokens, self.groups, -1) for part in (b, c))
        a = -self.a_log.exp().unsqueeze(-1)
        y = self.scan(inputs, dt, a, b, c, cache["state"], plan)
        y = y + self.skip.unsqueeze(-1) * inputs
        mixed_out: Tensor = self.out(self._normed(y.flatten(1), gate).to(x.dtype))
        return mixed_out

    def _normed(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate: [tokens, inner]."""
        gated = (y * self.silu(gate.float())).view(y.shape[0], self.groups, -1)
        return F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(1) * self.norm_weight
