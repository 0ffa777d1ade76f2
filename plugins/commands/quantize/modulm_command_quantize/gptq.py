"""GPTQ: rounding with error compensation (Frantar et al., arXiv 2210.17323)."""

from __future__ import annotations

import torch
from torch import Tensor

from modulm_command_quantize.schemes import Grid, Scheme

__all__ = ["gptq"]

_BLOCK = 128
#: Damping, as a fraction of the mean of the diagonal.
_DAMP = 0.01


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme) -> tuple[Tensor, Grid]:
    """Quantize a weight: [N, K] -> codes [N, K] and their grid. hessian: [K, K], the sum of x x^T
    over inputs.

    Columns are processed in order of decreasing activation. Groups remain contiguous, so no order
    has to be stored.
    """
    grid = scheme.grid(weight)
    left, hessian = weight.float().clone(), hessian.float().clone()
    diagonal = hessian.diagonal()
    silent = diagonal == 0
    diagonal[silent] = 1.0
    diagonal += _DAMP * diagonal.mean()
    order = diagonal.argsort(descending=True, stable=True)
    groups = torch.arange(weight.shape[1]) * grid.scale.shape[1] // weight.shape[1]
    left[:, silent] = 0
    left, groups = left[:, order], groups[order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True)
    codes = torch.empty_like(left)
    for start in range(0, left.shape[1], _BLOCK):
        end = min(start + _BLOCK, left.shape[1])
        errors = torch.empty(len(left), end - start)
        for column in range(start, end):
            one, group = left[:, column : column + 1], groups[column : column + 1]
            codes[:, column : column + 1] = code = grid.codes(one, group)
            error = (one - grid.weight(code, group)) / factor[column, column]
            left[:, column:end] -= error * factor[column, column:end]
            errors[:, column - start] = error[:, 0]
        left[:, end:] -= errors @ factor[start:end, end:]
    return codes[:, order.argsort()], grid
