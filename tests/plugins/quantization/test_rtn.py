"""Rounding at load: how close the codes stay, what each name holds, settings by layer."""

from __future__ import annotations

import pytest
import torch

from modulm.contracts.quantization import LinearSpec
from modulm.errors import ConfigError
from modulm.ops import bind
from modulm.plugins import manager
from modulm_quant_rtn.methods import Int4, Int4Config, Int8
from modulm_quantized import SCHEMES, round_weight

#: Scheme -> the relative error on normal numbers.
ERRORS = {
    "int8": 0.01,
    "int4": 0.11,
    "fp8": 0.03,
    "fp8_per_tensor": 0.03,
    "fp8_per_block": 0.03,
    "fp8_per_channel": 0.03,
    "int8_per_channel_weight_only": 0.01,
    "mxfp8": 0.035,
    "mxfp4": 0.13,
    "nvfp4": 0.1,
}
SPEC = LinearSpec(
    "layers.0.qkv", 256, (8, 4), False, "float32", part_names=("layers.0.q", "layers.0.k")
)
HEAD = LinearSpec("lm_head", 256, (8,), False, "float32", kind="lm_head")
ODD = LinearSpec("layers.0.up", 100, (8,), False, "float32")
EXPERT = LinearSpec("layers.0.experts", 256, (8,), False, "float32", kind="expert", experts=2)


@pytest.mark.parametrize("name", SCHEMES)
def test_error(name):
    torch.manual_seed(0)
    weight = torch.randn(70, 256)
    codes = round_weight(weight.bfloat16(), SCHEMES[name])
    assert (codes.weight(torch.float32) - weight).norm() / weight.norm() < ERRORS[name]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_zero_row_stays_zero_beside_others(name):
    weight = torch.ones(4, 128)
    weight[1] = 0
    weight_rounded = round_weight(weight, SCHEMES[name]).weight(torch.float32)
    assert weight_rounded[1].eq(0).all()
    torch.testing.assert_close(weight_rounded[0], weight[0], rtol=0.01, atol=0)


def test_groups_of_a_block_share_a_scale_and_parts_do_not():
    weight = torch.ones(200, 200)
    weight[150, 3] = 100
    scales = round_weight(weight, SCHEMES["fp8_per_block"]).scales
    assert scales.shape == (200, 25)
    assert (scales[128:, :16] == 100 / 448).all()
    assert (scales[:128] == 1 / 448).all()
    assert (scales[:, 16:] == 1 / 448).all()
    parts = round_weight(weight, SCHEMES["fp8_per_tensor"], (120, 80)).scales[:, 0]
    assert parts.unique().tolist() == [scales[0, 0], scales[199, 0]]


def test_mxfp4_has_the_numbers_of_its_specification():
    """Largest value 5: the exponent is 2^(2 - 2) = 1; halves are rounded to even codes."""
    weight = torch.zeros(1, 32)
    weight[0, :8] = torch.tensor([5.0, 0.3, -1.2, 2.4, 4.0, -0.2, 3.6, -2.6])
    numbers = round_weight(weight, SCHEMES["mxfp4"]).weight(torch.float32)[0, :8]
    assert numbers.tolist() == [4.0, 0.5, -1.0, 2.0, 4.0, 0.0, 4.0, -3.0]


def test_the_head_and_odd_sizes_keep_a_byte():
    method = Int4(Int4Config(group_size=64), None, None)
    assert [method.rounded_to(each).values for each in (SPEC, HEAD, ODD)] == [
        "int4",
        "int8",
        "int8",
    ]
    assert "100 inputs are not whole groups of 64" in method.note(ODD)
    assert "the head keeps int8" in method.note(HEAD)
    assert method.note(SPEC) == "int4, a scale and a zero point per 64 inputs"


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_the_original_is_dropped(kind):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(12, 256), requires_grad=False)
    platform = manager.current().load("platforms", "cpu")()
    kind(kind.Config(), platform, bind()).finish(layer, SPEC)
    assert layer.weight is None


def make_method(name, **settings):
    driver = manager.current().load("quantization", name)
    return driver(driver.Config(**settings), manager.current().load("platforms", "cpu")(), bind())


#: Name, settings -> what SPEC, HEAD and EXPERT become (None: not rounded).
RULES = [
    ("fp8_per_tensor", {}, ["fp8", None, "fp8"]),
    ("fp8_per_tensor", {"moe": "int8"}, ["fp8", None, "int8"]),
    ("fp8_per_block", {"linear": {"weight": None}, "moe": "mxfp4"}, [None, None, "e2m1"]),
    ("int8_per_channel_weight_only", {}, [None, None, "int8"]),
    ("mxfp4", {}, ["e2m1", None, "e2m1"]),
    ("nvfp4", {"targets": {"lm_head": "int8"}}, ["e2m1", "int8", "e2m1"]),
    ("int8", {"targets": {"re:.*experts": None}}, ["int8", "int8", None]),
    ("int4", {"linear": "fp8_per_channel_static"}, ["fp8", "int8", "int4"]),
    ("online", {"global_scheme": "mxfp8"}, ["fp8", None, "fp8"]),
    ("online", {"linear_scheme_override": "int4"}, ["int4", None, None]),
]


@pytest.mark.parametrize(("name", "settings", "wanted"), RULES)
def test_what_a_name_and_its_settings_mean(name, settings, wanted):
    method = make_method(name, **settings)
    schemes = [method.rounded_to(spec) for spec in (SPEC, HEAD, EXPERT)]
    assert [None if scheme is None else scheme.values for scheme in schemes] == wanted
    declined = [method.declines(spec) is not None for spec in (SPEC, HEAD, EXPERT)]
    assert declined == [values is None for values in wanted]


def test_what_does_not_fit_stays_as_it_is():
    assert "not whole groups of 32" in make_method("mxfp8").declines(ODD)


def test_patterns_by_part():
    method = make_method("int8", ignore=["re:.*\\.q$"], targets={"k": "fp8"})
    assert method.skips("layers.0.q")
    assert not method.skips("layers.0.k")
    with pytest.raises(ConfigError, match="layers.0.q, layers.0.k: fused layers need"):
        method.rounded_to(SPEC)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear": "int5"}, "unknown scheme 'int5'; known: int8"),
        ({"moe": {"activation": "mxfp8"}}, "known: int8, bf16"),
        ({"moe": {"wieght": "int8"}}, "unknown keys: wieght"),
        ({"targets": {"k": "no"}}, "unknown scheme 'no'"),
        ({"activations": "int3"}, "activations"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        manager.current().options("quantization", "int8", settings)
