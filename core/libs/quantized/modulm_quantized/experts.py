"""Stacks of experts, packed one expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from modulm_quantized.fitting import Fitted

__all__ = ["pack_stack"]

#: Arguments of the op `pack_quantized_experts` per expert: codes, scales, zero points.
Coded = tuple[Tensor, Tensor, Tensor | None]


class _Unlike(Exception):
    """Raised if experts stored in one format were narrowed to different kernel formats."""


def pack_stack(
    pack: Callable[..., Any],
    fitted: Callable[[int, bool], Fitted | None],
    experts: int,
    parts: int,
    activations: str,
) -> Any | None:
    """Pack `experts` experts with the op `pack_quantized_experts`.

    Returns None if no kernel supports their codes. fitted: returns one expert in the narrowest
    kernel format, or (True) in the format that fits all weights stored this way. Each expert's
    memory is freed once it is packed. Experts are requested again if their narrowest formats
    differ.
    """
    for wide in (False, True):
        first = fitted(0, wide)
        if first is None:
            return None
        others = (fitted(expert, wide) for expert in range(1, experts))
        try:
            stack = _alike(first, others)
            return pack(stack, experts, first.form, first.group, parts, activations)
        except _Unlike:
            continue
    return None


def _alike(first: Fitted, others: Iterator[Fitted | None]) -> Iterator[Coded]:
    """Yield experts; raise _Unlike at the first in another format."""
    yield first.values, first.scales, first.zeros
    for each in others:
        if each is None or _kind(each) != _kind(first):
            raise _Unlike
        yield each.values, each.scales, each.zeros


def _kind(fit: Fitted) -> tuple[object, ...]:
    return fit.form, fit.group, fit.scales.dtype, fit.zeros is None
