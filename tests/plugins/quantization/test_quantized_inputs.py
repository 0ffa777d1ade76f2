"""Formats made for quantized inputs quantize them where kernels multiply that, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from attrs import evolve

from modulm.contracts.quantization import LinearSpec, Shard
from modulm.plugins import manager
from modulm.plugins.options import structure
from modulm_quantized.activations import ACTIVATION_FORMATS
from modulm_quantized.flags import LowPrecisionFlags

FLOATS = {"type": "float", "num_bits": 8}
GROUP = {"targets": ["Linear"], "weights": {**FLOATS, "strategy": "channel"}}
FP4 = {"type": "float", "num_bits": 4, "group_size": 32, "strategy": "group"}
NVFP4 = {**FP4, "group_size": 16, "strategy": "tensor_group"}


def compressed(form="float-quantized", **group):
    return {"format": form, "config_groups": {"group_0": {**GROUP, **group}}}


def quark(weight, inputs):
    return {"global_quant_config": {"weight": weight, "input_tensors": {"dtype": inputs}}}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
METHODS = {
    "fp8": ("fp8", {"quant_method": "fp8"}, "fp8_token"),
    "fp8, static": ("fp8", {"quant_method": "fp8", "activation_scheme": "static"}, "fp8_static"),
    "fp8 in blocks": ("fp8", BLOCKS, "fp8"),
    "ptpc_fp8": ("ptpc_fp8", {}, "fp8_token"),
    "mxfp8": ("mxfp8", {"quant_method": "mxfp8"}, "mxfp8"),
    "nvfp4": ("nvfp4", {"quant_method": "nvfp4"}, "nvfp4"),
    "compressed": ("compressed-tensors", compressed(input_activations=FLOATS), "fp8_token"),
    "w8a8": (
        "compressed-tensors",
        compressed("int-quantized", weights={}, input_activations={"num_bits": 8}), "int8",
    ),
    "compressed mxfp4": (
        "compressed-tensors",
        compressed("mxfp4-pack-quantized", weights=FP4, input_activations=FP4), "mxfp4",
    ),
    "compressed nvfp4": (
        "compressed-tensors",
        compressed("nvfp4-pack-quantized", weights=NVFP4, input_activations=NVFP4), "nvfp4",
    ),
    "weights alone": ("compressed-tensors", compressed(), "bf16"),
    "modelopt": ("modelopt", {"quant_algo": "FP8"}, "fp8_token"),
    "modelopt nvfp4": ("modelopt", {"quant_algo": "NVFP4"}, "nvfp4"),
    "modelopt, weights alone": ("modelopt", {"quant_algo": "FP8_PB_WO"}, "bf16"),
    "quark": ("quark", quark(MXFP4, "fp4"), "mxfp4"),
    "quark w4a8": ("quark", quark(MXFP4, "fp8_e4m3"), "mxfp8"),
}  # fmt: skip


def make(case, fast, choice="auto", **more):
    name, settings, wanted = METHODS[case] if isinstance(case, str) else case
    driver = manager.current().load("quantization", name)
    ops = {"pack_quantized": print, "low_precision": lambda name: fast, **more}
    method = driver(structure(settings, driver.Config, "test"), None, SimpleNamespace(find=ops.get))
    flags = LowPrecisionFlags(activation_quantization=choice)
    method.flags = SimpleNamespace(group=lambda cls: flags)
    return method, wanted


LINEAR = LinearSpec("model.layers.0.mlp.down_proj", 64, (64,), False, "bfloat16")


@pytest.mark.parametrize("case", METHODS)
def test_where_inputs_are_quantized(case):
    method, wanted = make(case, True)
    assert method.activations(LINEAR) == wanted
    head = LinearSpec("lm_head", 64, (512,), False, "bfloat16", "lm_head")
    assert method.activations(head) == (wanted if wanted == "int8" else "bf16")
    for fast, choice in ((True, "off"), (False, "auto"), (None, "auto"), (None, "on")):
        assert make(case, fast, choice)[0].activations(LINEAR) == "bf16"
    assert make(case, False, "on")[0].activations(LINEAR) == wanted


def test_explain_says_which_path_a_layer_takes():
    said = make("fp8", True)[0].note(LINEAR)
    assert said == "e4m3, a scale per tensor; inputs quantized to e4m3, a scale per token"
    said = make("mxfp8", False)[0].note(LINEAR)
    assert "products in 16 bits: mxfp8 is not faster here; --activation-quantization on" in said
    assert "16 bits: --activation-quantization off" in make("w8a8", True, "off")[0].note(LINEAR)
    assert "16 bits" not in make("weights alone", True)[0].note(LINEAR)
    for fast in (True, False):
        kernels = {"low_precision_note": "measured {}".format}
        assert "(measured int8)" in make("w8a8", fast, **kernels)[0].note(LINEAR)


@pytest.mark.parametrize(
    ("settings", "choice", "quantized"),
    [({}, "auto", True), ({}, "off", False), ({"activations": "bf16"}, "auto", False),
     ({"activations": "int8"}, "off", True)],
)  # fmt: skip
def test_explain_says_what_quantization_at_load_does_with_inputs(settings, choice, quantized):
    method = make(("int8", settings, "int8"), True, choice)[0]
    said = "int8, a scale per output"
    more = "; inputs quantized to int8, a scale per token and 256 inputs"
    assert method.note(LINEAR) == said + more * quantized


@pytest.mark.parametrize("case", ["w8a8", "fp8 in blocks", "mxfp8", "nvfp4", "compressed mxfp4"])
def test_explain_says_that_the_norm_before_quantizes(case):
    method, name = make(case, True)
    method.ops.providers = {"rms_norm_rounded": "triton"}
    end = f"inputs quantized to {ACTIVATION_FORMATS[name]}, by the norm before if there is one"
    assert method.note(LINEAR).endswith(end)
    split = evolve(LINEAR, input_shard=Shard(0, 64, 128))
    assert "norm" not in method.note(split)
