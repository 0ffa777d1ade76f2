"""Layers that sentence-transformers applies after pooling, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm.errors import CheckpointError, UnsupportedError
from modulm.plugins import current
from modulm.plugins.defaults import choose_loader
from modulm_hooks_pooling_recipes.files import read_object

__all__ = [
    "Dense",
    "Layer",
    "LayerNorm",
    "read_dense",
    "read_norm",
    "read_normalize",
    "read_pickled",
    "read_projection",
]

#: [n, inputs] -> [n, outputs].
Layer: TypeAlias = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Layer] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


@frozen(eq=False)
class Dense:
    """A linear layer and an activation. weight: [outputs, inputs]; bias: [outputs]."""

    weight: Tensor
    bias: Tensor | None
    act: Layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.act(F.linear(x.float(), self.weight, self.bias))


@frozen(eq=False)
class LayerNorm:
    """Layer normalization. weight, bias: [inputs]."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias)


def read_dense(folder: Path, device: torch.device) -> Dense:
    """Read a Dense module. Raises CheckpointError or UnsupportedError naming the file."""
    file = folder / "config.json"
    table = read_object(file)
    name = str(table.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS or table.get("use_residual"):
        what = "use_residual" if table.get("use_residual") else f"activation_function {name}"
        raise UnsupportedError(f"{file}: {what}: not supported yet")
    tensors = _tensors(folder, device)
    weight = tensors.get("linear.weight")
    shape = (table.get("out_features"), table.get("in_features"))
    if weight is None or tuple(weight.shape) != shape:
        raise CheckpointError(f"{folder}: linear.weight of shape {list(shape)} is required")
    return Dense(weight, tensors.get("linear.bias"), _ACTIVATIONS[name])


def read_norm(folder: Path, device: torch.device) -> LayerNorm:
    """Read a LayerNorm module. Raises CheckpointError naming the folder."""
    tensors = _tensors(folder, device)
    if not {"norm.weight", "norm.bias"} <= set(tensors):
        raise CheckpointError(f"{folder}: norm.weight and norm.bias are required")
    return LayerNorm(tensors["norm.weight"], tensors["norm.bias"])


def read_normalize(folder: Path, device: torch.device) -> Layer:
    """Return L2 normalization, for use between other layers; it has no files."""
    return lambda x: F.normalize(x.float(), dim=-1)


def read_projection(folder: Path, name: str, device: torch.device, act: str = "Identity") -> Dense:
    """Read a linear layer without bias from the model's weights.

    Raises CheckpointError naming the folder.
    """
    loader = choose_loader(current(), folder, None).driver(folder)
    weight = next((tensor for tensor_name, tensor in loader.read() if tensor_name == name), None)
    if weight is None:
        raise CheckpointError(f"{folder}: {name} is required")
    return Dense(weight.to(device, torch.float32), None, _ACTIVATIONS[act])


def read_pickled(file: Path, device: torch.device) -> Dense:
    """Read a linear layer from a file of torch, without running code in it.

    Raises CheckpointError naming the file.
    """
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
        weight, bias = (stored[name].to(device, torch.float32) for name in ("weight", "bias"))
    except (OSError, RuntimeError, KeyError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    return Dense(weight, bias, _ACTIVATIONS["Identity"])


def _tensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    loader = choose_loader(current(), folder, None).driver(folder)
    return {name: tensor.to(device, torch.float32) for name, tensor in loader.read()}
