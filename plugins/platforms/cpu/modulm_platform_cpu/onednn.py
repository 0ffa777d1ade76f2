"""Linear layers through oneDNN with weights packed once; plain `F.linear` packs in each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modulm.contracts.kernels import KernelProvider, Op
from modulm.contracts.platform import Platform, Probe

__all__ = ["OneDNN"]


class OneDNN(KernelProvider):
    """torch's oneDNN operations on packed weights, for bf16."""

    name = "onednn"
    api = 1

    @classmethod
    def probe(cls, platform: Platform) -> Probe:
        if platform.device.type != "cpu":
            return Probe(0, "oneDNN runs on CPUs only")
        if not torch.backends.mkldnn.is_available() or not hasattr(
            torch.ops.mkldnn, "_reorder_linear_weight"
        ):
            return Probe(0, "this torch was built without oneDNN")
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return Probe(0, "oneDNN computes no bfloat16 on this processor")
        return Probe(1, "torch was built with oneDNN")

    def ops(self) -> Mapping[str, Op]:
        return {
            "pack_linear": pack_linear,
            "linear": linear,
            "unpack_linear": unpack_linear,
        }

    def rejects(self, op: str, **facts: Any) -> str | None:
        if facts.get("dtype") != "bfloat16":
            return "packing is faster for bfloat16 only"
        return None


def pack_linear(weight: Tensor) -> Tensor:
    """Pack weight [N, K] to an opaque tensor in the layout that oneDNN prefers on this CPU."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K] by a packed weight -> [T, N]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def unpack_linear(packed: Tensor) -> Tensor:
    """Return the weight [N, K] in its original layout."""
    weight: Tensor = packed.to_dense()
    return weight
