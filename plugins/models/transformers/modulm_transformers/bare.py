"""Creates models of transformers without memory for their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.nn import Module, Parameter

from modulm.errors import UnsupportedError
from modulm.nn import Linear, RMSNorm
from modulm.nn.weight_slots import Part, Slot, Unit
from modulm_transformers.config import TransformersConfig
from modulm_transformers.load import explained

__all__ = ["bare_model", "declare_weights", "dummy_weights"]


def bare_model(config: TransformersConfig, dtype: torch.dtype, attention: str | None) -> Any:
    """The library's model: parameters on the meta device, buffers computed on the CPU."""
    from transformers.initialization import no_init_weights

    name = config.model.__name__
    more = {} if attention is None else {"attn_implementation": attention}
    with (
        explained(f"{name}: transformers cannot build it"),
        torch.device("cpu"),
        no_init_weights(),
        _parameters_on_meta(),
    ):
        model = config.model._from_config(deepcopy(config.settings), dtype=dtype, **more)
        model.tie_weights()
    return model.eval().requires_grad_(False)


def declare_weights(config: TransformersConfig, shared: Any) -> None:
    """Record the weights that the library will load, so that their memory can be estimated.

    shared: the builder's state, to which units are added.
    """
    try:
        whole = bare_model(config, shared.dtype, None)
    except UnsupportedError:  # refused when it is loaded
        return
    declared: set[int] = set()
    for path, module in whole.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in declared:
                continue
            declared.add(id(parameter))
            full, shape = f"{path}.{name}" if path else name, tuple(parameter.shape)
            slot = Slot(module, name, shape, parameter.dtype, ((Part(full, shape),),))
            shared.units.append(Unit(full, module, [slot]))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it."""
    register = Module.register_parameter

    def without_memory(module: Module, name: str, parameter: Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            blank = Parameter(parameter.detach().to("meta"), requires_grad=False)
            module._parameters[name] = blank

    Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def dummy_weights(model: Module) -> Iterator[None]:
    """Give parameters on the meta device zeros within this context, whose memory is never touched
    unless the model reads it.
    """
    blanks = []
    for module in model.modules():
        if isinstance(module, Linear | RMSNorm):  # ours, which wait for their weights
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                blanks.append((module, name, parameter))
    zeros: dict[int, Parameter] = {}
    for module, name, parameter in blanks:
        if id(parameter) not in zeros:
            memory = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
            zeros[id(parameter)] = Parameter(memory, requires_grad=False)
        module._parameters[name] = zeros[id(parameter)]
    try:
        yield
    finally:
        for module, name, parameter in blanks:
            module._parameters[name] = parameter
