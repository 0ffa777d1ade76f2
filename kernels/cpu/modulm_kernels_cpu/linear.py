"""Linear layers on packed weights: floats, fp8, int8, 4-bit codes, ggml's blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from modulm_kernels_cpu.check import CODES, dense_rows, dtype_code, need, shape
from modulm_kernels_cpu.library import Library
from modulm_kernels_cpu.measured import file, measure_once
from modulm_kernels_cpu.memory import huge_buffer, in_huge_pages

__all__ = [
    "ACTIVATIONS", "BLOCKS", "FORMATS", "GROUPS", "INTEGERS", "TABLES", "PackedLinear",
    "check_blocks", "check_codes", "lay", "linear_ops",
]  # fmt: skip

#: Formats of packed weights and their codes in the C ABI (src/linear/weight.h). Those in TABLES are
#: int4 codes that index a table.
FORMATS = {
    "bf16": 0, "int8": 1, "fp8": 2, "int4": 3, "fp32": 4, "fp16": 5,
    "e2m1": 3 | 1 << 25, "iq4": 3 | 2 << 25, "q4_k": 6, "q5_k": 7, "q6_k": 8,
}  # fmt: skip
#: Formats that are multiplied in their stored form: columns and bytes of a block, and columns per
#: scale.
BLOCKS = {"q4_k": (256, 144, 32), "q5_k": (256, 176, 32), "q6_k": (256, 210, 16)}
#: Values of 4-bit codes: doubled e2m1 floats (OCP Microscaling Formats, version 1.0), and ggml's
#: IQ4 values.
TABLES = {
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
#: Formats of activations in products with integer weights, and their number of int8 digits. "bf16"
#: means 16-bit integers with a scale per row and group, as exact as bf16, see ADR 0022.
ACTIVATIONS = {"int8": 1, "bf16": 2}
#: Group sizes along K; 0 stands for all of K.
GROUPS = (0, 16, 32, 64, 128, 256)

_PANEL, _PAD_K, _PAD_N = 64, 64, 16
#: Inputs and outputs, rows, and repetitions of the products that are timed.
_TIMED, _TIMED_ROWS, _TIMES = 512, 128, 9
#: Below this share of the time in 16 bits, products with quantized inputs are faster.
_FASTER = 0.9
#: Rows of another dtype that `overwrite_linear` converts and packs at a time, whole panels.
_OVERWRITTEN = 2048
_FLOATS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}
_CODE_DTYPES = {
    **{name: dtype for dtype, name in _FLOATS.items()},
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
    **dict.fromkeys(TABLES, torch.uint8),
}
#: Formats that are multiplied as integers.
INTEGERS = ("int8", "int4", *TABLES, *BLOCKS)
#: Codes of scale dtypes; uint8 scales are exponents of two plus 127.
_SCALES = {**CODES, torch.uint8: 4}
_LARGEST_EXPONENT = 251


class PackedLinear:
    """A weight [N, K] in the kernels' internal layout. Owns its memory."""

    __slots__ = (
        "activations", "arguments", "bias", "data", "format", "group", "inputs", "outputs",
        "scales", "zeros",
    )  # fmt: skip

    def __init__(
        self,
        data: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        outputs: int,
        inputs: int,
        group: int,
        format: str,  # noqa: A002  the word that the flags use
        activations: str = "bf16",
    ) -> None:
        self.data, self.scales, self.zeros = data, scales, zeros
        self.outputs, self.inputs, self.group, self.format = outputs, inputs, group, format
        self.activations = activations
        self.bias: tuple[Tensor, Tensor] | None = None
        digits = ACTIVATIONS[activations] if format in INTEGERS else 0
        scale_code = 0 if scales is None else _SCALES[scales.dtype]
        odd_zeros = zeros is not None and not _whole(zeros)
        self.arguments = (
            data.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            outputs,
            inputs,
            group,
            FORMATS[format] | digits << 8 | scale_code << 16 | odd_zeros << 24,
        )

    def fields(self) -> dict[str, Any]:
        """Return the arguments that make an equal weight."""
        names = ("data", "scales", "zeros", "outputs", "inputs", "group", "format", "activations")
        return {name: getattr(self, name) for name in names}

    def wide(self, bias: Tensor) -> Tensor:
        """Return the layer's bias in fp32, converted once."""
        if self.bias is None or self.bias[0] is not bias:
            self.bias = (bias, bias.float().contiguous())
        return self.bias[1]

    @property
    def bytes(self) -> int:
        """Memory that a product with this weight reads."""
        return sum(x.nbytes for x in (self.data, self.scales, self.zeros) if x is not None)

    def __repr__(self) -> str:
        group = f", group {self.group}" if self.scales is not None else ""
        return f"PackedLinear({self.outputs} x {self.inputs}, {self.format}{group})"


def linear_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return `pack_linear`, `unpack_linear` and `linear` for one level.

    `pack_quantized` is `pack_linear` under a name without a twin: an op table that has it can store
    quantized weights; one with `pack_blocks` can store those of BLOCKS in their stored form, and
    one with `overwrite_linear` and `overwrite_bias` can change packed floats in place, also those
    of `blank_linear`, which have no values yet.
    `packed_form` returns a text that differs where packed weights may differ; `low_precision` says
    which formats of inputs are fast, and `low_precision_note` what was measured.
    """
    return {
        "pack_linear": (pack := _pack_linear(library)),
        "pack_quantized": pack,
        "pack_blocks": _pack_blocks(library),
        "unpack_linear": _unpack_linear(library),
        "blank_linear": _blank_linear(library),
        "overwrite_linear": _overwrite_linear(library),
        "overwrite_bias": overwrite_bias,
        "packed_form": library.identity,
        "round_groups": _round_groups(library),
        "linear": (product := _linear(library)),
        **_low_precision(library.level, pack, product),
    }


def _low_precision(
    level: str, pack: Callable[..., PackedLinear], product: Callable[..., Tensor]
) -> dict[str, Callable[..., Any]]:
    def measure() -> float:
        codes, scales = torch.ones(_TIMED, _TIMED, dtype=torch.int8), torch.ones(_TIMED, 1)
        x = torch.ones(_TIMED_ROWS, _TIMED, dtype=torch.bfloat16)
        weights = {kind: pack(codes, "int8", 0, scales, None, kind) for kind in ACTIVATIONS}
        # Interleaved, so that other work on the machine slows both.
        times: dict[str, list[float]] = {kind: [] for kind in weights}
        for _ in range(_TIMES):
            for kind, weight in weights.items():
                start = perf_counter()
                product(x, weight)
                times[kind].append(perf_counter() - start)
        return min(times["int8"]) / min(times["bf16"])

    def low_precision(name: str) -> bool | None:
        """Return whether products with inputs quantized to the format `name` are faster here.

        Only int8 is multiplied as it is; None for others. Measured once per machine, level and
        number of threads, with the rows of a prompt, against inputs in 16 bits; see `measured`.
        """
        if name != "int8":
            return None
        return ratio() < _FASTER

    def low_precision_note(name: str) -> str:
        """Return what `low_precision` measured for a format that it knows, for `modulm explain`."""
        return f"{ratio():.2f} of the time of 16 bits, as measured on this machine ({file()})"

    def ratio() -> float:
        return measure_once(f"{level} int8", measure)

    return {"low_precision": low_precision, "low_precision_note": low_precision_note}


def _pack_linear(library: Library) -> Callable[..., PackedLinear]:
    size_of = library.call("packed_bytes", "nni", ctypes.c_int64)
    pack = library.call("pack", "pnpnni")

    def pack_linear(
        weight: Tensor,
        format: str | None = None,  # noqa: A002
        group: int = 0,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        activations: str = "bf16",
    ) -> PackedLinear:
        """Pack a weight for `linear`.

        weight: [N, K] in the form of `format`: a float dtype (by default the weight's own), int8,
        float8_e4m3fn, or for int4 and TABLES uint8 in 0..15, one code per byte. scales, zeros: [N,
        K / group]; a weight is scale * (code - zero). They are stored in the dtype of `scales`, or
        fp32 with one scale for all of K and no zeros; uint8 scales are exponents of two plus 127.
        zeros default to 0, for int4 to 8. `group` 0 means all of K. `activations`: format of
        activations in products with integers, one of ACTIVATIONS.
        """
        format = format or _FLOATS.get(weight.dtype, "bf16")  # noqa: A001
        check_codes(weight, format, group, activations)
        need(format in _FLOATS.values() or scales is not None, f"scales must be given for {format}")
        need(zeros is None or format in ("int8", "int4"), f"zeros must be None for {format}")
        outputs, inputs = weight.shape
        codes = weight.detach()
        if codes.stride(1) != 1:
            codes = codes.contiguous()
        data = huge_buffer(size_of(outputs, inputs, FORMATS[format]))
        pack(codes.data_ptr(), codes.stride(0), data.data_ptr(), outputs, inputs, FORMATS[format])
        padded = group or -(-inputs // _PAD_K) * _PAD_K
        if scales is None:
            return PackedLinear(data, None, None, outputs, inputs, padded, format)
        groups = inputs // group if group else 1
        laid, points = lay([(scales, zeros)], outputs, groups, format)
        return PackedLinear(data, laid, points, outputs, inputs, padded, format, activations)

    return pack_linear


def _blank_linear(library: Library) -> Callable[..., PackedLinear]:
    size_of = library.call("packed_bytes", "nni", ctypes.c_int64)

    def blank_linear(outputs: int, inputs: int, dtype: torch.dtype) -> PackedLinear:
        """Allocate a packed weight [outputs, inputs] of floats for `overwrite_linear` to fill."""
        need(dtype in _FLOATS, f"dtype must be one of {', '.join(map(str, _FLOATS))}")
        form = _FLOATS[dtype]
        data = huge_buffer(size_of(outputs, inputs, FORMATS[form]))
        padded = -(-inputs // _PAD_K) * _PAD_K
        return PackedLinear(data, None, None, outputs, inputs, padded, form)

    return blank_linear


def _pack_blocks(library: Library) -> Callable[..., PackedLinear]:
    size_of = library.call("packed_bytes", "nni", ctypes.c_int64)
    pack = library.call("pack", "pnpnni")

    def pack_blocks(stored: Tensor, format: str, activations: str = "bf16") -> PackedLinear:  # noqa: A002
        """Pack rows of ggml's blocks for `linear` without requantizing.

        stored: [N, bytes of a row] uint8, blocks of `format`, one of BLOCKS. activations: their
        format, one of ACTIVATIONS.
        """
        inputs, group = check_blocks(stored, format, activations)
        outputs = len(stored)
        data = huge_buffer(size_of(outputs, inputs, FORMATS[format]))
        rows = stored if stored.stride(1) == 1 else stored.contiguous()
        pack(rows.data_ptr(), rows.stride(0), data.data_ptr(), outputs, inputs, FORMATS[format])
        return PackedLinear(data, None, None, outputs, inputs, group, format, activations)

    return pack_blocks


def check_blocks(stored: Tensor, format: str, activations: str) -> tuple[int, int]:  # noqa: A002
    """Return the columns of rows of blocks, and the columns per scale.

    Raises ValueError for unsupported blocks.
    """
    need(format in BLOCKS, f"format must be one of {', '.join(BLOCKS)}, not {format!r}")
    need(
        activations in ACTIVATIONS,
        f"activations must be one of {', '.join(ACTIVATIONS)}, not {activations!r}",
    )
    columns, size, group = BLOCKS[format]
    need(
        stored.dim() == 2 and stored.dtype == torch.uint8 and stored.shape[1] % size == 0,
        f"stored must be [N, a multiple of {size}] uint8, not {list(stored.shape)} {stored.dtype}",
    )
    return stored.shape[1] // size * columns, group


def check_codes(weight: Tensor, format: str, group: int, activations: str) -> None:  # noqa: A002
    """Raise ValueError for unsupported codes [N, K]."""
    known = ", ".join(_CODE_DTYPES)
    need(format in _CODE_DTYPES, f"format must be one of {known}, not {format!r}")
    need(weight.dim() == 2, f"weight must be [N, K], not {list(weight.shape)}")
    need(group in GROUPS, f"group must be one of {GROUPS}, not {group}")
    need(
        activations in ACTIVATIONS,
        f"activations must be one of {', '.join(ACTIVATIONS)}, not {activations!r}",
    )
    inputs = weight.shape[1]
    need(group == 0 or inputs % group == 0, f"group {group} must divide weight's K {inputs}")
    need(group != 16 or format in INTEGERS, f"groups of 16 are not for {format}")
    need(
        weight.dtype == _CODE_DTYPES[format],
        f"weight must be {_CODE_DTYPES[format]} for {format}, not {weight.dtype}",
    )


def lay(
    matrices: Sequence[tuple[Tensor, Tensor | None]],
    outputs: int,
    groups: int,
    format: str,  # noqa: A002
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points [N, groups] of consecutive matrices in the kernels' layout."""
    points = [zeros for _, zeros in matrices if zeros is not None]
    if format == "int4":
        points = [zeros.float() - 8 for zeros in points]
    if not any(bool(zeros.any()) for zeros in points):
        points = []
    dtype = matrices[0][0].dtype
    need(dtype in _SCALES, f"scales must be float32, bfloat16, float16 or uint8, not {dtype}")
    if dtype == torch.uint8:
        most = max(int(scales.max()) for scales, _ in matrices)
        need(most <= _LARGEST_EXPONENT, f"scales must lie below 2^125, not at 2^{most - 127}")
    if groups == 1 and not points:
        wide = [s if s.dtype != torch.uint8 else torch.exp2(s.float() - 127) for s, _ in matrices]
        return in_huge_pages(torch.cat([_panels("scales", s, outputs, 1) for s in wide])), None
    need(dtype != torch.uint8 or not points, "zeros must be None if scales are exponents")
    laid = torch.cat(
        [_panels("scales", scales, outputs, groups).to(dtype) for scales, _ in matrices]
    )
    laid = in_huge_pages(laid)
    if not points:
        return laid, None
    zeros = torch.cat([_panels("zeros", zeros, outputs, groups).to(dtype) for zeros in points])
    return laid, in_huge_pages(zeros)


def _round_groups(library: Library) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    call = library.call("round_groups", "pninnnppp")

    def round_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize floats [N, K]: codes 0..15 [N, K] uint8, scales and zeros [N, K / group] fp32.

        Bit-identical to `modulm_quantized.round_weight`.
        """
        code, stride = dtype_code("weight", weight), dense_rows("weight", weight)
        outputs, inputs = weight.shape
        need(group in GROUPS[2:], f"group must be one of {GROUPS[2:]}, not {group}")
        need(inputs % group == 0, f"group {group} must divide weight's K {inputs}")
        codes = torch.empty(outputs, inputs, dtype=torch.uint8)
        scales, zeros = torch.empty(2, outputs, inputs // group)
        call(
            weight.data_ptr(), stride, code, outputs, inputs, group, codes.data_ptr(),
            scales.data_ptr(), zeros.data_ptr(),
        )  # fmt: skip
        return codes, scales, zeros

    return round_groups


def _whole(zeros: Tensor) -> bool:
    """Whether the zeros of int4, minus 8, are all valid codes."""
    wide = zeros.float()
    return bool(((wide == wide.round()) & (wide >= -8) & (wide <= 7)).all())


def _panels(name: str, values: Tensor, outputs: int, groups: int) -> Tensor:
    """Convert [N, groups] to flat fp32 [panel][group][width], with N padded to 16."""
    if values.dim() == 1:
        values = values[:, None]
    shape(name, values, outputs, groups)
    padded = -(-outputs // _PAD_N) * _PAD_N
    wide = torch.zeros(padded, groups)
    wide[:outputs] = values
    whole = padded // _PANEL * _PANEL
    head = wide[:whole].unflatten(0, (-1, _PANEL)).transpose(1, 2).flatten()
    return torch.cat([head, wide[whole:].T.flatten()])


def _unpack_linear(library: Library) -> Callable[[PackedLinear | Tensor], Tensor]:
    unpack = library.call("unpack", "ppnni")

    def unpack_linear(packed: PackedLinear | Tensor) -> Tensor:
        """Return the weight [N, K] in its float dtype, or dequantized to bf16."""
        if not isinstance(packed, PackedLinear):
            return packed
        code_dtype = torch.float32 if packed.format in BLOCKS else _CODE_DTYPES[packed.format]
        codes = torch.empty(packed.outputs, packed.inputs, dtype=code_dtype)
        unpack(
            packed.data.data_ptr(), codes.data_ptr(), packed.outputs, packed.inputs,
            FORMATS[packed.format],
        )  # fmt: skip
        if packed.format in BLOCKS:
            return codes.bfloat16()
        if packed.scales is None:
            return codes
        if packed.format in TABLES:
            wide = torch.tensor(TABLES[packed.format], dtype=torch.float32)[codes.int()]
        else:
            wide = codes.float() - (8 if packed.format == "int4" else 0)
        size = min(packed.group, packed.inputs)
        wide = wide.unflatten(1, (-1, size))
        if packed.zeros is not None:
            wide -= _rows(packed.zeros, packed)
        scales = _rows(packed.scales, packed)
        wide *= scales if scales.dtype != torch.uint8 else torch.exp2(scales.float() - 127)
        return wide.flatten(1).bfloat16()

    return unpack_linear


def _overwrite_linear(library: Library) -> Callable[..., None]:
    size_of = library.call("packed_bytes", "nni", ctypes.c_int64)
    pack, unpack = library.call("pack", "pnpnni"), library.call("unpack", "ppnni")

    def overwrite_linear(
        packed: PackedLinear, first: int, weight: Tensor, sparse: bool = False
    ) -> None:
        """Overwrite rows of a packed weight of floats in place, from row `first` on.

        weight: [n, K], in any float dtype. sparse: values that are NaN change nothing.
        """
        outputs, inputs, form = packed.outputs, packed.inputs, FORMATS[packed.format]
        need(packed.scales is None and packed.format in _FLOATS.values(), "packed must be floats")
        shape("weight", weight, len(weight), inputs)
        stop = first + len(weight)
        need(first >= 0 and stop <= outputs, f"rows {first} to {stop} are not within {outputs}")
        dtype, row_bytes = _CODE_DTYPES[packed.format], size_of(_PANEL, inputs, form) // _PANEL
        base = packed.data.data_ptr()
        most = outputs if weight.dtype == dtype else _OVERWRITTEN

        def put(start: int, rows: Tensor) -> None:
            """Pack rows that begin a panel and end one."""
            target = base + start * row_bytes
            pack(rows.data_ptr(), rows.stride(0), target, len(rows), inputs, form)

        at = first
        while at < stop:
            panel = at // _PANEL * _PANEL
            whole = min(stop if stop == outputs else stop // _PANEL * _PANEL, at + most)
            if at == panel and whole > at and not sparse:
                rows = weight[at - first : whole - first].detach().to(dtype)
                put(at, rows if rows.stride(1) == 1 else rows.contiguous())
                at = whole
                continue
            end = min(panel + _PANEL, outputs)  # this panel has other rows as well
            until = min(stop, end)
            new = weight[at - first : until - first].detach().to(dtype)
            at_panel, at = at - panel, until
            unchanged = new.isnan() if sparse else None
            if unchanged is not None and unchanged.all():
                continue
            rows = torch.empty(end - panel, inputs, dtype=dtype)
            unpack(base + panel * row_bytes, rows.data_ptr(), len(rows), inputs, form)
            old = rows[at_panel : until - panel]
            old.copy_(new if unchanged is None else old.where(unchanged, new))
            put(panel, rows)

    return overwrite_linear


def overwrite_bias(packed: PackedLinear | Tensor, bias: Tensor) -> None:
    """Update what a packed weight has computed from a bias that was changed in place."""
    if isinstance(packed, PackedLinear) and packed.bias is not None and packed.bias[0] is bias:
        packed.bias[1].copy_(bias)


def _rows(values: Tensor, packed: PackedLinear) -> Tensor:
    """Invert `_panels`: [N, groups, 1]."""
    padded = -(-packed.outputs // _PAD_N) * _PAD_N
    groups = values.numel() // padded
    whole = padded // _PANEL * _PANEL
    head = values[: whole * groups].view(-1, groups, _PANEL).transpose(1, 2).reshape(whole, groups)
    tail = values[whole * groups :].view(groups, -1).T
    return torch.cat([head, tail])[: packed.outputs, :, None]


def _linear(library: Library) -> Callable[..., Tensor]:
    call = library.call("linear", "pnnipppnnnippni")

    def linear(
        x: Tensor,
        weight: PackedLinear | Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute x W^T + b; x: [..., K] -> [..., N] in x's dtype, or in that of `out`.

        A weight that is not packed is multiplied by torch, so the op serves every layer.
        """
        if not isinstance(weight, PackedLinear):
            result = torch.nn.functional.linear(x, weight, bias)
            return result if out is None else out.copy_(result)
        code = dtype_code("x", x)
        need(x.shape[-1] == weight.inputs, f"x must be [T, {weight.inputs}], not {list(x.shape)}")
        rows = x if x.dim() == 2 else x.reshape(-1, weight.inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        stride = dense_rows("x", rows)
        if out is None:
            out = x.new_empty(*x.shape[:-1], weight.outputs)
        else:
            shape("out", out, *x.shape[:-1], weight.outputs)
        target = out if out.dim() == 2 else out.view(-1, weight.outputs)
        if bias is not None:
            shape("bias", bias, weight.outputs)
            bias = weight.wide(bias)
        call(
            rows.data_ptr(), stride, rows.shape[0], code, *weight.arguments,
            None if bias is None else bias.data_ptr(), target.data_ptr(),
            dense_rows("out", target), CODES[out.dtype],
        )  # fmt: skip
        return out

    return linear
