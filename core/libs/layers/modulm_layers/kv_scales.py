"""Scales of 8-bit float KV caches, from the checkpoint or calculated in the first step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from modulm.nn.weight_slots import Part, Slot, Unit

if TYPE_CHECKING:
    from modulm.nn.builder import Builder

__all__ = [
    "K_LARGEST",
    "V_LARGEST",
    "calculated_scale",
    "is_kv_scale",
    "scale_names",
    "take_scales",
]

#: The largest key and value of the first step map to these values, below e4m3's maximum of 448:
#: later ones may be larger.
K_LARGEST = 200.0
V_LARGEST = 100.0
_LEAST = 1e-6


def scale_names(vector: str, parts: Sequence[str]) -> list[str]:
    """Names under which a checkpoint may store a layer's KV scale, below the layer's path.

    vector: "k" or "v". parts: linear layers that may carry it, the preferred one first. Covers
    compressed-tensors, ModelOpt, Quark and older fp8 checkpoints.
    """
    paths = ["", *(f"{part}." for part in parts), "attn."]
    names = [f"{path}{vector}_scale" for path in paths]
    return [*names, f"{parts[0]}.output_scale", "kv_scale"]


def is_kv_scale(name: str) -> bool:
    """Whether a stored tensor has the name of a KV scale."""
    return name.rpartition(".")[2] in ("k_scale", "v_scale", "kv_scale") or name.endswith(
        ("k_proj.output_scale", "v_proj.output_scale")
    )


def take_scales(
    b: Builder, layer: Module, attribute: str, heads: int, names: Sequence[str]
) -> None:
    """Register a layer's KV scales [heads]; None if the checkpoint has none.

    names: names under which they may be stored, one for all heads or one per head.
    """
    shape = (heads,)
    empty = torch.empty(shape, dtype=torch.float32, device="meta")
    layer.register_parameter(attribute, Parameter(empty, requires_grad=False))
    spread = partial(_each, heads)
    ways = [(Part(b.name(name), shape, transform=spread),) for name in names]
    slot = Slot(layer, attribute, shape, torch.float32, tuple(ways), True)
    b.shared.scales.update(way[0].name for way in ways)
    b.shared.units.append(Unit(b.name(attribute), layer, [slot]))


def calculated_scale(vectors: Tensor, largest: float) -> Tensor:
    """Scale [heads] fp32 from the keys or values [tokens, heads, size] of a step."""
    return (vectors.detach().float().abs().amax((0, 2)) / largest).clamp(min=_LEAST)


def _each(heads: int, scale: Tensor) -> Tensor:
    return scale.reshape(-1).expand(heads)
