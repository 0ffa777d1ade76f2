"""AWQ: activation-aware scaling of weights (Lin et al., arXiv 2306.00978).

Inputs of some layers come from a norm or another linear layer. Dividing that output and multiplying
the following weights by the same scales leaves the model unchanged and reduces rounding errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Linear, Module

from modulm.errors import UnsupportedError
from modulm_command_quantize.schemes import Scheme

__all__ = ["fold", "search", "sources"]

#: Name suffixes: producer of the inputs -> the layers that consume them.
_PAIRS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
_STEPS = 20


def sources(layer: Module, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Find the modules of a decoder layer that can be scaled -> the consumers among `names`.

    Raises UnsupportedError for a layer with another structure.
    """
    modules = dict(layer.named_modules())
    result = {}
    for source, takers in _PAIRS:
        if source not in modules or any(taker not in names for taker in takers):
            raise UnsupportedError(
                f"awq: a layer with {source} before {', '.join(takers)} is needed; this one has "
                f"{', '.join(names)}: use --method gptq"
            )
        weight = getattr(modules[source], "weight", None)
        inputs = modules[takers[0]].get_parameter("weight").shape[1]
        if weight is not None and weight.shape[0] == inputs:
            result[source] = takers
    return result


def search(weights: Sequence[Tensor], hessian: Tensor, magnitude: Tensor, scheme: Scheme) -> Tensor:
    """Search the scales [K], for inputs of mean magnitude `magnitude` [K], that change the layers'
    outputs least, over exponents of the magnitude. hessian: as for GPTQ.
    """
    best, chosen = torch.inf, torch.ones_like(magnitude)
    for step in range(_STEPS):
        scales = magnitude.clamp(min=1e-4) ** (step / _STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = 0.0
        for weight in weights:
            wide = weight.float() * scales
            grid = scheme.grid(wide)
            rest = grid.weight(grid.codes(wide)) / scales - weight.float()
            error += float(((rest @ hessian) * rest).sum())
        if error < best:
            best, chosen = error, scales
    return chosen


def fold(layer: Module, source: str, takers: Sequence[str], scales: Tensor) -> None:
    """Divide the output of `source` by the scales and multiply the weights that consume it."""
    modules: Mapping[str, Module] = dict(layer.named_modules())
    before = modules[source]
    with torch.no_grad():
        weight = before.get_parameter("weight")
        weight.div_(scales[:, None] if isinstance(before, Linear) else scales)
        bias = before._parameters.get("bias")
        if bias is not None:
            bias.div_(scales)
        for taker in takers:
            modules[taker].get_parameter("weight").mul_(scales)
