"""Mixture of experts: routing, and all experts of a layer in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from modulm.ops import twins
from modulm_kernels_cpu.check import contiguous, dense_rows, dtype_code, need, shape
from modulm_kernels_cpu.library import Library, load
from modulm_kernels_cpu.linear import (
    _PAD_K,
    FORMATS,
    PackedLinear,
    check_blocks,
    check_codes,
    lay,
    linear_ops,
)
from modulm_kernels_cpu.memory import huge_buffer

__all__ = ["PackedExperts", "moe_ops"]

_GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}
_GROUP_SCORES = ("max", "top2")
_SCORINGS = ("softmax", "sigmoid")

#: Codes, scales and zero points of one expert.
Coded = tuple[Tensor, Tensor, Tensor | None]


class PackedExperts:
    """A stack of weights [experts, parts * N, K] in the kernels' internal layout.

    Owns its memory. `stack[e]` is the weight of expert e, in bf16 if it was quantized.
    """

    __slots__ = ("_unpack", "arguments", "experts", "parts", "whole")

    def __init__(
        self,
        whole: PackedLinear,
        experts: int,
        parts: int,
        unpack: Callable[..., Tensor] | None = None,
    ) -> None:
        """whole: the first matrix, with the memory of all. unpack: `unpack_linear`; by default
        that of the default level.
        """
        self.parts, self._unpack = parts, unpack or linear_ops(load())["unpack_linear"]
        self._hold(whole, experts)

    def fields(self) -> dict[str, Any]:
        """Return the arguments that make an equal stack."""
        return {"whole": self.whole, "experts": self.experts, "parts": self.parts}

    def _hold(self, whole: PackedLinear, experts: int) -> None:
        self.whole, self.experts = whole, experts
        data, scales, zeros, _, _, group, form = whole.arguments
        self.arguments = (data, scales, zeros, group, form)

    @property
    def format(self) -> str:
        """Format of each matrix, one of `modulm_kernels_cpu.linear.FORMATS`."""
        return self.whole.format

    @property
    def activations(self) -> str:
        """Format of activations in products with integers."""
        return self.whole.activations

    @property
    def outputs(self) -> int:
        """Outputs of one part."""
        return self.whole.outputs

    @property
    def inputs(self) -> int:
        """Inputs of each matrix."""
        return self.whole.inputs

    @property
    def bytes(self) -> int:
        """Memory of all experts."""
        return self.whole.bytes

    def __getitem__(self, expert: int) -> Tensor:
        """Return the weight [parts * N, K], dequantized."""
        first = expert * self.parts
        return torch.cat([self._unpack(self._matrix(first + i)) for i in range(self.parts)])

    def __len__(self) -> int:
        return self.experts

    def __repr__(self) -> str:
        size = f"{self.experts} x {self.parts * self.outputs} x {self.inputs}"
        return f"PackedExperts({size}, {self.format})"

    def grow(self, experts: int) -> None:
        """Make space for more experts, in place; the new ones are empty."""

        def grown(tensor: Tensor) -> Tensor:
            flat = tensor.flatten()
            wide = huge_buffer(flat.nbytes // self.experts * experts).view(tensor.dtype)
            wide[: len(flat)] = flat
            return wide

        data, *more = (self.whole.data, self.whole.scales, self.whole.zeros)
        scales, zeros = (None if tensor is None else grown(tensor) for tensor in more)
        self._hold(self._like(grown(data), scales, zeros), experts)

    def memory(self, expert: int) -> tuple[Tensor, ...]:
        """Return the tensors of one expert, for reading: codes, scales and zero points."""
        tensors = (self.whole.data, self.whole.scales, self.whole.zeros)
        return tuple(x.view(self.experts, -1)[expert] for x in tensors if x is not None)

    def put(self, expert: int, memory: Sequence[Tensor]) -> None:
        """Replace an expert by the tensors of another one."""
        for to, tensor in zip(self.memory(expert), memory, strict=True):
            to.copy_(tensor)
        # Whether all zero points are valid codes may have changed.
        whole = self.whole
        self._hold(self._like(whole.data, whole.scales, whole.zeros), self.experts)

    def overwrite(
        self, write: Callable[..., None], expert: int, first: int, weight: Tensor, sparse: bool
    ) -> None:
        """Overwrite an expert's rows from `first` on; weight: [n, K]. write: `overwrite_linear`."""
        need(0 <= expert < self.experts, f"expert {expert} is not one of {self.experts}")
        at, stop = first, first + len(weight)
        while at < stop:
            part, row = divmod(at, self.outputs)
            until = min(stop, (part + 1) * self.outputs)
            matrix = self._matrix(expert * self.parts + part)
            write(matrix, row, weight[at - first : until - first], sparse)
            at = until

    def _like(self, data: Tensor, scales: Tensor | None, zeros: Tensor | None) -> PackedLinear:
        """Return a PackedLinear over this memory, with the format of the current one."""
        old = self.whole
        return PackedLinear(
            data, scales, zeros, old.outputs, old.inputs, old.group, old.format, old.activations
        )

    def _matrix(self, index: int) -> PackedLinear:
        all_of, count = self.whole, self.experts * self.parts

        def piece(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.view(count, -1)[index]

        return PackedLinear(
            all_of.data.view(count, -1)[index],
            piece(all_of.scales),
            piece(all_of.zeros),
            all_of.outputs,
            all_of.inputs,
            all_of.group,
            all_of.format,
            all_of.activations,
        )


def moe_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return the ops of this module for one level.

    `pack_quantized_experts` and `pack_block_experts` have no twins: an op table that has them can
    store quantized stacks.
    """
    return {
        "moe_route": _moe_route(library),
        "fused_experts": _fused_experts(library),
        "pack_experts": _pack_experts(library),
        "overwrite_experts": _overwrite_experts(library),
        "pack_quantized_experts": _pack_quantized(library),
        "pack_block_experts": _pack_blocks(library),
    }


class _Packer:
    """Packs matrices one after the other."""

    def __init__(self, library: Library) -> None:
        self._size_of = library.call("packed_bytes", "nni", ctypes.c_int64)
        self._pack = library.call("pack", "pnpnni")
        self.unpack: Callable[..., Tensor] = linear_ops(library)["unpack_linear"]

    def room(self, count: int, outputs: int, inputs: int, form: str) -> Tensor:
        """Return memory [count, bytes of a matrix]."""
        size = self._size_of(outputs, inputs, FORMATS[form])
        return huge_buffer(count * size).view(count, size)

    def put(self, weight: Tensor, parts: Tensor, form: str, inputs: int = 0) -> None:
        """Pack weight [parts * N, K], or rows of blocks with `inputs` columns."""
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        outputs, inputs = len(weight) // len(parts), inputs or weight.shape[1]
        for i, target in enumerate(parts):
            source = weight[i * outputs :]
            self._pack(
                source.data_ptr(), weight.stride(0), target.data_ptr(), outputs, inputs,
                FORMATS[form],
            )  # fmt: skip


def _pack_experts(library: Library) -> Callable[..., PackedExperts]:
    packer = _Packer(library)
    formats = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}

    def pack_experts(weight: Tensor, parts: int = 1) -> PackedExperts:
        """Pack a stack of bf16, fp32 or fp16 without converting it."""
        need(weight.dtype in formats, f"weight must hold floats, not {weight.dtype}")
        need(weight.dim() == 3, f"weight must be [experts, N, K], not {list(weight.shape)}")
        experts, rows, inputs = weight.shape
        need(rows % parts == 0, f"weight of {rows} outputs has no {parts} equal parts")
        form, outputs = formats[weight.dtype], rows // parts
        room = packer.room(experts * parts, outputs, inputs, form)
        for expert, matrix in enumerate(weight.detach()):
            packer.put(matrix, room[expert * parts : (expert + 1) * parts], form)
        padded = -(-inputs // _PAD_K) * _PAD_K
        whole = PackedLinear(room.flatten(), None, None, outputs, inputs, padded, form)
        return PackedExperts(whole, experts, parts, packer.unpack)

    return pack_experts


def _overwrite_experts(library: Library) -> Callable[..., None]:
    overwrite = linear_ops(library)["overwrite_linear"]

    def overwrite_experts(
        packed: PackedExperts, expert: int, first: int, weight: Tensor, sparse: bool = False
    ) -> None:
        """Overwrite rows of packed floats in place, as `overwrite_linear` does.

        expert, first: the first expert and the first of its rows. weight: [experts, n, K].
        """
        for at, matrix in enumerate(weight, expert):
            packed.overwrite(overwrite, at, first, matrix, sparse)

    return overwrite_experts


def _pack_quantized(library: Library) -> Callable[..., PackedExperts]:
    packer = _Packer(library)

    def pack_quantized_experts(
        stack: Iterable[Coded],
        experts: int,
        format: str,  # noqa: A002
        group: int = 0,
        parts: int = 1,
        activations: str = "bf16",
    ) -> PackedExperts:
        """Pack codes for `fused_experts`, one expert after the other.

        stack: for each of `experts` experts, codes [parts * N, K], scales and zero points [parts *
        N, groups] or None, as `pack_linear` takes them, all in the same format. If it is a
        generator, only one expert's codes are in memory at a time.
        """
        room, laid, first = None, [], None
        for expert, (codes, scales, zeros) in enumerate(stack):
            check_codes(codes, format, group, activations)
            need(
                len(codes) % parts == 0,
                f"{len(codes)} outputs cannot be split into {parts} equal parts",
            )
            if room is None:
                outputs, inputs = len(codes) // parts, codes.shape[1]
                first, room = (scales, zeros), packer.room(experts * parts, outputs, inputs, format)
            like = scales.dtype == first[0].dtype and (zeros is None) == (first[1] is None)
            need(
                like and scales.shape == first[0].shape,
                "scales must have the same shape in all experts",
            )
            packer.put(codes, room[expert * parts : (expert + 1) * parts], format)
            pieces = [
                (scales[i : i + outputs], None if zeros is None else zeros[i : i + outputs])
                for i in range(0, len(scales), outputs)
            ]
            laid.extend(pieces)
        need(room is not None and len(laid) == experts * parts, f"expected {experts} experts")
        groups = inputs // group if group else 1
        scales, zeros = lay(laid, outputs, groups, format)
        padded = group or -(-inputs // _PAD_K) * _PAD_K
        whole = PackedLinear(
            room.flatten(), scales, zeros, outputs, inputs, padded, format, activations
        )
        return PackedExperts(whole, experts, parts, packer.unpack)

    return pack_quantized_experts


def _pack_blocks(library: Library) -> Callable[..., PackedExperts]:
    packer = _Packer(library)

    def pack_block_experts(
        stored: Tensor,
        format: str,  # noqa: A002
        parts: int = 1,
        activations: str = "bf16",
    ) -> PackedExperts:
        """Pack ggml's blocks for `fused_experts`, as `pack_blocks` takes them.

        stored: [experts, parts * N, bytes of a row] uint8.
        """
        inputs, group = check_blocks(stored.flatten(0, 1), format, activations)
        experts, rows, _ = stored.shape
        need(rows % parts == 0, f"{rows} outputs cannot be split into {parts} equal parts")
        room = packer.room(experts * parts, rows // parts, inputs, format)
        for expert, one in enumerate(stored):
            packer.put(one, room[expert * parts : (expert + 1) * parts], format, inputs)
        outputs = rows // parts
        data = room.flatten()
        whole = PackedLinear(data, None, None, outputs, inputs, group, format, activations)
        return PackedExperts(whole, experts, parts, packer.unpack)

    return pack_block_experts


def _fused_experts(library: Library) -> Callable[..., Tensor]:
    call = library.call("experts", "pnnippnnnnpppnipppnippiiffpn", ctypes.c_int)

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
        """See the twin; called if the stacks are not both packed."""
        if not (isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts)):
            result = twins.fused_experts(
                x, weights, ids, gate_up, down, act=act, alpha=alpha, limit=limit,
                gate_up_bias=gate_up_bias, down_bias=down_bias,
            )  # fmt: skip
            return result if out is None else out.copy_(result)
        code, stride = dtype_code("x", x), dense_rows("x", x)
        tokens, hidden = x.shape
        inner, experts = down.inputs, down.experts
        need(act in _GATES, f"act must be one of {', '.join(_GATES)}, not {act!r}")
        sizes = (gate_up.experts, gate_up.parts, gate_up.outputs, gate_up.inputs)
        need(sizes == (experts, 2, inner, hidden), f"gate_up is {gate_up!r}, down is {down!r}")
        wide = [stack.format in ("fp32", "fp16") for stack in (gate_up, down)]
        need(wide[0] == wide[1], f"stacks must have the same format, not {gate_up!r} and {down!r}")
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
