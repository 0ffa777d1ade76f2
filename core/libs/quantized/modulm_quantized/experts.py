"""Stacks of experts, packed one expert after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from modulm_quantized.fitting import Fitted

__all__ = ["pack_stack"]

#: What the op `pack_quantized_experts` takes of an expert: codes, scales, zero points.
Coded = tuple[Tensor, Tensor, Tensor | None]


class _Unlike(Exception):
    """Experts that are stored alike came out in several formats."""


def pack_stack(
    pack: Callable[..., Any],
    fitted: Callable[[int, bool], Fitted | None],
    experts: int,
    parts: int,
    activations: str,
) -> Any | None:
    """`experts` experts through the op `pack_quantized_experts`; None if no kernel has their codes.

    fitted: one expert in the narrowest format of the kernels, or (True) in one that all weights
    stored alike have. Its memory is free again once it is packed. Experts are asked for once more
    where their narrowest formats differ.
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
    """Raises _Unlike at the first expert that is in another format."""
    yield first.values, first.scales, first.zeros
    for each in others:
        if each is None or _kind(each) != _kind(first):
            raise _Unlike
        yield each.values, each.scales, each.zeros


def _kind(fit: Fitted) -> tuple[object, ...]:
    return fit.form, fit.group, fit.scales.dtype, fit.zeros is None
