"""Quantization schemes: codes on a grid, and their compressed-tensors format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm_quantized import pack_words

__all__ = ["SCHEMES", "Grid", "Scheme"]

_FP8 = torch.float8_e4m3fn
_TINY = 1e-9
#: Fractions of a group's range that are tried for 4-bit codes.
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_FLOAT8 = {**_INT8, "type": "float"}


@frozen(eq=False)
class Grid:
    """The values that a layer's weights can take: scale * (code - zero).

    scale, zero: [N, groups] fp32; zero None for 0.
    """

    scheme: Scheme
    scale: Tensor
    zero: Tensor | None

    def codes(self, weight: Tensor, columns: Tensor | None = None) -> Tensor:
        """Quantize a weight [N, n] to codes [N, n] fp32: integers, or fp8 values.

        columns: [n], the group of each column; None for all columns of the layer, in order.
        """
        scale, zero = self._of(self.scale, weight, columns), self._of(self.zero, weight, columns)
        wide = weight / scale
        low, high = self.scheme.range
        if self.scheme.kind == "float":
            return wide.clamp_(low, high).to(_FP8).float()
        if zero is not None:
            wide += zero
        return wide.round_().clamp_(low, high)

    def weight(self, codes: Tensor, columns: Tensor | None = None) -> Tensor:
        """Dequantize codes to fp32."""
        scale, zero = self._of(self.scale, codes, columns), self._of(self.zero, codes, columns)
        return scale * (codes if zero is None else codes - zero)

    def _of(self, values: Any, like: Tensor, columns: Tensor | None) -> Any:
        if values is None or values.shape[1] == 1:
            return values
        if columns is not None:
            return values[:, columns]
        return values.repeat_interleave(like.shape[1] // values.shape[1], 1)


@frozen
class Scheme:
    """A quantization scheme.

    bits: of a code. kind: "int" or "float". group: inputs that share a scale; 0 for a whole row.
    activations: how the runtime quantizes them; None for not at all.
    """

    name: str
    form: str
    bits: int
    kind: str = "int"
    group: int = 0
    symmetric: bool = True
    activations: Mapping[str, Any] | None = None

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest code."""
        if self.kind == "float":
            return -448.0, 448.0
        half = 2.0 ** (self.bits - 1)
        return (-half, half - 1) if self.symmetric else (0.0, 2.0**self.bits - 1)

    def sized(self, group: int | None) -> Scheme:
        """Return the scheme with another group size."""
        return self if group is None else evolve(self, group=group)

    def unfit(self, inputs: int) -> str | None:
        """Why a layer with this number of inputs cannot use the scheme, or None."""
        if self.group and inputs % self.group:
            return f"{inputs} inputs are not whole groups of {self.group}"
        if self.form == "pack-quantized" and inputs * self.bits % 32:
            return f"{inputs} codes of {self.bits} bits do not fill words of 32"
        return None

    def grid(self, weight: Tensor) -> Grid:
        """Find the best grid for a weight [N, K], by narrowing the ranges of groups in steps."""
        grouped = torch.unflatten(weight.float(), 1, (-1, self.group or weight.shape[1]))
        best = grouped.new_full(grouped.shape[:2], torch.inf)
        grid = self._of_range(grouped, 1.0)
        for shrink in _SHRINKS if self.bits == 4 else _SHRINKS[:1]:
            tried = self._of_range(grouped, shrink)
            rounded = tried.weight(tried.codes(weight.float())).view(grouped.shape)
            error = (rounded - grouped).square_().sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            zero = None
            if tried.zero is not None and grid.zero is not None:
                zero = torch.where(better, tried.zero, grid.zero)
            grid = Grid(self, torch.where(better, tried.scale, grid.scale), zero)
        return grid

    def _of_range(self, grouped: Tensor, shrink: float) -> Grid:
        low, high = self.range
        if self.symmetric:
            scale = grouped.abs().amax(-1) * shrink / ((high - low) / 2)
            return Grid(self, self._rounded_scale(scale), None)
        least, most = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
        scale = self._rounded_scale((most - least) * shrink / high)
        return Grid(self, scale, (least * -shrink / scale).round_().clamp_(low, high))

    def _rounded_scale(self, scale: Tensor) -> Tensor:
        """Round scales to their stored format: bf16 for groups."""
        scale = scale.clamp(min=_TINY)
        return scale.bfloat16().float() if self.group else scale

    def stored_tensors(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        """The stored tensors of a layer, by name suffix."""
        scale = grid.scale.bfloat16() if self.group else grid.scale
        if self.form == "float-quantized":
            return {"weight": codes.to(_FP8), "weight_scale": scale}
        if self.form == "int-quantized":
            return {"weight": codes.to(torch.int8), "weight_scale": scale}
        shifted = codes + (2 ** (self.bits - 1) if self.symmetric else 0)
        tensors = {
            "weight_packed": pack_words(shifted.to(torch.uint8), self.bits, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if grid.zero is not None:
            zeros = grid.zero.to(torch.uint8)
            padded = torch.nn.functional.pad(zeros, (0, 0, 0, -len(zeros) % (32 // self.bits)))
            tensors["weight_zero_point"] = pack_words(padded, self.bits, 0)
        return tensors

    def table(self, ignore: list[str]) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        weights: dict[str, Any] = {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": "group" if self.group else "channel",
            "group_size": self.group or None,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "output_activations": None}
        activations = None if self.activations is None else dict(self.activations)
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "input_activations": activations}},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }


_ALL = (
    Scheme("w4a16", "pack-quantized", 4, group=128),
    Scheme("w4a16-asym", "pack-quantized", 4, group=128, symmetric=False),
    Scheme("w8a16", "pack-quantized", 8),
    Scheme("w8a8", "int-quantized", 8, activations=_INT8),
    Scheme("w4a8", "int-quantized", 4, group=128, activations=_INT8),
    Scheme("fp8", "float-quantized", 8, "float", activations=_FLOAT8),
)
#: The schemes by their names in `--scheme`.
SCHEMES: Mapping[str, Scheme] = {scheme.name: scheme for scheme in _ALL}
