"""Selective scan, gated delta rule and causal convolution in plain torch.

Step sizes and rates are computed in fp64: torch's vectorized and scalar fp32 functions round
differently, so results would depend on the batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm_layers.chunked_scan import ScanStep, chunked_scan, initial_states

if TYPE_CHECKING:
    from modulm.contracts.model import StatePlan

__all__ = ["causal_conv", "delta_rule", "selective_scan"]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor, plan: StatePlan
) -> Tensor:
    """Convolve each row, channel by channel, over the last `width` tokens: the same shape as x.

    x: [T, channels]; weight: [channels, 1, width]; bias: [channels]; states: [slots, width - 1,
    channels], the inputs before a row's first token. `silu` is applied to the result.
    """
    past, width = initial_states(states, plan), states.shape[1]
    rows = [torch.cat(row) for row in zip(past, torch.split(x, list(plan.counts)), strict=True)]
    states[plan.slots] = torch.stack([row[row.shape[0] - width :] for row in rows])
    for row, tokens, slot in plan.saves:
        states[slot] = rows[row][tokens : tokens + width]
    if max(plan.counts) == 1:
        result = _convolve(torch.stack(rows), weight, bias).squeeze(1)
    else:
        result = torch.cat([_convolve(row, weight, bias) for row in rows])
    return (F.silu(result) if silu else result).to(x.dtype)


def _convolve(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """seen: [..., width - 1 + n, channels] -> [..., n, channels] fp32."""
    lags = weight.squeeze(1).float().unbind(1)
    places = seen.shape[-2] - len(lags) + 1
    total = sum(seen[..., i : i + places, :].float() * lag for i, lag in enumerate(lags))
    return torch.as_tensor(total) if bias is None else total + bias.float()


def selective_scan(
    x: Tensor,
    step: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    states: Tensor,
    plan: StatePlan,
    bias: Tensor | None = None,
    limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Compute state = exp(dt a) state + dt b x and y = c state + skip x: [T, heads, dim] fp32.

    dt is softplus(step + bias) within `limit` and a = -exp(a_log). x: [T, heads, dim]; step: [T,
    heads]; b, c: [T, groups, size], each for heads / groups adjacent heads; skip, bias: [heads] and
    a_log: [heads, 1] or [heads, size], fp32; states: [slots, heads, dim, size] fp32. arXiv
    2312.00752; with one decay per head, a segment is three matrix products (2405.21060, section 6).
    """
    x, dt, a = x.float(), _softplus(step, bias).clamp(*limit), -a_log.exp()
    rows = _Inputs(x * dt.unsqueeze(-1), dt, b.float(), c.float())

    def token(state: Tensor, at: Tensor) -> Tensor:
        return _scan_token(state, rows.at(at), a)

    segment = _ssd if a.shape[1] == 1 else _one_by_one
    y = chunked_scan(states, plan, token, segment(rows, a), x.new_empty(x.shape))
    return y + skip.unsqueeze(-1) * x


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    step: Tensor,
    a_log: Tensor,
    bias: Tensor,
    states: Tensor,
    plan: StatePlan,
    reach: float = 1.0,
) -> Tensor:
    """Gated delta rule: decay the state, move it towards v at k, read it at q. Returns fp32 like v.

    q, k: [T, key heads, key dim], normalized to length 1, q then divided by sqrt(key dim); v: [T,
    heads, value dim], heads / key heads adjacent ones for each key head; beta, step: [T, heads];
    a_log, bias: [heads] fp32; states: [slots, heads, key dim, value dim] fp32. The state is
    multiplied by exp(-exp(a_log) softplus(step + bias)) and moved by reach sigmoid(beta). The rule
    and its segment-wise form: Yang et al., arXiv 2412.06464, section 3.3.
    """
    each = v.shape[1] // k.shape[1]
    q, k, v = _unit(q) * q.shape[-1] ** -0.5, _unit(k), v.float()
    beta, decay = (reach * beta.double().sigmoid()).float(), -a_log.exp() * _softplus(step, bias)

    def token(state: Tensor, at: Tensor) -> Tensor:
        key, query = (part[at].repeat_interleave(each, 1).unsqueeze(2) for part in (k, q))
        state.mul_(decay[at].exp()[..., None, None])
        change = (v[at].unsqueeze(2) - key @ state) * beta[at][..., None, None]
        state += key.transpose(2, 3) @ change
        return (query @ state).squeeze(2)

    padded = tuple(_with_zero(part) for part in (q, k, v, beta, decay))

    def segment(state: Tensor, at: Tensor) -> Tensor:
        query, key, value, moved, fade = (part[at].transpose(1, 2) for part in padded)
        query, key = (part.repeat_interleave(each, 1) for part in (query, key))
        return _delta_segment(state, query, key, value, moved.unsqueeze(-1), fade)

    return chunked_scan(states, plan, token, segment, v.new_empty(v.shape))


def _softplus(step: Tensor, bias: Tensor | None) -> Tensor:
    """softplus(step + bias): fp32."""
    return F.softplus((step.float() + (0.0 if bias is None else bias)).double()).float()


def _unit(x: Tensor) -> Tensor:
    """Normalize vectors to length 1: fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _delta_segment(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
) -> Tensor:
    """One segment of n rows: q, k, v: [n, heads, SEGMENT, dim]; beta: [..., 1]; decay: [...]."""
    total = decay.cumsum(-1)
    grown = total.exp().unsqueeze(-1)
    between = _decays(total)
    mixing = (k @ k.transpose(2, 3) * between * beta).tril(-1)
    change = torch.linalg.solve_triangular(
        mixing, beta * (v - grown * (k @ state)), upper=False, unitriangular=True
    )
    y: Tensor = grown * (q @ state) + (q @ k.transpose(2, 3) * between) @ change
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    state.mul_(grown[:, :, -1:]).add_((k * left).transpose(2, 3) @ change)
    return y.transpose(1, 2)


@frozen(eq=False)
class _Inputs:
    """Inputs of a scan, by token. `padded` adds a token that does not change the state.

    drive: [T, heads, dim], dt: [T, heads], b, c: [T, groups, size].
    """

    drive: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor

    def at(self, places: Tensor) -> _Inputs:
        """Select the tokens at the indices `places`, of any shape."""
        return _Inputs(self.drive[places], self.dt[places], self.b[places], self.c[places])

    def padded(self) -> _Inputs:
        """Append a token of zeros."""
        return _Inputs(*(_with_zero(x) for x in (self.drive, self.dt, self.b, self.c)))


def _scan_token(state: Tensor, token: _Inputs, a: Tensor) -> Tensor:
    """Advance n rows by one token each; state: [n, heads, dim, size] -> [n, heads, dim]."""
    rows, heads, dim, size = state.shape
    groups = token.b.shape[1]
    state.mul_((token.dt.unsqueeze(-1) * a).exp().unsqueeze(2))
    grouped = state.view(rows, groups, -1, size)
    grouped += token.drive.view(rows, groups, -1, 1) * token.b.unsqueeze(2)
    return (grouped @ token.c.unsqueeze(-1)).view(rows, heads, dim)


def _ssd(inputs: _Inputs, a: Tensor) -> ScanStep:
    """Process segments of a scan with one decay per head as matrix products."""
    padded = inputs.padded()
    groups = inputs.b.shape[1]

    def segment(state: Tensor, at: Tensor) -> Tensor:
        part = padded.at(at)
        n, length, heads, dim = part.drive.shape
        total = (part.dt * a.squeeze(1)).cumsum(1).transpose(1, 2)
        drive = part.drive.transpose(1, 2)
        b, c = part.b.transpose(1, 2), part.c.transpose(1, 2)
        weights = (c @ b.transpose(2, 3)).repeat_interleave(heads // groups, 1) * _decays(total)
        y = weights @ drive
        held = state.view(n, groups, -1, state.shape[-1])
        carried = (c @ held.transpose(2, 3)).view(n, groups, length, -1, dim)
        y += carried.transpose(2, 3).reshape(y.shape) * total.exp().unsqueeze(-1)
        left = (total[..., -1:] - total).exp().unsqueeze(-1)
        kept = (drive * left).transpose(2, 3).reshape(n, groups, -1, length) @ b
        state.mul_(total[..., -1:, None].exp()).add_(kept.view(state.shape))
        return y.transpose(1, 2)

    return segment


def _one_by_one(inputs: _Inputs, a: Tensor) -> ScanStep:
    """Process segments of a scan with a decay per state element, token by token."""
    padded = inputs.padded()

    def segment(state: Tensor, at: Tensor) -> Tensor:
        return torch.stack([_scan_token(state, padded.at(t), a) for t in at.unbind(1)], 1)

    return segment


def _decays(total: Tensor) -> Tensor:
    """Return exp of the decay sums from each token (last index) to each later one, else 0.

    total: [..., SEGMENT], sums up to and including each token.
    """
    spans = total.unsqueeze(-1) - total.unsqueeze(-2)
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return spans.masked_fill(later, -torch.inf).exp()


def _with_zero(x: Tensor) -> Tensor:
    """Append a token of zeros to x: [T, ...]."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
