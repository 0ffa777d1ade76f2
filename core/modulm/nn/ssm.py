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

    `step(state, tokens)` takes the states [n, ...] of the rows that have a next token and those
    tokens' indices [n]; it changes the states in place and returns what the tokens give, which
    goes to `out` [tokens, ...]. It is called as often as the longest row has tokens: once when
    every row has one.
    """
    counts = plan.counts
    order = sorted(range(len(counts)), key=lambda row: -counts[row])
    rows = torch.tensor(order, device=states.device)
    slots, starts = plan.slots[rows], plan.query_starts[rows].long()
    state = _begin(states, slots, plan.fresh[rows])
    live = len(order)
    for place in range(counts[order[0]]):
        while counts[order[live - 1]] <= place:
            live -= 1
        tokens = starts[:live] + place
        out[tokens] = step(state[:live], tokens)
    states[slots] = state


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, plan: StatePlan
) -> Tensor:
    """state = exp(dt a) state + dt b x and y = c state, token by token, in fp32.

    x: [tokens, heads, dim]; dt: [tokens, heads], positive; a: [heads, 1] or [heads, size],
    negative; b, c: [tokens, groups, size], each for heads / groups neighbouring heads; states:
    [slots, heads, dim, size] fp32. Returns y like x, fp32.
    """
    tokens, heads, dim = x.shape
    groups, size = b.shape[1:]
    x, dt, b, c = x.float(), dt.float(), b.float(), c.float()
    decay = (dt.unsqueeze(-1) * a).exp()
    drive = x * dt.unsqueeze(-1)

    def step(state: Tensor, at: Tensor) -> Tensor:
        rows = state.shape[0]
        state.mul_(decay[at].unsqueeze(2))
        grouped = state.view(rows, groups, -1, size)
        grouped += drive[at].view(rows, groups, -1, 1) * b[at].unsqueeze(2)
        return (grouped @ c[at].unsqueeze(-1)).view(rows, heads, dim)

    y = x.new_empty(tokens, heads, dim)
    recur(states, plan, step, y)
    return y


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
        self.act = None if act is None else activation(act)
        self.state = (width - 1, channels)
        self.register_parameter("bias", None)
        shapes = {"weight": (channels, 1, width), **({"bias": (channels,)} if bias else {})}
        b.parameters(name, self, **shapes)

    def forward(self, x: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
        """x: [tokens, channels] -> the same shape."""
        past = _begin(states, plan.slots, plan.fresh)
        if max(plan.counts) == 1:
            seen = torch.cat([past, x.unsqueeze(1)], 1)
            states[plan.slots] = seen[:, 1:]
            return self._convolve(seen).squeeze(1)
        rows = [torch.cat(row) for row in zip(past, torch.split(x, list(plan.counts)), strict=True)]
        states[plan.slots] = torch.stack([row[row.shape[0] - self.state[0] :] for row in rows])
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

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan, tokens = batch.caches[self.cache], batch.plan(self.cache), x.shape[0]
        gate, mixed, dt = self.project(x).split(self.parts, -1)
        inputs, b, c = self.conv(mixed, cache["conv"], plan).split(self.mixed, -1)
        dt = F.softplus(dt.float() + self.dt_bias).clamp(*self.dt_limit)
        inputs = inputs.reshape(tokens, self.heads, -1).float()
        b, c = (part.reshape(tokens, self.groups, -1) for part in (b, c))
        a = -self.a_log.exp().unsqueeze(-1)
        y = selective_scan(inputs, dt, a, b, c, cache["state"], plan)
        y = y + self.skip.unsqueeze(-1) * inputs
        mixed_out: Tensor = self.out(self._normed(y.flatten(1), gate).to(x.dtype))
        return mixed_out

    def _normed(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate: [tokens, inner]."""
        gated = (y * F.silu(gate.float())).view(y.shape[0], self.groups, -1)
        return F.rms_norm(gated, gated.shape[-1:], eps=self.eps).flatten(1) * self.norm_weight


def _begin(states: Tensor, slots: Tensor, fresh: Tensor) -> Tensor:
    """A copy of the slots' states; zeros for fresh rows, whose slots hold garbage."""
    held = states[slots]
    return held.masked_fill_(fresh.view(-1, *[1] * (held.dim() - 1)), 0.0)
