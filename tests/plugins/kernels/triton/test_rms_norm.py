"""RMS norms against their twins."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.kernels.triton.close import assert_close, each_dtype, poisoned, strided

from modulm.ops import twins


@each_dtype
@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 7), (3, 130)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(ops, device, rows, size, offset, dtype):
    x = strided(rows, size, dtype, device)
    for weight in (torch.randn(size, device=device), torch.randn(size, device=device).to(dtype)):
        out = poisoned(rows, size, dtype=dtype, device=device)
        assert ops["rms_norm"](x, weight, 1e-6, out, offset) is out
        assert_close(out, twins.rms_norm(x, weight, 1e-6, offset=offset))
    assert_close(ops["rms_norm"](x, None, 1e-6), twins.rms_norm(x, None, 1e-6))


@each_dtype
def test_rms_norm_of_heads(ops, device, dtype):
    heads = torch.randn(3, 9 * 24).to(device, dtype).unflatten(-1, (9, 24))[:, 2:6]
    weight = torch.randn(24, device=device)
    assert_close(ops["rms_norm"](heads, weight, 1e-6), twins.rms_norm(heads, weight, 1e-6))


@each_dtype
@pytest.mark.parametrize("residual_dtype", [None, torch.float32])
def test_add_rms_norm(ops, device, residual_dtype, dtype):
    x, before = strided(3, 130, dtype, device), strided(3, 130, residual_dtype or dtype, device)
    weight, ours, theirs = torch.randn(130, device=device), before.clone(), before.clone()
    got = ops["add_rms_norm"](x, ours, weight, 1e-6, None, 1.0)
    assert_close(got, twins.add_rms_norm(x, theirs, weight, 1e-6, None, 1.0))
    assert torch.equal(ours, theirs)
