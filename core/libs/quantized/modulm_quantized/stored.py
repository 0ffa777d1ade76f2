"""Descriptions of how a layer is stored, for `modulm explain`."""

from __future__ import annotations

from typing import Self

from attrs import field, frozen, validators

from modulm.contracts.quantization import LinearSpec
from modulm_quantized.fitting import GROUPS

__all__ = ["StoredAs"]


def _size(group: int) -> int:
    """Return the group size, 0 for a single group, which formats write as -1."""
    return max(group, 0)


@frozen
class StoredAs:
    """How a layer's codes are stored.

    text: description. kind: "int", "fp8", "e2m1", or "other" for values without kernels. bits: per
    integer code. group: inputs that share a scale, 0 for all. zeros: there are zero points. powers:
    scales are powers of two. ordered: inputs may be in any order.
    """

    text: str
    kind: str = field(default="int", validator=validators.in_(("int", "fp8", "e2m1", "other")))
    bits: int = 4
    group: int = field(default=0, converter=_size)
    zeros: bool = False
    powers: bool = False
    ordered: bool = False

    @classmethod
    def integers(cls, bits: int, group: int, *, zeros: bool = False, ordered: bool = False) -> Self:
        """Describe integers with a scale per `group` inputs; 0 or less: one for all."""
        what = "a scale and zero point" if zeros else "a scale"
        where = f"{group} inputs" if group > 0 else "output"
        order = ", inputs sorted by group" if ordered else ""
        text = f"int{bits}, {what} per {where}{order}"
        return cls(text, "int", bits, group, zeros, ordered=ordered)

    def fits(self, spec: LinearSpec) -> bool:
        """Whether the CPU kernels multiply these codes; otherwise the layer is dequantized.

        The inputs of experts must be in order.
        """
        if self.kind == "other" or (spec.experts and self.ordered):
            return False
        sizes = GROUPS[1:] if self.kind == "fp8" else GROUPS
        whole = not self.group or self.group == spec.inputs
        return whole or any(not self.group % size for size in sizes)
