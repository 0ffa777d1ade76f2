"""Norms, activations, sums, rotation and lookup. Shapes and meaning are those of the twins."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm_kernels_cpu.check import CODES, contiguous, dense_rows, dtype_code, need, shape
from modulm_kernels_cpu.library import Library
from modulm_kernels_cpu.linear import PackedLinear

__all__ = ["elementwise_ops"]

#: Packed formats of floats: their dtype and the bytes of a lane (src/linear/weight.h).
_PACKED = {
    "bf16": (torch.bfloat16, 4),
    "fp32": (torch.float32, 4),
    "fp16": (torch.float16, 2),
}
#: Codes in src/activation/activation.cpp.
_ACTIVATIONS = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "quick_gelu": 3,
    "relu": 4,
    "relu2": 5,
    "sigmoid": 6,
    "tanh": 7,
}
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def elementwise_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """The ops of this module, bound to one level."""
    return {
        "rms_norm": _rms_norm(library),
        "add_rms_norm": _add_rms_norm(library),
        "layer_norm": _layer_norm(library),
        "activate": _activate(library),
        "add": _add(library),
        "scale": _scale(library),
        "silu_and_mul": _silu_and_mul(library),
        "gelu_and_mul": _gelu_and_mul(library),
        "rotary": _rotary(library),
        "embedding": _embedding(library),
        "embedding_packed": _embedding_packed(library),
    }


def _output(x: Tensor, out: Tensor | None, *sizes: int) -> Tensor:
    if out is None:
        return x.new_empty(sizes)
    shape("out", out, *sizes)
    contiguous("out", out, x.dtype)
    return out


def _weight_code(name: str, weight: Tensor, x: Tensor, size: int) -> int:
    """Code of a per-channel weight: [size], of x's dtype or fp32."""
    shape(name, weight, size)
    contiguous(name, weight)
    need(
        weight.dtype in (x.dtype, torch.float32),
        f"{name} must be {x.dtype} or float32, not {weight.dtype}",
    )
    return CODES[weight.dtype]


def _rms_norm(library: Library) -> Callable[..., Tensor]:
    call = library.call("rms_norm", "pnppffpnnii")

    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, offset: float = 0.0
    ) -> Tensor:
        code = dtype_code("x", x)
        size = x.shape[-1]
        rows = x if x.dim() == 2 else x.reshape(-1, size)
        stride = dense_rows("x", rows)
        weight_code = _weight_code("weight", weight, x, size)
        out = _output(x, out, *x.shape)
        call(
            rows.data_ptr(), stride, None, weight.data_ptr(), eps, offset, out.data_ptr(),
            rows.shape[0], size, code, weight_code,
        )  # fmt: skip
        return out

    return rms_norm


def _add_rms_norm(library: Library) -> Callable[..., Tensor]:
    call = library.call("rms_norm", "pnppffpnnii")

    def add_rms_norm(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor:
        code = dtype_code("x", x)
        stride = dense_rows("x", x)
        tokens, size = x.shape
        shape("residual", residual, tokens, size)
        contiguous("residual", residual, x.dtype)
        weight_code = _weight_code("weight", weight, x, size)
        out = _output(x, out, tokens, size)
        call(
            x.data_ptr(), stride, residual.data_ptr(), weight.data_ptr(), eps, offset,
            out.data_ptr(), tokens, size, code, weight_code,
        )  # fmt: skip
        return out

    return add_rms_norm


def _layer_norm(library: Library) -> Callable[..., Tensor]:
    call = library.call("layer_norm", "pnppfpnnii")

    def layer_norm(
        x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
    ) -> Tensor:
        code = dtype_code("x", x)
        size = x.shape[-1]
        rows = x if x.dim() == 2 else x.reshape(-1, size)
        stride = dense_rows("x", rows)
        weight_code = _weight_code("weight", weight, x, size)
        if bias is not None:
            shape("bias", bias, size)
            contiguous("bias", bias, weight.dtype)
        out = _output(x, out, *x.shape)
        call(
            rows.data_ptr(), stride, weight.data_ptr(), None if bias is None else bias.data_ptr(),
            eps, out.data_ptr(), rows.shape[0], size, code, weight_code,
        )  # fmt: skip
        return out

    return layer_norm


def _gated(library: Library) -> Callable[[Tensor, Tensor | None, int], Tensor]:
    call = library.call("gated", "pnpnnii")

    def gated(x: Tensor, out: Tensor | None, kind: int) -> Tensor:
        code = dtype_code("x", x)
        need(x.shape[-1] % 2 == 0, f"x must have an even last dimension, not {list(x.shape)}")
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        stride = dense_rows("x", rows)
        size = x.shape[-1] // 2
        out = _output(x, out, *x.shape[:-1], size)
        call(rows.data_ptr(), stride, out.data_ptr(), rows.shape[0], size, kind, code)
        return out

    return gated


def _silu_and_mul(library: Library) -> Callable[..., Tensor]:
    gated = _gated(library)

    def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
        return gated(x, out, _ACTIVATIONS["silu"])

    return silu_and_mul


def _gelu_and_mul(library: Library) -> Callable[..., Tensor]:
    gated = _gated(library)

    def gelu_and_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
        need(approximate in _GELUS, f"approximate must be none or tanh: {approximate!r}")
        return gated(x, out, _ACTIVATIONS[_GELUS[approximate]])

    return gelu_and_mul


def _rows(name: str, x: Tensor) -> tuple[Tensor, int]:
    """x as rows of its last dimension, and how far they are apart."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows, dense_rows(name, rows)


def _activate(library: Library) -> Callable[..., Tensor]:
    call = library.call("activate", "pnpnnii")

    def activate(x: Tensor, act: str) -> Tensor:
        need(act in _ACTIVATIONS, f"act must be one of {', '.join(_ACTIVATIONS)}, not {act!r}")
        rows, stride = _rows("x", x)
        out = x.new_empty(x.shape)
        count, size = rows.shape
        code = dtype_code("x", x)
        call(rows.data_ptr(), stride, out.data_ptr(), count, size, _ACTIVATIONS[act], code)
        return out

    return activate


def _add(library: Library) -> Callable[..., Tensor]:
    call = library.call("add", "pnpnpnpnni")

    def add(x: Tensor, y: Tensor, gate: Tensor | None = None) -> Tensor:
        code, count, size = dtype_code("x", x), *x.shape
        shape("y", y, count, size)
        need(y.dtype == x.dtype, f"y must be {x.dtype}, not {y.dtype}")
        if gate is not None:
            shape("gate", gate, count, 1)
            need(gate.dtype == x.dtype, f"gate must be {x.dtype}, not {gate.dtype}")
        out = x.new_empty(count, size)
        call(
            x.data_ptr(), dense_rows("x", x), y.data_ptr(), dense_rows("y", y),
            None if gate is None else gate.data_ptr(), 0 if gate is None else gate.stride(0),
            out.data_ptr(), count, size, code,
        )  # fmt: skip
        return out

    return add


def _scale(library: Library) -> Callable[..., Tensor]:
    call = library.call("scale", "pnfpnni")

    def scale(x: Tensor, factor: float) -> Tensor:
        rows, stride = _rows("x", x)
        out = x.new_empty(x.shape)
        call(rows.data_ptr(), stride, factor, out.data_ptr(), *rows.shape, dtype_code("x", x))
        return out

    return scale


def _rotary(library: Library) -> Callable[..., None]:
    call = library.call("rotary", "pnnnpnnnppnniii")

    def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, neox: bool = True) -> None:
        code = dtype_code("q", q)
        tokens, size = q.shape[0], cos_sin.shape[-1]
        for name, heads in (("q", q), ("k", k)):
            need(
                heads.dim() == 3 and heads.shape[0] == tokens, f"{name} must be [tokens, heads, D]"
            )
            need(heads.stride(2) == 1 and heads.dtype == q.dtype, f"{name} must have dense heads")
            need(heads.shape[2] >= size and size % 2 == 0, f"cos_sin is wider than {name}'s heads")
        contiguous("positions", positions, torch.int64)
        shape("positions", positions, tokens)
        contiguous("cos_sin", cos_sin)
        need(
            cos_sin.dtype in (q.dtype, torch.float32),
            f"cos_sin must be {q.dtype} or float32, not {cos_sin.dtype}",
        )
        call(
            q.data_ptr(), q.stride(0), q.stride(1), q.shape[1],
            k.data_ptr(), k.stride(0), k.stride(1), k.shape[1],
            positions.data_ptr(), cos_sin.data_ptr(), tokens, size, int(neox), code,
            CODES[cos_sin.dtype],
        )  # fmt: skip

    return rotary


def _embedding(library: Library) -> Callable[..., Tensor]:
    call = library.call("embedding", "ppnnpn", ctypes.c_int64)

    def embedding(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        contiguous("ids", ids, torch.int64)
        contiguous("weight", weight)
        rows, size = weight.shape
        out = _output(weight, out, *ids.shape, size)
        outside = call(
            ids.data_ptr(), weight.data_ptr(), rows, size * weight.element_size(), out.data_ptr(),
            ids.numel(),
        )  # fmt: skip
        need(outside == 0, f"ids must lie in [0, {rows}); {outside} do not")
        return out

    return embedding


def _embedding_packed(library: Library) -> Callable[..., Tensor]:
    call = library.call("embedding_packed", "ppnnnnpn", ctypes.c_int64)

    def embedding_packed(ids: Tensor, packed: PackedLinear) -> Tensor:
        """Rows of a float matrix [V, H] that `pack_linear` packed; ids: [T] int64 -> [T, H].

        A table that is also the head's weight is kept once, in the head's form.
        """
        need(packed.format in _PACKED, f"packed must hold floats, not {packed.format}")
        contiguous("ids", ids, torch.int64)
        dtype, lane = _PACKED[packed.format]
        out = torch.empty(*ids.shape, packed.inputs, dtype=dtype)
        outside = call(
            ids.data_ptr(), packed.data.data_ptr(), packed.outputs, packed.inputs, dtype.itemsize,
            lane, out.data_ptr(), ids.numel(),
        )  # fmt: skip
        need(outside == 0, f"ids must lie in [0, {packed.outputs}); {outside} do not")
        return out

    return embedding_packed
