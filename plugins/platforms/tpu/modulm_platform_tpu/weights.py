"""Move a model's tensors to the device, wherever its modules hold them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import Module, Parameter

from modulm.contracts.attention import AttentionBackend
from modulm.contracts.platform import Platform
from modulm_kernels_pallas.bridge import array_of, is_array, tensor_of

__all__ = ["move_weights"]

#: Objects that hold no weights, or hold the engine.
_SKIPPED = (str, bytes, type, torch.dtype, torch.device, AttentionBackend, Platform)
_PACKAGES = ("modulm",)


def move_weights(model: Module) -> list[Any]:
    """Replace every tensor of the model by one on the device; return these, each once.

    Tensors that modules share stay shared. The copies on the host are freed.
    """
    mover = _Mover()
    mover.walk(model)
    return mover.moved


class _Mover:
    def __init__(self) -> None:
        self.moved: list[Any] = []
        self._by_id: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}

    def walk(self, value: Any) -> Any:
        """Return what replaces a value: itself, changed in place if possible."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if value is None or isinstance(value, _SKIPPED) or hasattr(value, "providers"):
            return value
        if id(value) in self._seen:
            return value
        if isinstance(value, Module | list | dict | tuple | partial) or _is_ours(value):
            self._seen[id(value)] = value
            return self._container(value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if is_array(tensor):
            if id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self.moved.append(tensor)
            return tensor
        if id(tensor) not in self._by_id:
            made: Any = tensor_of(array_of(tensor))
            if isinstance(tensor, Parameter):
                made._is_param = True  # what torch asks of subclasses
            self.moved.append(made)
            self._by_id[id(tensor)] = made
            self._seen[id(tensor)] = tensor  # keeps its id from being reused
        return self._by_id[id(tensor)]

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self.walk(item)
        elif isinstance(value, list):
            value[:] = [self.walk(item) for item in value]
        elif isinstance(value, tuple):
            items = [self.walk(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        elif isinstance(value, partial):
            self.walk(list(value.args))
            self.walk(value.func)
        else:
            for name, item in _attributes(value):
                changed = self.walk(item)
                if changed is not item:
                    object.__setattr__(value, name, changed)
        return value


def _is_ours(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package.startswith(_PACKAGES) and not callable(getattr(value, "__wrapped__", None))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes of an object. Those of modules include the dicts of their parameters."""
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    slots = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    slots = [(name, item) for name, item in slots if name not in ("__weakref__", "__dict__")]
    return [*slots, *vars(value).items()] if hasattr(value, "__dict__") else slots
