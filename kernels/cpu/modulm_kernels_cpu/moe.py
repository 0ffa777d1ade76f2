"""Mixture of experts: choosing experts, and all of a layer's experts in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm.ops import twins
from modulm_kernels_cpu.check import contiguous, dense_rows, dtype_code, need, shape
from modulm_kernels_cpu.library import Library
from modulm_kernels_cpu.memory import huge_buffer

__all__ = ["FORMATS", "PackedExperts", "moe_ops"]

#: Formats of packed stacks and their codes in the C ABI (src/moe/stack.h).
FORMATS = {"bf16": 0, "int8": 1, "int4": 2, "mxfp4": 3, "fp32": 4, "fp16": 5}

#: Formats of floats, and their dtypes.
_FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
_GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
_GROUP_SCORES = ("max", "top2")
_SCORINGS = ("softmax", "sigmoid")
_PANEL, _PAD_N, _PAD_K, _MX_BLOCK = 64, 16, 32, 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class PackedExperts:
    """A stack of weights [experts, parts * N, K] in the kernels' own layout.

    Owns its memory; the original can be dropped. `stack[e]` is the weight of expert e, in
    bf16 if it was quantized.
    """

    __slots__ = (
        "_unpack",
        "arguments",
        "data",
        "experts",
        "format",
        "group",
        "inputs",
        "outputs",
        "parts",
        "scales",
        "zeros",
    )

    def __init__(
        self,
        data: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        sizes: tuple[int, int, int, int],
        group: int,
        format: str,  # noqa: A002  the word that the flags use
        unpack: Callable[..., None],
    ) -> None:
        self.data, self.scales, self.zeros = data, scales, zeros
        self.experts, self.parts, self.outputs, self.inputs = sizes
        self.group, self.format, self._unpack = group, format, unpack
        self.arguments = (
            data.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            group or self.inputs,
            FORMATS[format],
        )

    @property
    def bytes(self) -> int:
        """Memory that all experts take."""
        return sum(x.nbytes for x in (self.data, self.scales, self.zeros) if x is not None)

    def __getitem__(self, expert: int) -> Tensor:
        """[parts * N, K], scales applied."""
        return torch.cat([self._matrix(expert * self.parts + i) for i in range(self.parts)])

    def __len__(self) -> int:
        return self.experts

    def __repr__(self) -> str:
        size = f"{self.experts} x {self.parts * self.outputs} x {self.inputs}"
        return f"PackedExperts({size}, {self.format})"

    def _matrix(self, index: int) -> Tensor:
        size = self.data.numel() // (self.experts * self.parts)
        kind = {**_FLOATS, "int8": torch.int8}.get(self.format, torch.uint8)
        codes = torch.empty(self.outputs, self.inputs, dtype=kind)
        start = self.data.data_ptr() + index * size
        self._unpack(start, codes.data_ptr(), self.outputs, self.inputs, FORMATS[self.format])
        if self.format in _FLOATS:
            return codes
        scales = self._column(self.scales, index)
        if self.format == "mxfp4":
            values = torch.tensor([*_E2M1, *(-x for x in _E2M1)])[codes.long()]
            wide = values.unflatten(1, (-1, _MX_BLOCK))
            return torch.ldexp(wide, scales.int() - 127).flatten(1).bfloat16()
        wide = codes.float().unflatten(1, (scales.shape[1], -1))
        if self.format == "int4":
            wide = wide - 8 - self._column(self.zeros, index)
        return (wide * scales).flatten(1).bfloat16()

    def _column(self, values: Tensor | None, index: int) -> Tensor:
        """One matrix of scales or zeros, [N, groups, 1]."""
        if values is None:
            raise ValueError(f"{self!r} has no scales or no zeros")
        return _rows(values.view(self.experts * self.parts, -1)[index], self.outputs)[..., None]


def moe_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """The ops of this module, bound to one level.

    `pack_quantized_experts` has no twin: a table that has it can keep quantized stacks.
    """
    return {
        "moe_route": _moe_route(library),
        "fused_experts": _fused_experts(library),
        "pack_experts": _pack_experts(library),
        "pack_quantized_experts": _pack_quantized(library),
    }


def _pack_experts(library: Library) -> Callable[..., PackedExperts]:
    pack = _packer(library)
    formats = {dtype: name for name, dtype in _FLOATS.items()}

    def pack_experts(weight: Tensor, parts: int = 1) -> PackedExperts:
        """A stack of bf16, fp32 or fp16 packed as it is."""
        need(weight.dtype in formats, f"weight must hold floats, not {weight.dtype}")
        need(weight.dim() == 3, f"weight must be [experts, N, K], not {list(weight.shape)}")
        return pack(weight.detach(), None, None, parts, weight.shape[2], 0, formats[weight.dtype])

    return pack_experts


def _pack_quantized(library: Library) -> Callable[..., PackedExperts]:
    pack = _packer(library)

    def pack_quantized_experts(
        codes: Tensor,
        format: str,  # noqa: A002
        parts: int,
        scales: Tensor,
        zeros: Tensor | None = None,
    ) -> PackedExperts:
        """Pack codes [experts, parts * N, K] for `fused_experts`.

        int8: int8 codes, scales [experts, parts * N] fp32. int4 and mxfp4: nibbles two to a byte,
        [.., K / 2] uint8, the even k in the low one. int4: scales and zeros [.., K / group], kept
        in bf16, a weight being scale * (code - zero) with codes and zeros in 0..15. mxfp4: scales
        [.., K / 32] uint8, exponents of 2 plus 127 (OCP Microscaling Formats, version 1.0).
        """
        need(format in ("int8", "int4", "mxfp4"), f"format must be quantized, not {format!r}")
        wanted = torch.int8 if format == "int8" else torch.uint8
        need(codes.dtype == wanted, f"codes must be {wanted} for {format}, not {codes.dtype}")
        need(codes.dim() == 3, f"codes must be [experts, N, K], not {list(codes.shape)}")
        inputs = codes.shape[2] * (1 if format == "int8" else 2)
        front = tuple(codes.shape[:2])
        if format == "int8":
            shape("scales", scales, *front)
            return pack(codes, scales.float()[..., None], None, parts, inputs, 0, format)
        need(scales.shape[:2] == front and scales.dim() == 3, "scales must be [experts, N, groups]")
        group, rest = divmod(inputs, scales.shape[2])
        need(rest == 0 and group % _PAD_K == 0, f"scales cannot have {scales.shape[2]} groups")
        if format == "mxfp4":
            need(group == _MX_BLOCK, f"scales must be for blocks of {_MX_BLOCK}, not {group}")
            need(scales.dtype == torch.uint8, f"scales must be uint8, not {scales.dtype}")
            need(not bool((scales > 252).any()), "scales must lie below 2^126")
            return pack(codes, scales, None, parts, inputs, group, format)
        zeros = torch.full_like(scales, 8) if zeros is None else zeros
        shape("zeros", zeros, *scales.shape)
        half = torch.bfloat16
        return pack(
            codes, scales.to(half), (zeros.float() - 8).to(half), parts, inputs, group, format
        )

    return pack_quantized_experts


def _packer(library: Library) -> Callable[..., PackedExperts]:
    size_of = library.call("expert_bytes", "nni", ctypes.c_int64)
    pack = library.call("pack_experts", "ppnnni")
    unpack = library.call("unpack_expert", "ppnni")

    def packed(
        codes: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        parts: int,
        inputs: int,
        group: int,
        format: str,  # noqa: A002
    ) -> PackedExperts:
        experts, rows = codes.shape[:2]
        need(rows % parts == 0, f"weight of {rows} outputs has no {parts} equal parts")
        outputs, count = rows // parts, experts * parts
        codes = codes.contiguous()
        data = huge_buffer(count * size_of(outputs, inputs, FORMATS[format]))
        pack(codes.data_ptr(), data.data_ptr(), count, outputs, inputs, FORMATS[format])
        laid = [None if x is None else _panels(x, count, outputs) for x in (scales, zeros)]
        sizes = (experts, parts, outputs, inputs)
        return PackedExperts(data, laid[0], laid[1], sizes, group, format, unpack)

    return packed


def _panels(values: Tensor, count: int, outputs: int) -> Tensor:
    """[experts, parts * N, groups] -> flat [matrix][panel][group][width], N padded to 16."""
    padded = -(-outputs // _PAD_N) * _PAD_N
    groups = values.shape[2]
    wide = torch.zeros(count, padded, groups, dtype=values.dtype)
    wide[:, :outputs] = values.reshape(count, outputs, groups)
    whole = padded // _PANEL * _PANEL
    head = wide[:, :whole].unflatten(1, (-1, _PANEL)).transpose(2, 3).flatten(1)
    return torch.cat([head, wide[:, whole:].transpose(1, 2).flatten(1)], 1).flatten()


def _rows(values: Tensor, outputs: int) -> Tensor:
    """The inverse of `_panels` for one matrix: [N, groups]."""
    padded = -(-outputs // _PAD_N) * _PAD_N
    groups = values.numel() // padded
    whole = padded // _PANEL * _PANEL
    head = values[: whole * groups].view(-1, groups, _PANEL).transpose(1, 2).reshape(whole, groups)
    tail = values[whole * groups :].view(groups, -1).T
    return torch.cat([head, tail])[:outputs]


def _fused_experts(library: Library) -> Callable[..., Tensor]:
    call = library.call("fused_experts", "pnnippnnnnpppnipppnippiiffpn", ctypes.c_int)

    def fused_experts(
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Any,
        down: Any,
        *,
        act: str = "silu",
        alpha: float = 1.0,
        limit: float = 0.0,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As the twin says; stacks that are not both packed go to the twin."""
        if not (isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts)):
            found = twins.fused_experts(
                x, weights, ids, gate_up, down, act=act, alpha=alpha, limit=limit,
                gate_up_bias=gate_up_bias, down_bias=down_bias,
            )  # fmt: skip
            return found if out is None else out.copy_(found)
        code, stride = dtype_code("x", x), dense_rows("x", x)
        tokens, hidden = x.shape
        inner, experts = down.inputs, down.experts
        need(act in _GATES, f"act must be one of {', '.join(_GATES)}, not {act!r}")
        sizes = (gate_up.experts, gate_up.parts, gate_up.outputs, gate_up.inputs)
        need(sizes == (experts, 2, inner, hidden), f"gate_up is {gate_up!r}, down is {down!r}")
        wide = [stack.format in ("fp32", "fp16") for stack in (gate_up, down)]
        need(wide[0] == wide[1], f"stacks must be alike, not {gate_up!r} and {down!r}")
        need(down.parts * down.outputs == hidden, f"down must give [{hidden}], not {down!r}")
        top_k = ids.shape[-1]
        shape("ids", ids, tokens, top_k)
        shape("weights", weights, tokens, top_k)
        contiguous("ids", ids, torch.int64)
        contiguous("weights", weights, torch.float32)
        bias_code = code
        for name, bias, size in (("gate_up", gate_up_bias, 2 * inner), ("down", down_bias, hidden)):
            if bias is not None:
                shape(f"{name}_bias", bias, experts, size)
                contiguous(f"{name}_bias", bias)
                bias_code = dtype_code(f"{name}_bias", bias)
        if out is None:
            out = x.new_empty(tokens, hidden)
        shape("out", out, tokens, hidden)
        need(out.dtype == x.dtype, f"out must be {x.dtype}, not {out.dtype}")
        failed = call(
            x.data_ptr(), stride, tokens, code, weights.data_ptr(), ids.data_ptr(), top_k,
            experts, hidden, inner, *gate_up.arguments, *down.arguments,
            None if gate_up_bias is None else gate_up_bias.data_ptr(),
            None if down_bias is None else down_bias.data_ptr(), bias_code,
            _GATES[act], alpha, limit, out.data_ptr(), dense_rows("out", out),
        )  # fmt: skip
        need(not failed, f"ids must lie in [0, {experts})")
        return out

    return fused_experts


def _moe_route(library: Library) -> Callable[..., tuple[Tensor, Tensor]]:
    call = library.call("moe_route", "pnninniipnnifpp")

    def moe_route(
        logits: Tensor,
        top_k: int,
        *,
        scoring: str = "softmax",
        renormalise: bool = True,
        bias: Tensor | None = None,
        groups: int = 1,
        top_groups: int = 1,
        group_score: str = "max",
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        stride = dense_rows("logits", logits)
        rows, experts = logits.shape
        need(scoring in _SCORINGS, f"scoring must be one of {_SCORINGS}, not {scoring!r}")
        need(group_score in _GROUP_SCORES, f"group_score must be one of {_GROUP_SCORES}")
        need(experts % groups == 0, f"groups {groups} must divide {experts} experts")
        need(0 < top_groups <= groups, f"top_groups must lie in 1..{groups}, not {top_groups}")
        most = experts // groups * top_groups
        need(0 < top_k <= most, f"top_k must lie in 1..{most}, not {top_k}")
        if bias is not None:
            shape("bias", bias, experts)
            bias = bias.float().contiguous()
        weights = torch.empty(rows, top_k)
        ids = torch.empty(rows, top_k, dtype=torch.int64)
        call(
            logits.data_ptr(), stride, rows, dtype_code("logits", logits), experts, top_k,
            int(scoring == "sigmoid"), int(renormalise), None if bias is None else bias.data_ptr(),
            groups, top_groups, int(group_score == "top2"), scale, weights.data_ptr(),
            ids.data_ptr(),
        )  # fmt: skip
        return weights, ids

    return moe_route
