"""Stand-ins for FlashAttention 2 and 3: what they document, in torch, strict about arguments."""

from __future__ import annotations

from typing import ClassVar

import torch

WIDEST = 256


def _attended(q, keys, values, visible, distance, scale, softcap, slopes):
    """q: [n, heads, d]; keys, values: [m, kv heads, d]; visible, distance: [n, m]."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).to(q.dtype)


def _check(q, k_cache, v_cache, table, lengths, page, slopes):
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert k_cache.dim() == v_cache.dim() == 4
    assert k_cache.shape == v_cache.shape
    assert k_cache.shape[1] % page == 0, "page_block_size must be a multiple of 256"
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert q.shape[-1] == k_cache.shape[-1] <= WIDEST
    assert q.shape[-1] % 8 == 0
    assert q.shape[-2] % k_cache.shape[2] == 0
    assert table.dtype == lengths.dtype == torch.int32
    assert table.dim() == 2
    assert table.is_contiguous()
    assert lengths.shape == (len(table),)
    if slopes is not None:
        assert slopes.dtype == torch.float32
        assert slopes.shape == (q.shape[-2],)


def _rows(q, starts, k_cache, v_cache, table, lengths, scale, causal, window, softcap, slopes):
    """q: [tokens, heads, d], rows from `starts` on."""
    out = torch.zeros_like(q)
    left, right = window
    for row, length in enumerate(lengths.tolist()):
        first, end = int(starts[row]), int(starts[row + 1])
        if first == end:
            continue
        keys, values = (
            cache[table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache)
        )
        at = torch.arange(end - first)[:, None] + length - (end - first)
        distance = at - torch.arange(length)
        visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance <= left
        if right >= 0:
            visible &= distance >= -right
        out[first:end] = _attended(
            q[first:end], keys, values, visible, distance, scale, softcap, slopes
        )
    return out


class Flash2:
    """flash_attn 2.6 or later."""

    page = 256
    calls: ClassVar[list[str]] = []

    @classmethod
    def flash_attn_varlen_func(
        cls, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        lengths = cu_seqlens_k.diff().int()
        _check(q, k, v, block_table, lengths, cls.page, alibi_slopes)
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert int(cu_seqlens_q[-1]) == len(q)
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(lengths.max())
        cls.calls.append("varlen")
        return _rows(
            q, cu_seqlens_q, k, v, block_table, lengths, softmax_scale, causal, window_size,
            softcap, alibi_slopes,
        )  # fmt: skip

    @classmethod
    def flash_attn_with_kvcache(
        cls, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert q.dim() == 4
        _check(q, k_cache, v_cache, block_table, cache_seqlens, cls.page, alibi_slopes)
        starts = torch.arange(len(q) + 1) * q.shape[1]
        cls.calls.append("with_kvcache")
        output = _rows(
            q.flatten(0, 1), starts, k_cache, v_cache, block_table, cache_seqlens, softmax_scale,
            causal, window_size, softcap, alibi_slopes,
        )  # fmt: skip
        return output.view(q.shape)


class Flash3:
    """flash_attn_interface of the Hopper folder."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def flash_attn_varlen_func(cls, *args, **kwargs):
        raise AssertionError("has no pages")

    @classmethod
    def flash_attn_with_kvcache(
        cls, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
        cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        _check(q, k_cache, v_cache, page_table, cache_seqlens, 1, None)
        if cu_seqlens_q is None:
            assert q.dim() == 4
            starts = torch.arange(len(q) + 1) * q.shape[1]
            cls.calls.append("with_kvcache")
        else:
            assert q.dim() == 3
            assert cu_seqlens_q.dtype == torch.int32
            assert max_seqlen_q == int(cu_seqlens_q.diff().max())
            starts = cu_seqlens_q
            cls.calls.append("varlen")
        output = _rows(
            q.reshape(-1, *q.shape[-2:]), starts, k_cache, v_cache, page_table, cache_seqlens,
            softmax_scale, causal, window_size, softcap, None,
        )  # fmt: skip
        return output.view(q.shape)


class Flash25(Flash2):
    """Before there was a softcap."""

    @classmethod
    def flash_attn_with_kvcache(
        cls, q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), alibi_slopes=None, num_splits=0,
    ):  # fmt: skip
        raise AssertionError("not called")
