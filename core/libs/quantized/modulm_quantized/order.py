"""Groups of inputs that are not adjacent."""

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor

from modulm.contracts.quantization import LinearSpec
from modulm.errors import CheckpointError
from modulm_quantized.codes import Codes

__all__ = ["sorted_by_group"]


def sorted_by_group(codes: Codes, index: Tensor | None, spec: LinearSpec) -> tuple[Codes, ...]:
    """Reorder the codes so that the inputs of each group are adjacent.

    index: [parts, K], the group of each input, or None if they are adjacent already. Parts that
    group their inputs differently become separate codes. Raises CheckpointError if groups differ in
    size.
    """
    if index is None:
        return (codes,)
    usual = torch.arange(index.shape[1], device=index.device) // codes.group
    if bool((index == usual).all()):
        return (codes,)
    if bool((index == index[:1]).all()):
        return (_sorted(codes, index[0], spec),)
    starts = [0, *torch.tensor(spec.parts).cumsum(0).tolist()]
    return tuple(
        _sorted(codes.rows(slice(starts[part], starts[part + 1])), one, spec)
        for part, one in enumerate(index)
    )


def _sorted(codes: Codes, index: Tensor, spec: LinearSpec) -> Codes:
    groups = codes.scales.shape[1]
    in_range = bool(((index >= 0) & (index < groups)).all())
    if not in_range or bool((torch.bincount(index, minlength=groups) != codes.group).any()):
        raise CheckpointError(f"{spec.name}.g_idx: inputs are not {groups} groups of {codes.group}")
    order = torch.argsort(index, stable=True)
    return evolve(codes, values=codes.values[:, order], order=order)
