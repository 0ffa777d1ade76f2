"""The contract kit for quantization methods.

    from modulm.testing.quantization import check_quantization

    def test_contract():
        check_quantization(MyMethod)

A layer of each kind that the method does not reject is made, filled with random numbers in the
shapes that `create` asks for, finished and applied; the oracle is a plain product with what
`dequantize` gives. What is optional is left out, as by a checkpoint that lacks it. Where random
numbers make no sense, pass `fill`, which is asked for everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from modulm.contracts.platform import Platform
from modulm.contracts.quantization import (
    CheckpointInfo,
    LinearKind,
    LinearSpec,
    ParamSpec,
    QuantizationMethod,
)
from modulm.errors import UnsupportedError
from modulm.ops import bind
from modulm.plugins import manager
from modulm.plugins.options import structure

__all__ = ["check_quantization"]

Fill = Callable[[LinearSpec, str, ParamSpec], Tensor]

_BASE = LinearSpec("model.layers.0.mlp.gate_up_proj", 256, (128, 64), False, "float32")
_LAYERS: Mapping[str, LinearSpec] = {
    "two fused parts": _BASE,
    "with a bias": evolve(_BASE, bias=True),
    "a head": evolve(_BASE, parts=(512,), kind=LinearKind.LM_HEAD),
    "an embedding": evolve(_BASE, parts=(512,), kind=LinearKind.EMBEDDING),
    "experts": evolve(_BASE, experts=3, kind=LinearKind.EXPERT),
}
_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}


def check_quantization(
    method: type[QuantizationMethod],
    *,
    platform: Platform | None = None,
    config: Mapping[str, Any] | None = None,
    fill: Fill | None = None,
) -> None:
    """Run the whole kit; `config` are the method's settings, its `EXAMPLE` if None.

    Raises AssertionError with what was expected.
    """
    assert method.name, "the method has no name"
    plain = CheckpointInfo(config={"architectures": ["Any"]})
    foreign = evolve(plain, quantization={"quant_method": "unheard_of"})
    assert not method.claims(foreign), "claims() takes a checkpoint of another method"
    assert method.claims(plain) is None or method.name == "none", (
        "claims() takes a checkpoint that is not quantized"
    )
    platform = platform or manager.current().load("platforms", "cpu")()
    given = method.EXAMPLE if config is None else config
    made = method(structure(given, method.Config, "kit"), platform, bind())
    held = 0
    for dtype in platform.dtypes:
        for what, base in _LAYERS.items():
            spec = evolve(base, dtype=dtype)
            reason = made.rejects(spec, platform) or made.declines(spec)
            assert reason is None or reason, f"rejects() gives an empty reason for {what}"
            if reason is None:
                held += 1
                _check_layer(made, spec, f"{what} in {dtype}", fill or _random)
    assert held, f"{method.name} rejects every kind of layer on {platform.name}"


def _check_layer(method: QuantizationMethod, spec: LinearSpec, what: str, fill: Fill) -> None:
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    device = method.platform.device
    layer = torch.nn.Module()
    for name, param in method.create(spec).items():
        if param.optional and fill is _random:
            layer.register_parameter(name, None)
            continue
        tensor = fill(spec, name, param).to(device)
        assert tuple(tensor.shape) == param.shape(spec), f"{what}: fill() gave {name} another shape"
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    method.finish(layer, spec)
    try:
        weight = method.dequantize(layer, spec).float()
    except UnsupportedError:
        return
    expected_shape = (*((spec.experts,) if spec.experts else ()), spec.outputs, spec.inputs)
    assert tuple(weight.shape) == expected_shape, f"{what}: dequantize() gives {weight.shape}"
    if spec.kind is LinearKind.EMBEDDING:
        ids = torch.tensor([0, 5, 5, 511], device=device)
        _close(method.embed(layer, ids), weight[ids], spec.dtype, f"{what}: embed()")
        return
    x = torch.randn(9, spec.inputs, device=device, dtype=dtype)
    if spec.experts:
        stack: Any = method.experts(layer)
        for expert in range(spec.experts):
            found = stack[expert].float()
            _close(found, weight[expert], spec.dtype, f"{what}: experts()[{expert}]")
        return
    bias = torch.randn(spec.outputs, device=device, dtype=dtype) if spec.bias else None
    # Random codes may be weights of any size, and float16 ends at 65,504.
    x *= min(1.0, 1e4 / max((x.float() @ weight.T).abs().max().item(), 1e-6))
    expected = x.float() @ weight.T + (0.0 if bias is None else bias.float())
    for rows in (9, 1):
        found = method.apply(layer, x[:rows], bias)
        assert found.dtype == dtype, f"{what}: apply() gives {found.dtype}"
        _close(found, expected[:rows], spec.dtype, f"{what}: apply() on {rows} rows")


def _random(spec: LinearSpec, name: str, param: ParamSpec) -> Tensor:
    """Small normal numbers; scales are positive, whole numbers are any bits.

    Scales in bytes are exponents of 2 plus 127, as in microscaling formats.
    """
    dtype: torch.dtype = getattr(torch, param.dtype)
    if dtype is torch.uint8 and "scale" in name:
        return torch.randint(120, 130, param.shape(spec), dtype=dtype)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, param.shape(spec), dtype=dtype)
    size = float(spec.inputs**-0.5)
    if "scale" in name:  # far from 0: some are divided by
        return (size * (torch.rand(param.shape(spec)) + 0.5)).to(dtype)
    return (size * torch.randn(param.shape(spec))).to(dtype)


def _close(found: Tensor, expected: Tensor, dtype: str, what: str) -> None:
    worst = (found.float() - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
    assert worst <= _TOLERANCE[dtype], f"{what}: differs from the plain product by {worst:.2g}"
