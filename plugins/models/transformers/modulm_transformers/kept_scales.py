"""Scales of fp8 KV caches, for attention layers run by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from modulm.errors import CheckpointError
from modulm_layers.kv_scales import (
    K_LARGEST,
    V_LARGEST,
    calculated_scale,
    is_kv_scale,
    scale_names,
)

__all__ = ["KeptScales"]

_Pair = tuple[Tensor | None, Tensor | None]


class KeptScales:
    """A pair of scales per layer: the checkpoint's or, with `calculate`, from its first step."""

    def __init__(self, calculate: bool) -> None:
        self.calculate = calculate
        self._pairs: dict[int, _Pair] = {}

    def take(
        self, checkpoint: Path, prefix: str, layers: Mapping[str, int], device: torch.device
    ) -> None:
        """Read the checkpoint's scales. layers: path below `prefix` -> key for `of`."""
        if self.calculate:
            return
        stored = _stored_scales(checkpoint)
        for path, layer in layers.items():
            pair = [
                next((stored[n] for n in _names(prefix, path, vector) if n in stored), None)
                for vector in ("k", "v")
            ]
            if any(scale is not None for scale in pair):
                first, second = (
                    None if s is None else s.float().reshape(-1).to(device) for s in pair
                )
                self._pairs[layer] = first, second

    def of(self, layer: int, k: Tensor, v: Tensor) -> _Pair:
        """The scales of a layer. k, v: [tokens, heads, size] of this step.

        Raises CheckpointError for scales of another number of heads than the layer's.
        """
        if layer not in self._pairs:
            calculated = (calculated_scale(k, K_LARGEST), calculated_scale(v, V_LARGEST))
            self._pairs[layer] = calculated if self.calculate else (None, None)
        pair = self._pairs[layer]
        for scale in pair:
            if scale is not None and len(scale) not in (1, k.shape[1]):
                raise CheckpointError(
                    f"{len(scale)} scales of keys or values, for {k.shape[1]} heads"
                )
        return pair


def _names(prefix: str, path: str, vector: str) -> list[str]:
    where = f"{prefix}.{path}." if prefix else f"{path}."
    return [where + name for name in scale_names(vector, (f"{vector}_proj", "qkv_proj"))]


def _stored_scales(checkpoint: Path) -> Mapping[str, Tensor]:
    from safetensors import safe_open

    scales = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if is_kv_scale(name):
                    scales[name] = opened.get_tensor(name)
    return scales
