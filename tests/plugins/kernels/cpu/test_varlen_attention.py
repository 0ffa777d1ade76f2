"""Attention without a cache, in which rows of any length see all of themselves."""

from __future__ import annotations

import pytest
import torch

from modulm.ops import twins

SHAPES = {
    "one row": ([70], 2, 2, 64),
    "equal rows": ([64, 64, 64], 3, 3, 80),
    "odd rows": ([1, 33, 200, 31], 2, 2, 72),
    "shared keys": ([40, 5], 4, 2, 16),
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that nobody has written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def inputs(shape, dtype):
    """Queries and keys as parts of one tensor, as projections give them."""
    lengths, heads, kv_heads, size = SHAPES[shape]
    whole = torch.randn(sum(lengths), heads + 2 * kv_heads, size).to(dtype)
    return *whole.split([heads, kv_heads, kv_heads], dim=1), lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_what_the_twin_computes(ops, shape, dtype):
    q, k, v, lengths = inputs(shape, dtype)
    expected = twins.varlen_attention(q.float(), k.float(), v.float(), lengths)
    actual = ops["varlen_attention"](q, k, v, lengths)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def test_a_scale_is_taken(ops):
    q, k, v, lengths = inputs("odd rows", torch.float32)
    expected = twins.varlen_attention(q, k, v, lengths, 0.5)
    torch.testing.assert_close(ops["varlen_attention"](q, k, v, lengths, 0.5), expected)
    assert not torch.allclose(expected, twins.varlen_attention(q, k, v, lengths), atol=1e-3)


def test_a_row_is_the_same_beside_others(ops):
    q, k, v, lengths = inputs("odd rows", torch.bfloat16)
    whole = ops["varlen_attention"](q, k, v, lengths)
    single = ops["varlen_attention"](q[1:34], k[1:34], v[1:34], [33])
    assert torch.equal(whole[1:34], single)


def test_lengths_that_are_not_those_of_the_tokens_are_refused(ops):
    q, k, v, _ = inputs("one row", torch.float32)
    with pytest.raises(ValueError, match="lengths"):
        ops["varlen_attention"](q, k, v, [69])
