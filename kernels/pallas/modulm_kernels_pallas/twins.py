"""The kernels in plain torch: what they compute."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["grouped_matmul", "linear", "paged_attention", "write_kv"]


def write_kv(entries: Tensor, cache: Tensor, slots: Tensor, keys: int = 0) -> None:
    """Write [tokens, kv heads, width] to the slots of [blocks, kv heads, block size, width].

    keys: numbers with the first scale, for caches of `integers`.
    """
    if cache.dtype != torch.int8:
        size = cache.shape[2]
        cache[slots // size, :, slots % size] = entries.to(cache.dtype)
        return
    size = cache.shape[2] - 4
    for token, slot in enumerate(slots.tolist()):
        block = cache[slot // size]
        column = block[:, size:, slot % size]
        for i, part in enumerate((entries[token, :, :keys], entries[token, :, keys:])):
            least = (part.float().abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-126)
            exponent = least.log2().floor()
            steps = (least / exponent.exp2() * 256).ceil() - 256
            exponent, steps = exponent + (steps == 256), steps % 256
            scale = (1 + steps / 256) * exponent.exp2()
            codes = (part / scale).round()
            block[:, slot % size, slice(0, keys) if i == 0 else slice(keys, None)] = codes.to(
                torch.int8
            )
            column[:, 2 * i], column[:, 2 * i + 1] = steps[:, 0] - 128, exponent[:, 0]


def _decoded(cache: Tensor, size: int) -> Tensor:
    """Return the numbers of a cache [blocks, kv heads, block size, width] in fp32.

    size: numbers with the first scale.
    """
    if cache.dtype != torch.int8:
        return cache.float()
    wide = cache.float()
    codes, marks = wide[:, :, :-4].clone(), wide[:, :, -4:, : cache.shape[2] - 4]
    codes[..., :size] *= ((1 + (marks[:, :, 0] + 128) / 256) * marks[:, :, 1].exp2())[..., None]
    codes[..., size:] *= ((1 + (marks[:, :, 2] + 128) / 256) * marks[:, :, 3].exp2())[..., None]
    return codes


def paged_attention(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    size: int,
    values: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    latent: bool = False,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attend row by row; arguments as in the kernel and in `StepLayout`.

    q: [tokens, heads, size] -> [tokens, heads, values].
    """
    out = q.new_zeros(*q.shape[:2], values)
    decoded = _decoded(cache, values if latent else size)
    starts = query_starts.tolist()
    for row, length in enumerate(context_lens.tolist()):
        first, end = starts[row], starts[row + 1]
        entries = decoded[tables[row].long()].transpose(1, 2).flatten(0, 1)[:length]
        keys = entries[..., :size] * (1 if k_scale is None else k_scale[:, None])
        held = entries[..., :values] if latent else entries[..., size:]
        numbers = held * (1 if v_scale is None else v_scale[:, None])
        group = q.shape[1] // keys.shape[1]
        keys, numbers = (x.repeat_interleave(group, 1) for x in (keys, numbers))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(length - (end - first), length)[:, None]
        places = torch.arange(length)
        seen = torch.ones(end - first, length, dtype=torch.bool)
        if causal:
            seen &= places <= positions
        if window:
            seen &= places > positions - window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            column = sinks[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., :length]
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, numbers).to(q.dtype)
    return out


def linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x W^T + b with W = scale * (code - zero); codes: [N, K]; scales, zeros: [N, groups]."""
    parts = codes.float().unflatten(1, (scales.shape[1], -1))
    if zeros is not None:
        parts = parts - zeros[..., None]
    weight = (parts * scales[..., None]).flatten(1)
    return torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)


def grouped_matmul(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Each token by its experts; x: [T, K]; weights: [E, N, K]; ids: [T, n] -> [T, n, N]."""
    return torch.einsum("tk,tcnk->tcn", x.float(), weights[ids].float()).to(x.dtype)
