"""Formats made for fp8 activations round them where the kernels multiply fp8, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from modulm.contracts.quantization import LinearSpec
from modulm.plugins import manager
from modulm.plugins.options import structure

FLOATS = {"type": "float", "num_bits": 8}
GROUP = {"targets": ["Linear"], "weights": {**FLOATS, "strategy": "channel"}}


def compressed(**group):
    return {"format": "float-quantized", "config_groups": {"group_0": {**GROUP, **group}}}


METHODS = {
    "fp8": ("fp8", {"quant_method": "fp8"}, "fp8"),
    "ptpc_fp8": ("ptpc_fp8", {}, "fp8"),
    "compressed_tensors": ("compressed-tensors", compressed(input_activations=FLOATS), "fp8"),
    "weights alone": ("compressed-tensors", compressed(), "bf16"),
    "modelopt": ("modelopt", {"quant_algo": "FP8"}, "fp8"),
    "modelopt, weights alone": ("modelopt", {"quant_algo": "FP8_PB_WO"}, "bf16"),
}


@pytest.mark.parametrize("case", METHODS)
@pytest.mark.parametrize("products", [True, False])
def test_activations(case, products):
    name, settings, wanted = METHODS[case]
    driver = manager.current().load("quantization", name)
    ops = SimpleNamespace(supports=lambda name: products and name == "round_rows_fp8")
    method = driver(structure(settings, driver.Config, "test"), None, ops)
    linear = LinearSpec("model.layers.0.mlp.down_proj", 64, (64,), False, "bfloat16")
    head = LinearSpec("lm_head", 64, (512,), False, "bfloat16", "lm_head")
    assert method.activations(linear) == (wanted if products else "bf16")
    assert method.activations(head) == "bf16"
