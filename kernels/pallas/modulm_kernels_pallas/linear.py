"""Linear layers whose weights are 8-bit or 4-bit codes, dequantized tile by tile in the kernel."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["Codes", "linear", "linear_plain", "misfit", "pack"]

#: Numbers of a register's row: the last dimension of a block is a multiple of it, or whole.
_LANES = 128
_ROWS, _COLUMNS, _INPUTS = 256, 256, 512


class Codes(NamedTuple):
    """A weight [N, K] as scale * (code - zero).

    data: [N, K] int8, or for 4 bits [N, K / 2] int8 with code j in the low and code j + K / 2 in
    the high half of byte j, both -8..7. scales: [groups, 1, N] fp32, each for K / groups inputs.
    zeros: the same, or None.
    """

    data: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    bits: int

    @property
    def inputs(self) -> int:
        """K."""
        return int(self.data.shape[1]) * (2 if self.bits == 4 else 1)

    @property
    def outputs(self) -> int:
        """N."""
        return int(self.data.shape[0])


def pack(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None, *, bits: int = 8
) -> Codes:
    """Pack codes [N, K] int8 (4 bits: -8..7) with scales and zeros [N, groups].

    Raises ValueError for shapes that do not fit or codes out of range.
    """
    outputs, inputs = codes.shape
    groups = scales.shape[1]
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    if scales.shape[0] != outputs or inputs % groups:
        raise ValueError(f"scales {scales.shape} do not divide a weight of {codes.shape}")
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros must be {scales.shape}, not {zeros.shape}")
    data = codes.astype(np.int8)
    if bits == 4:
        if inputs % 2:
            raise ValueError(f"4-bit codes need an even number of inputs, not {inputs}")
        if codes.min() < -8 or codes.max() > 7:
            raise ValueError("4-bit codes must be -8..7")
        low, high = data[:, : inputs // 2], data[:, inputs // 2 :]
        data = ((low & 15) | (high << 4)).astype(np.int8)
    offsets = None if zeros is None else _by_group(zeros)
    return Codes(jnp.asarray(data), _by_group(scales), offsets, bits)


def _by_group(table: np.ndarray) -> jax.Array:
    return jnp.asarray(np.ascontiguousarray(table.astype(np.float32).T[:, None]))


def misfit(packed: Codes) -> str | None:
    """Return why the kernel does not compute this weight, or None if it does."""
    span, groups = packed.data.shape[1], packed.scales.shape[0]
    group = packed.inputs // groups
    if groups > 1 and group % _LANES:
        return f"groups must be multiples of {_LANES} inputs, not {group}"
    if groups > 1 and span % group:
        return "a group must not reach over both halves of the inputs"
    return None


def linear(
    x: jax.Array, packed: Codes, bias: jax.Array | None = None, *, interpret: bool = False
) -> jax.Array:
    """Multiply: x [T, K] by W^T, plus bias [N] -> [T, N] in x's dtype; sums are in fp32.

    Raises ValueError for weights that `misfit`.
    """
    if (reason := misfit(packed)) is not None:
        raise ValueError(reason)
    count, span = x.shape[0], int(packed.data.shape[1])
    rows = min(_ROWS, -(-count // 8) * 8)
    padded = jnp.pad(x, ((0, -count % rows), (0, 0)))
    group = packed.inputs // packed.scales.shape[0]
    columns = _divisor(packed.outputs, _COLUMNS)
    inputs = _divisor(min(group, span), _INPUTS)
    steps = span // inputs
    halves = 2 if packed.bits == 4 else 1

    def scale_of(half: int) -> pl.BlockSpec:
        per = group // inputs if packed.scales.shape[0] > 1 else halves * steps
        return pl.BlockSpec(
            (1, 1, columns), lambda m, n, k: (jax.lax.div(k + half * steps, per), 0, n)
        )

    operands: list[jax.Array] = [packed.data]
    specs = [pl.BlockSpec((columns, inputs), lambda m, n, k: (n, k))]
    for half in range(halves):
        operands += [padded, packed.scales]
        specs.append(pl.BlockSpec((rows, inputs), partial(_input_block, half * steps)))
        specs.append(scale_of(half))
        if packed.zeros is not None:
            operands.append(packed.zeros)
            specs.append(scale_of(half))
    if bias is not None:
        operands.append(bias.astype(jnp.float32)[None])
        specs.append(pl.BlockSpec((1, columns), lambda m, n, k: (0, n)))
    out = pl.pallas_call(
        partial(_linear, bits=packed.bits, zeros=packed.zeros is not None, bias=bias is not None),
        grid=(padded.shape[0] // rows, packed.outputs // columns, steps),
        in_specs=specs,
        out_specs=pl.BlockSpec((rows, columns), lambda m, n, k: (m, n)),
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], packed.outputs), x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        interpret=interpret,
    )(*operands)
    return out[:count]


def linear_plain(x: jax.Array, packed: Codes, bias: jax.Array | None = None) -> jax.Array:
    """Compute `linear` for any weight with XLA, which dequantizes the whole weight first."""
    wide = weight(packed)
    precision = "highest" if x.dtype == jnp.float32 else None
    out = jnp.einsum(
        "tk,nk->tn", x, wide.astype(x.dtype), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def weight(packed: Codes) -> jax.Array:
    """Return the dequantized weight [N, K] fp32."""
    data = packed.data
    if packed.bits == 4:
        data = jnp.concatenate(_nibbles(data), axis=1)
    groups = packed.scales.shape[0]
    parts = data.astype(jnp.float32).reshape(packed.outputs, groups, -1)
    if packed.zeros is not None:
        parts = parts - packed.zeros[:, 0].T[..., None]
    return (parts * packed.scales[:, 0].T[..., None]).reshape(packed.outputs, -1)


def _linear(data: Any, *more: Any, bits: int, zeros: bool, bias: bool) -> None:
    *inputs, out, total = more
    added = inputs.pop() if bias else None
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    parts = _nibbles(data[...]) if bits == 4 else (data[...],)
    each = 3 if zeros else 2
    for half, codes in enumerate(parts):
        x, scales, *offsets = inputs[half * each : (half + 1) * each]
        rows = x[...]
        precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
        product = jax.lax.dot_general(
            rows, codes.astype(rows.dtype), (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip
        if offsets:
            product -= rows.astype(jnp.float32).sum(1, keepdims=True) * offsets[0][0]
        total[...] += product * scales[0]

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        result = total[...] if added is None else total[...] + added[...]
        out[...] = result.astype(out.dtype)


def _input_block(shift: int, m: Any, n: Any, k: Any) -> tuple[Any, Any]:
    return m, k + shift


def _nibbles(data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the low and the high codes of bytes, -8..7, as fp32."""
    wide = data.astype(jnp.int32)
    low = jnp.right_shift(jnp.left_shift(wide, 28), 28)
    return low.astype(jnp.float32), jnp.right_shift(wide, 4).astype(jnp.float32)


def _divisor(size: int, most: int) -> int:
    """Return the largest multiple of 128 up to `most` that divides `size`, or all of it."""
    fitting = [n for n in range(_LANES, most + 1, _LANES) if size % n == 0]
    return max(fitting, default=size)
