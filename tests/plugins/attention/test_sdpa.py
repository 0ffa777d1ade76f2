"""The portable backend over a latent cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modulm.contracts.attention import AttentionSpec, StepLayout
from modulm.ops import bind
from modulm.plugins import manager

HEADS, RANK, ROPE, BLOCK, LENGTH = 16, 32, 8, 16, 320


class Largest(TorchDispatchMode):
    """Remembers the numbers in the largest tensor that any operation gave."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_reads_the_compressed_cache_and_expands_nothing(dtype):
    plugins = manager.current()
    spec = AttentionSpec(HEADS, 1, RANK + ROPE, 0.2, dtype, dtype, latent=RANK)
    backend = plugins.load("attention", "sdpa")(
        spec, plugins.load("platforms", "cpu")(), bind(), BLOCK
    )
    layout = backend.layout(1 + LENGTH // BLOCK)
    kind = getattr(torch, dtype)
    cache = torch.randn(layout.shape).to(kind)
    step = StepLayout(
        BLOCK,
        np.arange(1, 1 + LENGTH // BLOCK, dtype=np.int32)[None],
        np.array([0, 1], dtype=np.int32),
        np.array([LENGTH], dtype=np.int32),
        np.array([BLOCK + LENGTH - 1], dtype=np.int64),
    )
    q = torch.randn(1, HEADS, RANK + ROPE).to(kind)
    k = torch.randn(1, 1, RANK + ROPE).to(kind)
    out = torch.empty(1, HEADS, RANK, dtype=kind)
    plan = backend.plan(step)
    with torch.no_grad(), Largest() as largest:
        backend.forward(q, k, k[..., :RANK], cache, plan, out)
    assert largest.numbers <= cache.numel()
