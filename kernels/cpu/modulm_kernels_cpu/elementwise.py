"""Norms, activations, arithmetic, rotary embeddings, lookup. Semantics are those of the twins."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm_kernels_cpu.check import CODES, contiguous, dense_rows, dtype_code, need, shape
from modulm_kernels_cpu.library import Library
from modulm_kernels_cpu.linear import INTEGERS, PackedLinear

__all__ = ["elementwise_ops"]

#: Packed float formats: their dtype and the bytes of a lane (src/linear/weight.h).
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
    "xielu": 8,
}
_IDENTITY = 9


def elementwise_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return the ops of this module for one level."""
    return {
        "rms_norm": _rms_norm(library),
        "add_rms_norm": _add_rms_norm(library),
        "layer_norm": _layer_norm(library),
        "act_and_mul": _act_and_mul(library),
        "activate": _activate(library),
        "add": _add(library),
        "cast": _cast(library),
        "clamp": _clamp(library),
        "multiply": _multiply(library),
        "scale": _scale(library),
        "take_columns": _take_columns(library),
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


def _grouped(name: str, x: Tensor) -> tuple[int, int, int]:
    """Return rows per group of x, [rows, size] or [groups, rows, size], and group and row
    stride.
    """
    need(x.stride(-1) == 1 or x.shape[-1] == 1, f"{name} must be [rows, size] with dense rows")
    if x.dim() == 2:
        return 1, x.stride(0), 0
    need(x.dim() == 3, f"{name} must be [rows, size] or [groups, rows, size]")
    return x.shape[1], x.stride(0), x.stride(1)


def _weight_code(name: str, weight: Tensor, x: Tensor, size: int) -> int:
    """Return the code of a per-channel weight: [size], of x's dtype or fp32."""
    shape(name, weight, size)
    contiguous(name, weight)
    need(
        weight.dtype in (x.dtype, torch.float32),
        f"{name} must be {x.dtype} or float32, not {weight.dtype}",
    )
    return CODES[weight.dtype]


def _rms_norm(library: Library) -> Callable[..., Tensor]:
    call = library.call("rms_norm", "pnnnppffpnniii")

    def rms_norm(
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        out: Tensor | None = None,
        offset: float = 0.0,
    ) -> Tensor:
        code, size = dtype_code("x", x), x.shape[-1]
        count, *strides = _grouped("x", x)
        weight_code = code if weight is None else _weight_code("weight", weight, x, size)
        out = _output(x, out, *x.shape)
        call(
            x.data_ptr(), count, *strides, None, None if weight is None else weight.data_ptr(),
            eps, offset, out.data_ptr(), x.numel() // size, size, code, weight_code, code,
        )  # fmt: skip
        return out

    return rms_norm


def _add_rms_norm(library: Library) -> Callable[..., Tensor]:
    call = library.call("rms_norm", "pnnnppffpnniii")

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
        contiguous("residual", residual)
        need(
            residual.dtype in (x.dtype, torch.float32),
            f"residual must be {x.dtype} or float32, not {residual.dtype}",
        )
        weight_code = _weight_code("weight", weight, x, size)
        out = _output(x, out, tokens, size)
        call(
            x.data_ptr(), 1, stride, 0, residual.data_ptr(), weight.data_ptr(), eps, offset,
            out.data_ptr(), tokens, size, code, weight_code, CODES[residual.dtype],
        )  # fmt: skip
        return out

    return add_rms_norm


def _layer_norm(library: Library) -> Callable[..., Tensor]:
    call = library.call("layer_norm", "pnnnpnpfpnnii")

    def layer_norm(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = None,
    ) -> Tensor:
        code, size = dtype_code("x", x), x.shape[-1]
        count, *strides = _grouped("x", x)
        weight_code, weights = code, 1
        if weight is not None:
            weights = weight.numel() // size
            need(
                weight.shape in {(size,), x.shape[1:]}, f"weight must be [{size}] or as x's tokens"
            )
            weight_code = _weight_code("weight", weight.view(-1), x, weight.numel())
        if bias is not None:
            shape("bias", bias, size)
            contiguous("bias", bias, x.dtype if weight is None else weight.dtype)
        out = _output(x, out, *x.shape)
        call(
            x.data_ptr(), count, *strides, None if weight is None else weight.data_ptr(), weights,
            None if bias is None else bias.data_ptr(), eps, out.data_ptr(), x.numel() // size,
            size, code, weight_code,
        )  # fmt: skip
        return out

    return layer_norm


def _act_and_mul(library: Library) -> Callable[..., Tensor]:
    call = library.call("gated", "pnpnnii")

    def act_and_mul(x: Tensor, act: str, out: Tensor | None = None) -> Tensor:
        code, kind = dtype_code("x", x), _kind(act)
        need(x.shape[-1] % 2 == 0, f"x must have an even last dimension, not {list(x.shape)}")
        rows, stride = _rows("x", x)
        size = x.shape[-1] // 2
        out = _output(x, out, *x.shape[:-1], size)
        call(rows.data_ptr(), stride, out.data_ptr(), rows.shape[0], size, kind, code)
        return out

    return act_and_mul


def _kind(act: str) -> int:
    """Return the code of an activation without constants."""
    known = [name for name in _ACTIVATIONS if name != "xielu"]
    need(act in known, f"act must be one of {', '.join(known)}, not {act!r}")
    return _ACTIVATIONS[act]


def _rows(name: str, x: Tensor) -> tuple[Tensor, int]:
    """Return x as rows of its last dimension, and their stride."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows, dense_rows(name, rows)


def _activate(library: Library) -> Callable[..., Tensor]:
    call = library.call("activate", "pnpnniffi")

    def activate(x: Tensor, act: str, constants: tuple[float, ...] = ()) -> Tensor:
        need(act in _ACTIVATIONS, f"act must be one of {', '.join(_ACTIVATIONS)}, not {act!r}")
        need(len(constants) == (2 if act == "xielu" else 0), f"{act} got constants {constants}")
        rows, stride = _rows("x", x)
        out = x.new_empty(x.shape)
        call(
            rows.data_ptr(), stride, out.data_ptr(), *rows.shape, _ACTIVATIONS[act],
            *(constants or (0.0, 0.0)), dtype_code("x", x),
        )  # fmt: skip
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


def _clamp(library: Library) -> Callable[..., Tensor]:
    call = library.call("clamp", "pnfpnni")

    def clamp(x: Tensor, limit: float) -> Tensor:
        rows, stride = _rows("x", x)
        out = x.new_empty(x.shape)
        call(rows.data_ptr(), stride, limit, out.data_ptr(), *rows.shape, dtype_code("x", x))
        return out

    return clamp


def _take_columns(library: Library) -> Callable[..., Tensor]:
    call = library.call("take_columns", "pnppnni")

    def take_columns(x: Tensor, order: Tensor) -> Tensor:
        contiguous("order", order)
        need(order.dtype == torch.int64, f"order must be int64, not {order.dtype}")
        rows, stride = _rows("x", x)
        out = x.new_empty(*x.shape[:-1], len(order))
        call(
            rows.data_ptr(), stride, order.data_ptr(), out.data_ptr(), len(rows), len(order),
            dtype_code("x", x),
        )  # fmt: skip
        return out

    return take_columns


def _cast(library: Library) -> Callable[..., Tensor]:
    call = library.call("cast", "pnpnnii")

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        need(dtype in CODES, f"dtype must be float32, bfloat16 or float16, not {dtype}")
        rows, stride = _rows("x", x)
        out = x.new_empty(x.shape, dtype=dtype)
        call(rows.data_ptr(), stride, out.data_ptr(), *rows.shape, dtype_code("x", x), CODES[dtype])
        return out

    return cast


def _multiply(library: Library) -> Callable[..., Tensor]:
    call = library.call("multiply", "pnipnpnnii")

    def multiply(x: Tensor, y: Tensor, act: str = "") -> Tensor:
        count, size = x.shape
        shape("y", y, count, size)
        need(x.dtype in (y.dtype, torch.float32), f"x must be {y.dtype} or float32, not {x.dtype}")
        out = y.new_empty(count, size)
        call(
            x.data_ptr(), dense_rows("x", x), CODES[x.dtype], y.data_ptr(), dense_rows("y", y),
            out.data_ptr(), count, size, _kind(act) if act else _IDENTITY, dtype_code("y", y),
        )  # fmt: skip
        return out

    return multiply


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
    call_codes = library.call("embedding_codes", "ppppnnniipn", ctypes.c_int64)

    def embedding_packed(
        ids: Tensor, packed: PackedLinear, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Look up rows of a packed matrix [V, H]; ids: [T] int64 -> [T, H].

        A table that is tied to the head is stored once, in the head's format. Floats are returned
        as stored, int8 and int4 codes are dequantized to `dtype`.
        """
        codes = packed.format in INTEGERS
        need(codes or packed.format in _PACKED, f"packed must hold floats, not {packed.format}")
        contiguous("ids", ids, torch.int64)
        if codes:
            out = torch.empty(*ids.shape, packed.inputs, dtype=dtype)
            need(dtype in CODES, f"dtype must be that of floats, not {dtype}")
            outside = call_codes(
                ids.data_ptr(), *packed.arguments, CODES[dtype], out.data_ptr(), ids.numel()
            )
        else:
            stored_dtype, lane = _PACKED[packed.format]
            out = torch.empty(*ids.shape, packed.inputs, dtype=stored_dtype)
            outside = call(
                ids.data_ptr(), packed.data.data_ptr(), packed.outputs, packed.inputs,
                stored_dtype.itemsize, lane, out.data_ptr(), ids.numel(),
            )  # fmt: skip
        need(outside == 0, f"ids must lie in [0, {packed.outputs}); {outside} do not")
        return out

    return embedding_packed
