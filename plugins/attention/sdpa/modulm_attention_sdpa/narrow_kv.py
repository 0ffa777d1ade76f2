"""Store keys and values in fewer bits than they are computed in.

Formats with scales of their own lie as bytes. The names with an underscore are vLLM's, and so are
the orders of bytes:

- int8, int4: integers and an fp32 scale per token and head.
- fp8_per_token_head: e4m3 and an fp32 scale per token and head.
- nvfp4: e2m1, two per byte with the first in the low half, and an e4m3 scale per 16 numbers, their
  largest magnitude over 6. nvfp4_4over6 takes that over 4 where the squared error is smaller (Cook
  et al., "Four Over Six", arXiv 2512.02010).
- fp8_ds_mla: of DeepSeek's FlashMLA, for latents of 512 and a rotated part of 64: the latent in
  e4m3, four fp32 scales, the rotated part in bf16: 656 bytes.
- nvfp4_ds_mla: the same latent in e2m1, the rotated part in e4m3, 32 e4m3 scales, of which that of
  group g is at 8 (g % 4) + g // 4: 352 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LATENT", "PACKED", "REFUSED", "narrow", "pack", "packed_width", "unpack", "widen"]

#: Formats with one scale per token and head, and their largest value.
_INTEGERS = {"int8": 127, "int4": 7}
_BLOCKS = ("nvfp4", "nvfp4_4over6")
#: Formats of latents with a rotated part, and their bytes.
LATENT = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
#: Formats that are stored as bytes, with scales of their own.
PACKED = (*_INTEGERS, "fp8_per_token_head", *_BLOCKS, *LATENT)
#: Names of vLLM that no published text defines: why they are refused.
_OWN_CODE = (
    "is defined by vLLM's kernels only, not by a published format; use nvfp4, int4_per_token_head "
    "or fp8_per_token_head"
)
REFUSED = dict.fromkeys(
    (
        "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
        "octave_k3v4", "octave_k3v3", "octave_k3v3_compact", "ultraquant_4bit",
    ),
    _OWN_CODE,
)  # fmt: skip
_E4M3 = torch.float8_e4m3fn
_SCALE = 4  # bytes
_TINY = 1e-12
_GROUP, _LATENT, _ROTATED = 16, 512, 64
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Magnitudes from which on a number is rounded up. Halves go to the even code.
_UP = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True),
       (5.0, False))  # fmt: skip


def narrow(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Divide x [tokens, kv heads, size] by its scale and round. Values outside the range of an
    8-bit float are clamped to its largest number.
    """
    if scale is not None:
        x = x / scale[:, None]
    if dtype.itemsize == 1:
        top = torch.finfo(dtype).max
        x = x.clamp(-top, top)
    return x.to(dtype)


def widen(x: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply x [R, kv heads, L, size] by its scale."""
    return x if scale is None else (x * scale[:, None, None]).to(x.dtype)


def packed_width(kind: str, size: int) -> int:
    """Return the bytes of `size` numbers and their scales; 0 for no numbers."""
    if not size:
        return 0
    if kind in LATENT:
        return LATENT[kind]
    if kind in _BLOCKS:
        return size // 2 + size // _GROUP
    return (size // 2 if kind == "int4" else size) + _SCALE


def pack(x: Tensor, kind: str) -> Tensor:
    """Encode x [tokens, kv heads, size] as [tokens, kv heads, width] uint8: codes and scales."""
    wide = x.float()
    if kind == "fp8_ds_mla":
        codes, scales = _scaled(wide[..., :_LATENT].unflatten(-1, (4, -1)))
        parts = codes.flatten(-2), scales.flatten(-2), x[..., _LATENT:].to(torch.bfloat16)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    if kind == "nvfp4_ds_mla":
        pairs, scales = _blocks(wide[..., :_LATENT], choose=False)
        permuted = scales.unflatten(-1, (8, 4)).transpose(-1, -2).flatten(-2)
        rotated = narrow(wide[..., _LATENT:], None, _E4M3)
        parts = pairs, rotated.view(torch.uint8), permuted.contiguous().view(torch.uint8)
        return torch.cat(parts, -1)
    if kind in _BLOCKS:
        pairs, scales = _blocks(wide, choose=kind == "nvfp4_4over6")
        return torch.cat([pairs, scales.view(torch.uint8)], -1)
    if kind == "fp8_per_token_head":
        parts = _scaled(wide)
        return torch.cat([part.view(torch.uint8) for part in parts], -1)
    top = _INTEGERS[kind]
    scale = (wide.abs().amax(-1, keepdim=True) / top).clamp_(min=_TINY)
    integers = (wide / scale).round_().clamp_(-top, top).to(torch.int8)
    if kind == "int4":
        shifted = (integers + 8).view(torch.uint8)
        integers = _pairs(shifted).view(torch.int8)
    return torch.cat([integers.view(torch.uint8), scale.view(torch.uint8)], -1)


def unpack(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Decode the output of `pack` to numbers [.., size]."""
    if kind == "fp8_ds_mla":
        codes = _view(packed[..., :_LATENT], _E4M3).float().unflatten(-1, (4, -1))
        scales = _view(packed[..., _LATENT : _LATENT + 4 * _SCALE], torch.float32)
        latent = (codes * scales[..., None]).flatten(-2).to(dtype)
        rotated = _view(packed[..., -2 * _ROTATED :], torch.bfloat16).to(dtype)
        return torch.cat([latent, rotated], -1)
    if kind == "nvfp4_ds_mla":
        half = _LATENT // 2
        permuted = packed[..., half + _ROTATED :].unflatten(-1, (4, 8))
        scales = permuted.transpose(-1, -2).flatten(-2)
        latent = _unblocked(packed[..., :half], scales).to(dtype)
        rotated = _view(packed[..., half : half + _ROTATED], _E4M3).to(dtype)
        return torch.cat([latent, rotated], -1)
    if kind in _BLOCKS:
        cut = packed.shape[-1] * 8 // 9
        return _unblocked(packed[..., :cut], packed[..., cut:]).to(dtype)
    scale = _view(packed[..., -_SCALE:], torch.float32)
    codes = packed[..., :-_SCALE].contiguous()
    if kind == "fp8_per_token_head":
        return (codes.view(_E4M3).float() * scale).to(dtype)
    if kind == "int4":
        numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int8) - 8
    else:
        numbers = codes.view(torch.int8)
    return (numbers.float() * scale).to(dtype)


def _view(part: Tensor, dtype: torch.dtype) -> Tensor:
    return part.contiguous().view(dtype)


def _pairs(codes: Tensor) -> Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def _scaled(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 numbers and the fp32 scale of the last dimension."""
    scale = (wide.abs().amax(-1, keepdim=True) / 448.0).clamp_(min=_TINY)
    return narrow(wide / scale, None, _E4M3), scale


def _blocks(wide: Tensor, *, choose: bool) -> tuple[Tensor, Tensor]:
    """Return pairs of e2m1 codes [.., n / 2], and scales [.., n / 16] e4m3."""
    grouped = wide.unflatten(-1, (-1, _GROUP))
    most = grouped.abs().amax(-1, keepdim=True)
    codes, scales, error = _rounded(grouped, most / 6.0)
    if choose:
        others, wider, error_of = _rounded(grouped, most / 4.0)
        better = error_of < error
        codes, scales = torch.where(better, others, codes), torch.where(better, wider, scales)
    return _pairs(codes.flatten(-2)), scales.to(_E4M3).squeeze(-1)


def _rounded(grouped: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return e2m1 codes uint8, scales rounded to e4m3 fp32, and the squared error of a group."""
    scale = wanted.clamp(2.0**-9, 448.0).to(_E4M3).float()
    ratio = grouped / scale
    size, code = ratio.abs(), torch.zeros_like(ratio, dtype=torch.uint8)
    for middle, at_half in _UP:
        code += (size >= middle) if at_half else (size > middle)
    values = torch.tensor(_MAGNITUDES, device=grouped.device)[code.int()]
    error = (values * scale - grouped.abs()).square().sum(-1, keepdim=True)
    return code | ratio.signbit().to(torch.uint8) << 3, scale, error


def _unblocked(pairs: Tensor, scales: Tensor) -> Tensor:
    """Invert `_blocks`: [.., n] fp32."""
    table = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], device=pairs.device)
    codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    numbers = table[codes.int()].unflatten(-1, (-1, _GROUP))
    return (numbers * _view(scales, _E4M3).float()[..., None]).flatten(-2)
