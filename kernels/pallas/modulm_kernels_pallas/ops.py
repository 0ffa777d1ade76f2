"""The kernels as ops on torch's tensors, called while a program is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from torch import Tensor

from modulm.errors import UnsupportedError
from modulm.ops import sampling_twins, twins
from modulm_kernels_pallas.bridge import array_of, is_array, tensor_of
from modulm_kernels_pallas.experts import group_rows, grouped_matmul, grouped_plain
from modulm_kernels_pallas.lora import add_lora
from modulm_kernels_pallas.recurrence import causal_conv, delta_rule, selective_scan
from modulm_kernels_pallas.spread import current_mesh

__all__ = ["OPS"]

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def pack_experts(weight: Tensor, parts: int = 1) -> Any:
    """The op `pack_experts`: the stack as it is."""
    return weight


def fused_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Any,
    down: Any,
    *,
    act: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The op `fused_experts`, with one product per tile of rows of the same expert."""
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)):
        raise UnsupportedError("quantization: experts as codes are not supported on TPUs yet")
    if not is_array(x):
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return twins.fused_experts(
            x, weights, ids, gate_up, down, act=act, alpha=alpha, limit=limit, **biases
        )
    alone = jax.default_backend() == "tpu" and current_mesh() is None
    multiply = grouped_matmul if alone else grouped_plain
    groups = group_rows(array_of(ids), gate_up.shape[0])

    def product(rows: jax.Array, stack: Tensor, bias: Tensor | None) -> jax.Array:
        out = multiply(rows, array_of(stack), groups)
        return out if bias is None else out + array_of(bias)[groups.experts][:, None]

    both = product(array_of(x)[groups.sources], gate_up, gate_up_bias)
    gate, up = jnp.split(both, 2, axis=-1)
    if act == "clamped_swiglu":
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
    else:
        inner = _ACTIVATIONS[act](gate) * up
    out = product(inner, down, down_bias)
    each = out.reshape(-1, out.shape[-1])[groups.places].astype(jnp.float32)
    total = (each * array_of(weights)[..., None]).sum(1)
    return tensor_of(total.astype(out.dtype))


def argmax(logits: Tensor) -> Tensor:
    """The op `argmax`, on the device unless something has moved the logits to the host."""
    on_device = getattr(logits, "argmax_on_device", None)
    if on_device is None or logits.on_host:
        return sampling_twins.argmax(logits)
    tokens: Tensor = on_device()
    return tokens


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """The op `sample`, on the device with fp32 sums unless something has moved the logits."""
    on_device = getattr(logits, "draw_on_device", None)
    numbers = temperature, top_k, top_p, min_p, uniform
    if on_device is None or logits.on_host:
        return sampling_twins.sample(logits, *numbers)
    tokens: Tensor = on_device(*numbers)
    return tokens


OPS: Mapping[str, Callable[..., Any]] = {
    "add_lora": add_lora,
    "argmax": argmax,
    "causal_conv": causal_conv,
    "delta_rule": delta_rule,
    "fused_experts": fused_experts,
    "pack_experts": pack_experts,
    "sample": sample,
    "selective_scan": selective_scan,
}
