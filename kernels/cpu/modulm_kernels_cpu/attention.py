"""The paged KV cache and attention over it.

A layer's cache is a tensor [blocks, kv heads, block size, width], whose last dimension is the size
of a token's key and value, and for int8 the 8 bytes of two scales. A latent cache holds only keys;
their first entries are the values. The layout of the last two dimensions is internal to the kernels
(src/attention/cache.h). Only `write_kv`, `qkv_prepare` and `paged_attention` read or write it;
whole blocks may be copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modulm_kernels_cpu.check import CODES, contiguous, dtype_code, need, shape
from modulm_kernels_cpu.library import Library

__all__ = [
    "CACHE_DTYPES",
    "MAX_HEAD_SIZE",
    "MOST_MASKED",
    "attention_ops",
    "cache_arguments",
    "cache_shape",
    "copy_tokens",
    "need_heads",
]

#: Cache dtypes and their codes in the C ABI. Bytes are e4m3 with scales.
CACHE_DTYPES = {
    **CODES, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, torch.int8: 5, torch.uint8: 6,
}  # fmt: skip
#: Those with scales.
_SCALED = (torch.int8, torch.uint8)
#: Integers of as many bytes.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
MAX_HEAD_SIZE = 1024
#: New tokens of a sequence with masks.
MOST_MASKED = 64

_UNIT = 32  # block sizes and head sizes are padded to multiples of this
_SCALES = 8  # bytes for the scales of a key and a value
_RECORD = 6  # int32 values in a record of a plan


def cache_shape(
    blocks: int,
    kv_heads: int,
    block_size: int,
    head_size: int,
    value_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[int, int, int, int]:
    """Return the shape of a layer's cache. value_size: None for the key size, 0 for a latent cache.

    `block_size` must be a multiple of 32.
    """
    need(block_size % _UNIT == 0, f"block_size must be a multiple of {_UNIT}, not {block_size}")
    return (blocks, kv_heads, block_size, _width(head_size, value_size, dtype))


def _width(size: int, value_size: int | None, dtype: torch.dtype) -> int:
    scales = _SCALES if dtype in _SCALED and value_size != 0 else 0
    return _padded(size) + _padded(size if value_size is None else value_size) + scales


def _padded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT


def copy_tokens(
    cache: Tensor, size: int, value_size: int | None, source: Tensor, target: Tensor
) -> None:
    """Copy tokens inside a cache; all are read before any is written.

    size, value_size: as for `cache_shape`. source, target: [n] int64 slots.
    """
    blocks, heads, block, _ = cache.shape
    plain = cache.dtype in (torch.float32, torch.float16)
    group = 1 if plain else 4 if cache.dtype == torch.int8 else 2
    # Numpy indexes small parts in a fifth of torch's time.
    flat = cache.view(_BITS[cache.itemsize]).numpy().reshape(blocks, heads, -1)
    keys = 0 if value_size == 0 else _padded(size) * block
    values = _padded(value_size or size) * block
    from_, from_at = np.divmod(source.numpy(), block)
    to, to_at = np.divmod(target.numpy(), block)
    if keys:
        lines = flat[..., :keys].reshape(blocks, heads, -1, block, group)
        lines[to, :, :, to_at] = lines[from_, :, :, from_at]
    rows = flat[..., keys : keys + values].reshape(blocks, heads, block // group, -1, group)
    picked = rows[from_, :, from_at // group, :, from_at % group]
    rows[to, :, to_at // group, :, to_at % group] = picked
    if cache.dtype in _SCALED and keys:
        scales = flat[..., keys + values :].reshape(blocks, heads, 2, block, 4)
        scales[to, :, :, to_at] = scales[from_, :, :, from_at]


def attention_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return the ops of this module for one level."""
    return {
        "write_kv": _write_kv(library),
        "qkv_prepare": _qkv_prepare(library),
        "plan_attention": _plan_attention(library),
        "paged_attention": _paged_attention(library),
        "varlen_attention": _varlen_attention(library),
    }


def cache_arguments(
    cache: Tensor, kv_heads: int, size: int, value_size: int
) -> tuple[int, int, int, int, int, int, int]:
    """Return address, kv heads, block size, padded sizes, whether latent, and dtype code."""
    need(
        cache.dim() == 4 and cache.is_contiguous(),
        f"cache must be [blocks, kv_heads, block, width], contiguous, not {list(cache.shape)}",
    )
    try:
        code = CACHE_DTYPES[cache.dtype]
    except KeyError:
        raise ValueError(
            f"cache must be of a float dtype or int8, not {str(cache.dtype)[6:]}"
        ) from None
    _, heads, block, width = cache.shape
    padded = _padded(size)
    latent = width == padded
    need(heads == kv_heads, f"cache has {heads} kv heads, not {kv_heads}")
    need(block % _UNIT == 0, f"cache must have blocks of a multiple of {_UNIT}, not {block}")
    need(
        (latent and heads == 1 and value_size <= size and cache.dtype not in _SCALED)
        or width == _width(size, value_size, cache.dtype),
        f"cache of width {width} does not hold keys of {size} and values of {value_size}",
    )
    value = padded if latent else _padded(value_size)
    return cache.data_ptr(), heads, block, padded, value, int(latent), code


def need_heads(name: str, x: Tensor) -> None:
    """Raise ValueError unless x is [tokens, heads, size] with dense heads of a supported size."""
    need(
        x.dim() == 3 and x.stride(2) == 1 and x.shape[2] <= MAX_HEAD_SIZE,
        f"{name} must be [tokens, heads, size <= {MAX_HEAD_SIZE}] with dense heads, "
        f"not {list(x.shape)} with strides {list(x.stride())}",
    )


def _write_kv(library: Library) -> Callable[..., None]:
    call = library.call("write_kv", "pnnpnnnnnipnnnniip")

    def write_kv(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        need_heads("k", k)
        need_heads("v", v)
        tokens, heads, size = k.shape
        value_size = v.shape[2]
        shape("v", v, tokens, heads, value_size)
        need(v.dtype == k.dtype, f"v must be {k.dtype}, not {v.dtype}")
        contiguous("slots", slots, torch.int64)
        shape("slots", slots, tokens)
        call(
            k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(), v.stride(0), v.stride(1),
            tokens, size, value_size, dtype_code("k", k),
            *cache_arguments(cache, heads, size, value_size), slots.data_ptr(),
        )  # fmt: skip

    return write_kv


def _qkv_prepare(library: Library) -> Callable[..., Tensor]:
    call = library.call("qkv_prepare", "pnnnnippiffpnipipnnnniipp")

    def qkv_prepare(
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos_sin: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        cache: Tensor,
        heads: int,
        kv_heads: int,
        neox: bool = True,
        q_out: Tensor | None = None,
        norm_offset: float = 0.0,
    ) -> Tensor:
        code = dtype_code("qkv", qkv)
        tokens, width = qkv.shape
        need(qkv.stride(1) == 1 or tokens == 0, "qkv must have dense rows")
        size, rest = divmod(width, heads + 2 * kv_heads)
        need(rest == 0 and size <= MAX_HEAD_SIZE, f"qkv of {width} does not hold the heads")
        norm_code = code if q_norm is None or q_norm.dtype == qkv.dtype else 0
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                shape(name, norm, size)
                contiguous(name, norm, qkv.dtype if norm_code == code else torch.float32)
        contiguous("positions", positions, torch.int64)
        contiguous("slots", slots, torch.int64)
        shape("positions", positions, tokens)
        shape("slots", slots, tokens)
        turned = table_code = 0
        if cos_sin is not None:
            contiguous("cos_sin", cos_sin)
            turned, table_code = cos_sin.shape[1], CODES.get(cos_sin.dtype, -1)
            need(
                cos_sin.dtype in (qkv.dtype, torch.float32),
                f"cos_sin must be {qkv.dtype} or float32, not {cos_sin.dtype}",
            )
            need(turned <= size and turned % 2 == 0, "cos_sin is wider than a head")
        if q_out is None:
            q_out = qkv.new_empty(tokens, heads, size)
        shape("q_out", q_out, tokens, heads, size)
        contiguous("q_out", q_out, qkv.dtype)
        call(
            qkv.data_ptr(), qkv.stride(0), tokens, heads, size, code,
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(), norm_code, eps, norm_offset,
            None if cos_sin is None else cos_sin.data_ptr(), turned, table_code,
            positions.data_ptr(), int(neox), *cache_arguments(cache, kv_heads, size, size),
            slots.data_ptr(), q_out.data_ptr(),
        )  # fmt: skip
        return q_out

    return qkv_prepare


def _plan_attention(library: Library) -> Callable[..., Tensor]:
    count = library.call("plan_records", "pnn", ctypes.c_int64)
    call = library.call("plan_attention", "ppnnnnipp")

    def plan_attention(
        query_starts: Tensor,
        context_lens: Tensor,
        heads: int,
        kv_heads: int,
        window: int = 0,
        causal: bool = True,
        masks: Tensor | None = None,
    ) -> Tensor:
        """Divide the work of a step, for `paged_attention` in all layers of one kind.

        masks: [tokens] int64; bit i: whether the token sees its sequence's new token i, of at most
        `MOST_MASKED`. 0 in sequences that are causal.
        """
        contiguous("query_starts", query_starts, torch.int32)
        contiguous("context_lens", context_lens, torch.int32)
        sequences, group = context_lens.shape[0], heads // kv_heads
        shape("query_starts", query_starts, sequences + 1)
        starts = query_starts.data_ptr()
        plan = query_starts.new_empty(count(starts, sequences, group) * _RECORD)
        call(
            starts, context_lens.data_ptr(), sequences, group, kv_heads, window, int(causal),
            _masks_pointer(masks), plan.data_ptr(),
        )  # fmt: skip
        return plan

    return plan_attention


def _paged_attention(library: Library) -> Callable[..., Tensor]:
    call = library.call("paged_attention", "pnnnnnipnnnniipnppnfnfppippp")

    def paged_attention(
        q: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scale: float,
        out: Tensor,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        causal: bool = True,
        plan: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        need_heads("q", q)
        tokens, heads, size = q.shape
        kv_heads = cache.shape[1]
        need(heads % kv_heads == 0, f"q has {heads} heads for {kv_heads} kv heads")
        value_size = out.shape[-1]
        shape("out", out, tokens, heads, value_size)
        contiguous("out", out, q.dtype)
        sequences = context_lens.shape[0]
        need(
            block_tables.dim() == 2 and block_tables.shape[0] == sequences,
            f"block_tables must be [{sequences}, blocks], not {list(block_tables.shape)}",
        )
        need(
            block_tables.dtype == torch.int32 and block_tables.stride(1) == 1,
            "block_tables must be int32 with dense rows",
        )
        contiguous("query_starts", query_starts, torch.int32)
        shape("query_starts", query_starts, sequences + 1)
        contiguous("context_lens", context_lens, torch.int32)
        if plan is not None:
            contiguous("plan", plan, torch.int32)
        for name, x in (("sinks", sinks), ("alibi", alibi)):
            if x is not None:
                shape(name, x, heads)
                contiguous(name, x, torch.float32)
        call(
            q.data_ptr(), q.stride(0), q.stride(1), heads, size, value_size, dtype_code("q", q),
            *cache_arguments(cache, kv_heads, size, value_size),
            block_tables.data_ptr(), block_tables.stride(0), query_starts.data_ptr(),
            context_lens.data_ptr(), sequences, scale, window, softcap,
            None if sinks is None else sinks.data_ptr(),
            None if alibi is None else alibi.data_ptr(), int(causal), _masks_pointer(masks),
            None if plan is None else plan.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    return paged_attention


def _masks_pointer(masks: Tensor | None) -> int | None:
    if masks is None:
        return None
    contiguous("masks", masks, torch.int64)
    return masks.data_ptr()


def _varlen_attention(library: Library) -> Callable[..., Tensor]:
    write_kv, plan_attention = _write_kv(library), _plan_attention(library)
    paged_attention = _paged_attention(library)

    def varlen_attention(
        q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None
    ) -> Tensor:
        """Attend through a temporary cache in which each row begins a new block."""
        need_heads("q", q)
        need_heads("k", k)
        counts = torch.tensor(lengths)
        need(int(counts.sum()) == len(q) == len(k), f"lengths must be those of {len(q)} tokens")
        kv_heads, size = k.shape[1:]
        blocks = -(-counts // _UNIT)
        firsts = blocks.cumsum(0) - blocks
        cache = q.new_empty(cache_shape(int(blocks.sum()), kv_heads, _UNIT, size, dtype=q.dtype))
        moved = firsts * _UNIT - (counts.cumsum(0) - counts)
        write_kv(k, v, cache, torch.arange(len(q)) + moved.repeat_interleave(counts))
        tables = firsts[:, None] + torch.arange(int(blocks.max()))
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lens = counts.int()
        plan = plan_attention(starts, lens, q.shape[1], kv_heads, causal=False)
        return paged_attention(
            q, cache, tables.int(), starts, lens, size**-0.5 if scale is None else scale, out,
            causal=False, plan=plan,
        )  # fmt: skip

    return varlen_attention
