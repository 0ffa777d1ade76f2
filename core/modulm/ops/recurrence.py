"""Recurrences in plain torch: a row's segments in matrix products, single tokens one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from modulm.ops.walk import Walk, walk

if TYPE_CHECKING:
    from modulm.contracts.model import StatePlan

__all__ = ["delta_rule", "selective_scan"]

#: Tokens of a parallel scan: as many as stay in a cache.
_FEW = 8


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, plan: StatePlan
) -> Tensor:
    """state = exp(dt a) state + dt b x and y = c state, in fp32: [T, heads, dim] like x.

    x: [T, heads, dim]; dt: [T, heads], positive; a: [heads, 1] or [heads, size], negative; b, c:
    [T, groups, size], each for heads / groups neighbouring heads; states: [slots, heads, dim,
    size] fp32. Where a head has one decay, a segment is three matrix products (Dao and Gu, arXiv
    2405.21060, section 6); where each of `size` numbers has its own (arXiv 2312.00752), a parallel
    scan.
    """
    x, dt, b, c = x.float(), dt.float(), b.float(), c.float()
    rows = _Inputs(x * dt.unsqueeze(-1), dt, b, c)

    def step(state: Tensor, at: Tensor) -> Tensor:
        return _scan_token(state, rows.at(at), a)

    y = x.new_empty(x.shape)
    segment = _ssd if a.shape[1] == 1 else _doubling
    return walk(states, plan, step, segment(rows, a), y)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, states: Tensor, plan: StatePlan
) -> Tensor:
    """state = exp(decay) state, then moved by beta towards v at k; y = q state; fp32 like v.

    q, k: [T, key heads, key dim], k of length 1; v: [T, heads, value dim], heads / key heads
    neighbouring ones for each key head; beta, decay: [T, heads], decay negative; states: [slots,
    heads, key dim, value dim] fp32. The gated delta rule and its form by segments: Yang et al.,
    arXiv 2412.06464, section 3.3.
    """
    each = v.shape[1] // k.shape[1]
    q, k, v, beta, decay = q.float(), k.float(), v.float(), beta.float(), decay.float()

    def step(state: Tensor, at: Tensor) -> Tensor:
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

    return walk(states, plan, step, segment, v.new_empty(v.shape))


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
    """What a scan reads, by token; `padded` has one token more that changes nothing.

    drive: [T, heads, dim], dt: [T, heads], b, c: [T, groups, size].
    """

    drive: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor

    def at(self, places: Tensor) -> _Inputs:
        """The tokens at `places`, of any shape."""
        return _Inputs(self.drive[places], self.dt[places], self.b[places], self.c[places])

    def padded(self) -> _Inputs:
        """The same with a last token of zeros."""
        return _Inputs(*(_with_zero(x) for x in (self.drive, self.dt, self.b, self.c)))


def _scan_token(state: Tensor, token: _Inputs, a: Tensor) -> Tensor:
    """One token of each of n rows; state: [n, heads, dim, size] -> [n, heads, dim]."""
    rows, heads, dim, size = state.shape
    groups = token.b.shape[1]
    state.mul_((token.dt.unsqueeze(-1) * a).exp().unsqueeze(2))
    grouped = state.view(rows, groups, -1, size)
    grouped += token.drive.view(rows, groups, -1, 1) * token.b.unsqueeze(2)
    return (grouped @ token.c.unsqueeze(-1)).view(rows, heads, dim)


def _ssd(inputs: _Inputs, a: Tensor) -> Walk:
    """Segments of a scan with one decay per head, as matrix products."""
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


def _doubling(inputs: _Inputs, a: Tensor) -> Walk:
    """Segments of a scan whose numbers each fade at their own pace: a parallel scan of few tokens
    at a time, as many as stay in a cache.
    """
    padded = inputs.padded()

    def segment(state: Tensor, at: Tensor) -> Tensor:
        return torch.cat(
            [_parallel_scan(state, padded.at(few), a) for few in torch.split(at, _FEW, 1)], 1
        )

    return segment


def _parallel_scan(state: Tensor, part: _Inputs, a: Tensor) -> Tensor:
    """Spans of 1, 2, 4, ... tokens are joined to spans of twice the length.

    Hillis and Steele, CACM 29 (1986). part: [n, tokens, ...] -> [n, tokens, heads, dim].
    """
    n, length, heads, dim = part.drive.shape
    groups, size = part.b.shape[2:]
    fade = (part.dt.unsqueeze(-1) * a).exp().unsqueeze(3)
    drive = part.drive.view(n, length, groups, -1, 1) * part.b.unsqueeze(3)
    found = drive.view(n, length, heads, dim, size)
    span = 1
    while span < length:
        joined = torch.addcmul(found[:, span:], fade[:, span:], found[:, :-span])
        found = torch.cat([found[:, :span], joined], 1)
        fade = torch.cat([fade[:, :span], fade[:, span:] * fade[:, :-span]], 1)
        span *= 2
    found = torch.addcmul(found, fade, state.unsqueeze(1))
    state.copy_(found[:, -1])
    y = found.view(n, length, groups, -1, size) @ part.c.unsqueeze(-1)
    return y.view(n, length, heads, dim)


def _decays(total: Tensor) -> Tensor:
    """exp of the sums of decays from each token (last index) to each later one, 0 to earlier ones.

    total: [..., SEGMENT], sums up to and including each token.
    """
    spans = total.unsqueeze(-1) - total.unsqueeze(-2)
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return spans.masked_fill(later, -torch.inf).exp()


def _with_zero(x: Tensor) -> Tensor:
    """x: [T, ...] and a token of zeros."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
