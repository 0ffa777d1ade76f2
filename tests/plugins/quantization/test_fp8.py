"""fp8 at load: layers and experts keep a scale per output."""

from __future__ import annotations

import torch

from modulm.contracts.quantization import LinearSpec
from modulm.ops import bind
from modulm.plugins import manager
from modulm_quant_fp8.method import FP8, FP8Config


def quantize(spec, weight):
    method = FP8(FP8Config(), manager.current().load("platforms", "cpu")(), bind())
    layer = torch.nn.Module()
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    method.finish(layer, spec)
    return method.dequantize(layer, spec), method.note(spec)


def test_experts_are_rounded_too():
    spec = LinearSpec("experts.down", 96, (64,), False, "bfloat16", "expert", experts=4)
    weight = torch.randn(4, 64, 96).bfloat16()
    dequantized, note = quantize(spec, weight)
    assert note is None
    error = (dequantized.float() - weight.float()).norm(dim=2) / weight.float().norm(dim=2)
    assert 0 < error.max() < 0.04


def test_a_linear_layer_keeps_a_scale_per_output():
    spec = LinearSpec("mlp.down_proj", 96, (64,), False, "bfloat16")
    weight = torch.randn(64, 96).bfloat16() * torch.logspace(-3, 3, 64)[:, None].bfloat16()
    dequantized, note = quantize(spec, weight)
    assert note is None
    error = (dequantized.float() - weight.float()).norm(dim=1) / weight.float().norm(dim=1)
    assert 0 < error.max() < 0.04
