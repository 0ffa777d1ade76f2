"""The contract kit for quantization methods.

    from modulm.testing.quantization import check_quantization

    def test_contract():
        check_quantization(MyMethod)

For each kind of layer that the method supports, a layer is created, filled with random numbers in
the shapes of `create`, finished and applied; the oracle is a plain product with the result of
`dequantize`. If plain weights have a `writer`, half of them are overwritten first. Optional
parameters are omitted, as by a checkpoint that lacks them. If random numbers are not valid, pass
`fill`, which is called for every parameter.
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
    """Run the kit. config: the method's settings, its `EXAMPLE` if None.

    Raises AssertionError with what was expected.
    """
    assert method.name, "the method has no name"
    plain = CheckpointInfo(config={"architectures": ["Any"]})
    foreign = evolve(plain, quantization={"quant_method": "unheard_of"})
    assert not method.claims(foreign), "claims() accepts a checkpoint of another method"
    assert method.claims(plain) is None or method.name == "none", (
        "claims() accepts a checkpoint that is not quantized"
    )
    platform = platform or manager.current().load("platforms", "cpu")()
    settings = method.EXAMPLE if config is None else config
    instance = method(structure(settings, method.Config, "kit"), platform, bind())
    supported = 0
    for dtype in platform.dtypes:
        for what, base in _LAYERS.items():
            spec = evolve(base, dtype=dtype)
            reason = instance.rejects(spec, platform) or instance.declines(spec)
            assert reason is None or reason, f"rejects() gives an empty reason for {what}"
            if reason is None:
                supported += 1
                _check_layer(instance, spec, f"{what} in {dtype}", fill or _random)
    assert supported, f"{method.name} rejects every kind of layer on {platform.name}"


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
    _overwrite(method, layer, spec, weight, what)
    if spec.kind is LinearKind.EMBEDDING:
        ids = torch.tensor([0, 5, 5, 511], device=device)
        _close(method.embed(layer, ids), weight[ids], spec.dtype, f"{what}: embed()")
        return
    x = torch.randn(9, spec.inputs, device=device, dtype=dtype)
    if spec.experts:
        stack: Any = method.experts(layer)
        for expert in range(spec.experts):
            result = stack[expert].float()
            _close(result, weight[expert], spec.dtype, f"{what}: experts()[{expert}]")
        return
    bias = torch.randn(spec.outputs, device=device, dtype=dtype) if spec.bias else None
    # Random codes may give large weights, and float16 ends at 65,504.
    x *= min(1.0, 1e4 / max((x.float() @ weight.T).abs().max().item(), 1e-6))
    expected = x.float() @ weight.T + (0.0 if bias is None else bias.float())
    for rows in (9, 1):
        result = method.apply(layer, x[:rows], bias)
        assert result.dtype == dtype, f"{what}: apply() gives {result.dtype}"
        _close(result, expected[:rows], spec.dtype, f"{what}: apply() on {rows} rows")


def _overwrite(
    method: QuantizationMethod, layer: torch.nn.Module, spec: LinearSpec, weight: Tensor, what: str
) -> None:
    """Overwrite the first rows of plain weights, and some values of others; changes `weight`."""
    stored, write = method.create(spec).get("weight"), method.writer(layer, spec, "weight")
    if write is None or stored is None or stored.dtype != spec.dtype:
        return
    half = spec.outputs // 2
    for sparse, rows in ((False, slice(0, half)), (True, slice(half, spec.outputs))):
        region = (*(slice(None),) * bool(spec.experts), rows, slice(None))
        values = weight[region] / 2
        if sparse:
            values[..., ::3] = torch.nan
        weight[region] = values.where(~values.isnan(), weight[region])
        write(region, values.to(getattr(torch, spec.dtype)), sparse=sparse)
    result = method.dequantize(layer, spec).float()
    _close(result, weight, spec.dtype, f"{what}: dequantize() after writer()")


def _random(spec: LinearSpec, name: str, param: ParamSpec) -> Tensor:
    """Return small normal numbers; scales are positive, integers are random bits.

    Scales in bytes are exponents of 2 plus 127, as in microscaling formats.
    """
    dtype: torch.dtype = getattr(torch, param.dtype)
    if dtype is torch.uint8 and "scale" in name:
        return torch.randint(120, 130, param.shape(spec), dtype=dtype)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, param.shape(spec), dtype=dtype)
    size = float(spec.inputs**-0.5)
    if "scale" in name:  # far from 0, since some divide
        return (size * (torch.rand(param.shape(spec)) + 0.5)).to(dtype)
    return (size * torch.randn(param.shape(spec))).to(dtype)


def _close(actual: Tensor, expected: Tensor, dtype: str, what: str) -> None:
    worst = (actual.float() - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
    assert worst <= _TOLERANCE[dtype], f"{what}: differs from the plain product by {worst:.2g}"
