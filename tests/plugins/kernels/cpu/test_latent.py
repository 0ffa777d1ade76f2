"""What latent attention computes around its cache, against the twins."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.kernels.cpu.close import assert_close

from modulm.ops import twins

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, NOPE, RANK, TURNED = 3, 20, 70, 8


def inputs(tokens, dtype):
    draw = torch.Generator().manual_seed(tokens)

    def numbers(*shape):
        return torch.randn(*shape, generator=draw).to(dtype)

    q = numbers(tokens, HEADS * (NOPE + TURNED) + 4)[:, 4:].unflatten(-1, (HEADS, -1))
    latents = numbers(tokens, 11 + RANK + TURNED)[:, 11:]
    angles = torch.randn(50, TURNED // 2, generator=draw)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.randint(50, (tokens,), generator=draw)
    return q, latents, numbers(HEADS, NOPE, RANK) / 4, numbers(RANK), 1e-6, table, positions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 9])
def test_queries_and_keys(ops, tokens, neox, dtype):
    arguments = inputs(tokens, dtype)
    mine = ops["latent_prepare"](*arguments, neox)
    for actual, expected in zip(mine, twins.latent_prepare(*arguments, neox), strict=True):
        assert actual.shape == expected.shape
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_of_single_heads(ops, dtype):
    x = inputs(9, dtype)[0][..., :NOPE]
    weight = torch.randn(HEADS, NOPE, 131).to(dtype) / 4
    assert_close(ops["each_head"](x, weight), twins.each_head(x, weight))


def test_a_token_does_not_depend_on_its_neighbours(ops):
    q, latents, up, weight, eps, table, positions = inputs(9, torch.bfloat16)
    whole = ops["latent_prepare"](q, latents, up, weight, eps, table, positions)
    for at in (slice(0, 1), slice(3, 8)):
        part = ops["latent_prepare"](q[at], latents[at], up, weight, eps, table, positions[at])
        assert all(torch.equal(a, b[at]) for a, b in zip(part, whole, strict=True))


def test_what_does_not_fit_is_refused(ops):
    q, latents, up, weight, eps, table, positions = inputs(4, torch.float32)
    with pytest.raises(ValueError, match="latents must be"):
        ops["latent_prepare"](q, latents[:, 1:], up, weight, eps, table, positions)
    with pytest.raises(ValueError, match="weight must be"):
        ops["each_head"](q, up)
