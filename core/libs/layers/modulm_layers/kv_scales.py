"""Scales of what a layer keeps in eight-bit floats: the checkpoint's, or found in a first step."""

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

#: The largest key and value of a first step become these of e4m3's 448: later ones may be larger.
K_LARGEST = 200.0
V_LARGEST = 100.0
_LEAST = 1e-6


def scale_names(kept: str, parts: Sequence[str]) -> list[str]:
    """Under which names a layer's scale may be stored, below its own path.

    kept: "k" or "v"; parts: the linear layers that it may stand at, its own first. Names of
    compressed-tensors, ModelOpt, Quark and of older fp8 checkpoints.
    """
    paths = ["", *(f"{part}." for part in parts), "attn."]
    found = [f"{path}{kept}_scale" for path in paths]
    return [*found, f"{parts[0]}.output_scale", "kv_scale"]


def is_kv_scale(name: str) -> bool:
    """Whether a stored tensor is called like such a scale."""
    return name.rpartition(".")[2] in ("k_scale", "v_scale", "kv_scale") or name.endswith(
        ("k_proj.output_scale", "v_proj.output_scale")
    )


def take_scales(
    b: Builder, layer: Module, attribute: str, heads: int, names: Sequence[str]
) -> None:
    """Give the layer scales [heads] for what it keeps, None where the checkpoint has none.

    names: under which they may be stored, one for all heads or for each.
    """
    shape = (heads,)
    empty = torch.empty(shape, dtype=torch.float32, device="meta")
    layer.register_parameter(attribute, Parameter(empty, requires_grad=False))
    spread = partial(_each, heads)
    ways = [(Part(b.name(name), shape, transform=spread),) for name in names]
    slot = Slot(layer, attribute, shape, torch.float32, tuple(ways), True)
    b.shared.scales.update(way[0].name for way in ways)
    b.shared.units.append(Unit(b.name(attribute), layer, [slot]))


def calculated_scale(kept: Tensor, largest: float) -> Tensor:
    """kept: keys or values [tokens, heads, size] of a step -> [heads] fp32."""
    return (kept.detach().float().abs().amax((0, 2)) / largest).clamp(min=_LEAST)


def _each(heads: int, scale: Tensor) -> Tensor:
    return scale.reshape(-1).expand(heads)
