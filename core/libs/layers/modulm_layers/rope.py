"""Tables of rotary position embeddings (Su et al., arXiv 2104.09864) and their scalings.

A table is [positions, R] fp32: cosines of the R / 2 angles, then their sines, already multiplied by
the scaling's attention factor. An entry depends only on its position, so results do not depend on
how a sequence is split into steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from modulm.contracts.model import Batch

__all__ = ["Rope", "RopeTable", "cos_sin", "parse_rope"]


@frozen
class Rope:
    """Settings of one kind of rotary positions. `size` is R, the rotated dimensions of a head.

    `original` is the trained length before it was extended by `factor`. `score_factor` multiplies
    the softmax scale in layers that rotate only part of each head, where the table cannot carry the
    attention factor. `axes`: [R / 2], the position axis of each angle; empty for one axis (M-RoPE,
    Qwen2-VL, arXiv 2409.12191).
    """

    size: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    attention_factor: float = 1.0
    score_factor: float = 1.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    neox: bool = True
    axes: tuple[int, ...] = ()

    def table(self) -> RopeTable:
        """Make an unfilled table; `Builder.rope` makes one for all layers."""
        return RopeTable(self)


class RopeTable:
    """The table of one kind of rotary positions, shared by the layers that use it.

    `cos_sin` is [positions, R] fp32 after `fill`, which the loader calls once the maximum sequence
    length is known.
    """

    cos_sin: Tensor

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.cos_sin = torch.empty(0, rope.size, device="meta")
        #: The latest positions on several axes, and the table computed for them.
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def fill(self, rows: int, length: int, device: torch.device) -> None:
        """Compute the table for `rows` positions; `length` is the maximum sequence length."""
        self.cos_sin = cos_sin(self.rope, rows, length, device)

    def of_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (table, [tokens] row indices) for a step's tokens.

        With positions on several axes, the table has one row per token.
        """
        on_axes = batch.axis_positions
        if on_axes is None or not self.rope.axes:
            return self.cos_sin, batch.positions
        if self._last is None or self._last[0] is not on_axes:
            axes = torch.tensor(self.rope.axes * 2, device=on_axes.device)
            columns = torch.arange(self.rope.size, device=on_axes.device)
            rows = on_axes[axes].clamp(max=len(self.cos_sin) - 1)
            table = self.cos_sin[rows, columns[:, None]].T.contiguous()
            entry = table, torch.arange(len(table), device=on_axes.device)
            self._last = on_axes, entry
        return self._last[1]


def parse_rope(
    table: Mapping[str, Any], *, head_size: int, max_positions: int, neox: bool = True
) -> Rope:
    """Read the settings from config.json (`rope_parameters`, or `rope_scaling` and `rope_theta`).

    Raises ValueError for an unknown kind, and for a missing or ill-typed key, which it names.
    """
    kind = str(table.get("rope_type", table.get("type", "default")))
    if kind not in _FREQUENCIES:
        raise ValueError(f"rope_type: unknown {kind!r}; known: {', '.join(_FREQUENCIES)}")
    part = _number(table, "partial_rotary_factor", 1.0)
    size = int(head_size * part)
    if not 0 <= part <= 1 or (part < 1 and size % 2) or head_size < 2:
        key = "head_dim" if head_size < 2 else "partial_rotary_factor"
        raise ValueError(f"{key}: {size} of {head_size} dimensions cannot be rotated")
    original = int(_positive(table, "original_max_position_embeddings", max_positions))
    default = max_positions / original if kind in ("yarn", "longrope") else None
    factor = 1.0 if kind == "default" else _positive(table, "factor", default)
    factors = [tuple(table.get(key) or ()) for key in ("short_factor", "long_factor")]
    if kind == "longrope" and any(len(f) != size // 2 for f in factors):
        raise ValueError(f"short_factor and long_factor: {size // 2} numbers each are required")
    return Rope(
        size=size - size % 2,
        theta=_positive(table, "rope_theta", 10000.0),
        kind=kind,
        factor=factor,
        original=original,
        attention_factor=_attention_factor(kind, table, factor, original),
        score_factor=_score_factor(kind, table, factor),
        low_frequency=_number(table, "low_freq_factor", 1.0),
        high_frequency=_number(table, "high_freq_factor", 4.0),
        beta_fast=_number(table, "beta_fast", 32.0),
        beta_slow=_number(table, "beta_slow", 1.0),
        truncate=bool(table.get("truncate", True)),
        short_factors=factors[0],
        long_factors=factors[1],
        neox=neox,
        axes=_axes(table, size // 2),
    )


def _axes(table: Mapping[str, Any], angles: int) -> tuple[int, ...]:
    """Return the axis of each angle.

    The axes come in sections; with `mrope_interleaved` (Qwen3-VL) they alternate until an axis has
    used up its section, and the first axis takes the rest.
    """
    sections = table.get("mrope_section")
    if not sections:
        return ()
    if not isinstance(sections, list | tuple) or not all(type(n) is int for n in sections):
        raise ValueError(f"mrope_section: must be numbers of angles, not {sections!r}")
    count = len(sections)
    if table.get("mrope_interleaved"):
        turns = [i % count for i in range(angles)]
        return tuple(a if i // count < sections[a] else 0 for i, a in enumerate(turns))
    axes = [axis % 3 for axis, size in enumerate(sections) for _ in range(size)]
    if len(axes) != angles:
        raise ValueError(f"mrope_section: {len(axes)} angles of {angles}")
    return tuple(axes)


def cos_sin(rope: Rope, rows: int, length: int, device: torch.device) -> Tensor:
    """Compute the table for positions 0 to rows - 1: [rows, R] fp32.

    `length` is the maximum sequence length of the engine. If it exceeds the trained length,
    longrope uses its long factors for all positions, so that all cached keys agree.
    """
    positions = torch.arange(rows, device=device, dtype=torch.float32)
    if rope.kind == "dynamic":
        angles = positions[:, None] * _dynamic(rope, positions)
    else:
        angles = torch.outer(positions, _FREQUENCIES[rope.kind](rope, length).to(device))
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor


def _default(rope: Rope, length: int) -> Tensor:
    return 1.0 / rope.theta ** (torch.arange(0, rope.size, 2, dtype=torch.float32) / rope.size)


def _linear(rope: Rope, length: int) -> Tensor:
    return _default(rope, length) / rope.factor


def _dynamic(rope: Rope, positions: Tensor) -> Tensor:
    """[positions, R / 2]: beyond the trained length, the base grows with the position.

    This equals token-by-token decoding with dynamic NTK scaling. Deriving the base from the
    sequence length instead would invalidate cached keys.
    """
    reach = (positions + 1).clamp(min=rope.original) / rope.original
    stretch = (rope.factor * reach - (rope.factor - 1)) ** (rope.size / (rope.size - 2))
    exponent = torch.arange(0, rope.size, 2, dtype=torch.float32, device=positions.device)
    return 1.0 / (rope.theta * stretch)[:, None] ** (exponent / rope.size)


def _llama3(rope: Rope, length: int) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor and blend those between."""
    plain = _default(rope, length)
    turns = rope.original * plain / (2 * math.pi)
    blend = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: Rope, length: int) -> Tensor:
    """Scale dimensions by how often they turn within `original` (Peng et al., arXiv 2309.00071)."""
    half = rope.size // 2
    low, high = (_dimension(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain = _default(rope, length)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _dimension(rope: Rope, turns: float) -> float:
    """Return the (fractional) dimension that makes `turns` full turns within `original`."""
    wave = rope.original / (turns * 2 * math.pi)
    return rope.size * math.log(wave) / (2 * math.log(rope.theta))


def _longrope(rope: Rope, length: int) -> Tensor:
    """Divide each dimension by a searched factor, short or long (Ding et al., arXiv 2402.13753)."""
    factors = rope.long_factors if length > rope.original else rope.short_factors
    return _default(rope, length) / torch.tensor(factors, dtype=torch.float32)


_FREQUENCIES: Mapping[str, Callable[[Rope, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _attention_factor(kind: str, table: Mapping[str, Any], factor: float, original: int) -> float:
    """Return the factor of cosines and sines: 1 for all kinds but yarn and longrope."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if table.get("attention_factor") is not None:
        return _number(table, "attention_factor", None)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    whole, head = _number(table, "mscale", 0.0), _number(table, "mscale_all_dim", 0.0)
    if whole and head:
        return _mscale(factor, whole) / _mscale(factor, head)
    return _mscale(factor, 1.0)


def _score_factor(kind: str, table: Mapping[str, Any], factor: float) -> float:
    """Return the score factor for `mscale_all_dim`, squared: it applies to queries and keys."""
    head = _number(table, "mscale_all_dim", 0.0)
    return _mscale(factor, head) ** 2 if head and kind != "default" else 1.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _positive(table: Mapping[str, Any], key: str, default: float | None) -> float:
    value = _number(table, key, default)
    if value <= 0:
        raise ValueError(f"{key}: {value:g} must be above zero")
    return value


def _number(table: Mapping[str, Any], key: str, default: float | None) -> float:
    value = table.get(key)
    if value is None:
        value = default
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    kind = table.get("rope_type", table.get("type", "default"))
    raise ValueError(f"{key}: must be a number for rope_type {kind!r}, got {value!r}")
