"""Activations, layer norms, gated norms, rotation, lookup and latents against their twins."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.kernels.triton.close import assert_close, each_dtype, poisoned, strided

from modulm.ops import twins

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "silu", "tanh")


@each_dtype
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(ops, device, act, dtype):
    x = 4 * strided(3, 70, dtype, device)
    x[0, :2] = torch.tensor([60.0, -60.0])
    assert_close(ops["activate"](x, act), twins.activate(x, act), 4)
    out = poisoned(3, 35, dtype=dtype, device=device)
    assert ops["act_and_mul"](x, act, out) is out
    assert_close(out, twins.act_and_mul(x, act), 4)
    assert_close(ops["multiply"](x, x / 3, act), twins.multiply(x, x / 3, act), 4)


@each_dtype
def test_xielu(ops, device, dtype):
    x = strided(3, 70, dtype, device)
    assert_close(ops["activate"](x, "xielu", (0.8, 0.3)), twins.activate(x, "xielu", (0.8, 0.3)), 4)


@each_dtype
def test_sums_and_products(ops, device, dtype):
    x, y, gate = (strided(3, size, dtype, device) for size in (70, 70, 1))
    assert_close(ops["add"](x, y), twins.add(x, y))
    assert_close(ops["add"](x, y, gate), twins.add(x, y, gate))
    assert_close(ops["multiply"](x, y), twins.multiply(x, y))
    assert_close(ops["multiply"](x.float(), y, "silu"), twins.multiply(x.float(), y, "silu"))


def test_activations_of_nothing(ops, device):
    for rows in (ops["activate"](torch.empty(0, 8, device=device), "silu"),
                 ops["act_and_mul"](torch.empty(0, 16, device=device), "silu")):  # fmt: skip
        assert rows.shape == (0, 8)


@each_dtype
def test_layer_norm(ops, device, dtype):
    x, weight, bias = strided(3, 130, dtype, device) + 2, *torch.randn(2, 130, device=device)
    out = poisoned(3, 130, dtype=dtype, device=device)
    assert ops["layer_norm"](x, weight, bias, 1e-5, out) is out
    assert_close(out, twins.layer_norm(x, weight, bias, 1e-5), 2)
    assert_close(ops["layer_norm"](x, None, None, 1e-5), twins.layer_norm(x, None, None, 1e-5), 2)
    heads = x.unflatten(-1, (10, 13))[:, 2:6]
    for each in (torch.randn(13, device=device), torch.randn(4, 13, device=device).to(dtype)):
        expected = twins.layer_norm(heads, each, None, 1e-5)
        assert_close(ops["layer_norm"](heads, each, None, 1e-5), expected, 2)


@each_dtype
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("width", [24, 72])
def test_gated_rms_norm(ops, device, width, norm_first, dtype):
    x, gate = strided(3, 72, torch.float32, device), strided(3, 72, dtype, device)
    arguments = (x, gate, torch.randn(width, device=device).to(dtype), 1e-5, 3)
    expected = twins.gated_rms_norm(*arguments, norm_first=norm_first)
    assert_close(ops["gated_rms_norm"](*arguments, norm_first=norm_first), expected)


@each_dtype
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("turned", [24, 12])
def test_rotary(ops, device, turned, neox, dtype):
    whole = torch.randn(3, 9 * 24).to(device, dtype).unflatten(-1, (9, 24))
    mine, theirs = whole.clone(), whole.clone()
    angles = torch.rand(20, turned // 2, device=device)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.tensor([0, 19, 7], device=device)
    ops["rotary"](mine[:, :4], mine[:, 4:6], positions, table, neox)
    twins.rotary(theirs[:, :4], theirs[:, 4:6], positions, table, neox)
    assert_close(mine, theirs)


@each_dtype
def test_embedding(ops, device, dtype):
    weight, ids = strided(9, 70, dtype, device), torch.tensor([8, 0, 3, 3], device=device)
    assert torch.equal(ops["embedding"](ids, weight), twins.embedding(ids, weight))
    out = poisoned(4, 70, dtype=dtype, device=device)
    assert ops["embedding"](ids, weight, out) is out
    assert torch.equal(out, twins.embedding(ids, weight))


def test_parts_of_a_vocabulary_add_up(ops, device):
    weight, ids = torch.randn(10, 16, device=device), torch.tensor([9, 0, 5, 4], device=device)
    parts = [ops["embedding"](ids - first, weight[first : first + 5]) for first in (0, 5)]
    assert torch.equal(parts[0] + parts[1], twins.embedding(ids, weight))


@each_dtype
@pytest.mark.parametrize("neox", [True, False])
def test_latent_prepare(ops, device, neox, dtype):
    heads, nope, rank, turned = 3, 20, 48, 8
    q = torch.randn(5, heads * (nope + turned) + 4).to(device, dtype)[:, 4:]
    retained = strided(5, rank + turned, dtype, device)
    up = (torch.randn(heads, nope, rank) / 4).to(device, dtype)
    angles = torch.randn(50, turned // 2, device=device)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.randint(50, (5,), device=device)
    weight = torch.randn(rank, device=device)
    queries = q.unflatten(-1, (heads, -1))
    arguments = (queries, retained, up, weight, 1e-6, table, positions, neox)
    for actual, expected in zip(
        ops["latent_prepare"](*arguments), twins.latent_prepare(*arguments), strict=True
    ):
        assert_close(actual, expected, 2)
