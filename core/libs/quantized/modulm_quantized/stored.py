"""How a layer is stored, as `modulm explain` says it before anything is read."""

from __future__ import annotations

from typing import Self

from attrs import field, frozen, validators

from modulm.contracts.quantization import LinearSpec
from modulm_quantized.fitting import GROUPS

__all__ = ["StoredAs"]


def _size(group: int) -> int:
    """Formats write -1 for one group of all."""
    return max(group, 0)


@frozen
class StoredAs:
    """text: what the codes are. kind: "int", "fp8", "e2m1" or "other", for numbers that kernels do
    not know. bits: of a code of integers. group: inputs that share a scale, 0 for all. zeros:
    there are zero points. powers: scales are powers of two. ordered: inputs lie in any order."""

    text: str
    kind: str = field(default="int", validator=validators.in_(("int", "fp8", "e2m1", "other")))
    bits: int = 4
    group: int = field(default=0, converter=_size)
    zeros: bool = False
    powers: bool = False
    ordered: bool = False

    @classmethod
    def integers(cls, bits: int, group: int, *, zeros: bool = False, ordered: bool = False) -> Self:
        """Whole numbers with a scale for each `group` inputs, for all if it is not positive."""
        what = "a scale and zero point" if zeros else "a scale"
        where = f"{group} inputs" if group > 0 else "output"
        order = ", inputs sorted by group" if ordered else ""
        text = f"int{bits}, {what} per {where}{order}"
        return cls(text, "int", bits, group, zeros, ordered=ordered)

    def fits(self, spec: LinearSpec) -> bool:
        """Whether the kernels for a CPU multiply such codes; else they hold the weight itself.

        Experts have one order of inputs.
        """
        if self.kind == "other" or (spec.experts and self.ordered):
            return False
        sizes = GROUPS[1:] if self.kind == "fp8" else GROUPS
        whole = not self.group or self.group == spec.inputs
        return whole or any(not self.group % size for size in sizes)
