"""Move a model's tensors to the device, wherever its modules hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter

from modulm.contracts.attention import AttentionBackend
from modulm.contracts.platform import Platform
from modulm.contracts.quantization import LinearSpec
from modulm_kernels_pallas.bridge import array_of, is_array, tensor_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from modulm_platform_tpu.placement import Placement

__all__ = ["MovedWeights"]

#: Objects that hold no weights, or hold the engine.
_SKIPPED = (str, bytes, type, torch.dtype, torch.device, AttentionBackend, Platform)
_PACKAGES = ("modulm",)
#: Attributes of an adapter bank's wrappers, which hold the tensors of adapters.
_WRAPPER, _TABLE = ("step", "changes"), ("table", "spec")
#: Attribute of wrappers of norms: the norm, whose weights are the model's.
_NORM = "base"


class MovedWeights:
    """The tensors of a model on the device, each once; tensors that modules share stay shared.

    keep: whether the copies on the host stay, for parts of the model that run there. adapted: the
    wrappers of layers that adapters may change.
    """

    def __init__(self, model: Module, placement: Placement, *, keep: bool = False) -> None:
        self.tensors: list[Any] = []
        self.adapted: list[Any] = []
        self._placement, self._keep = placement, keep
        #: (container, key or name, on the host, on the device) of everything that was replaced.
        self._places: list[tuple[Any, Any, Any, Any]] = []
        self._by_id: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}
        self._specs: list[LinearSpec | None] = [None]
        self._walk(model)
        self._seen.clear()
        if not keep:
            self._by_id.clear()

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Let the modules hold the copies on the host."""
        for container, key, host, _ in self._places:
            _put(container, key, host)
        try:
            yield
        finally:
            for container, key, _, moved in self._places:
                _put(container, key, moved)

    def retain(self, used: Collection[int]) -> None:
        """Free the tensors on the device whose indices are not in `used`."""
        unused = {id(t) for index, t in enumerate(self.tensors) if index not in used}
        self.tensors = [tensor for tensor in self.tensors if id(tensor) not in unused]
        left = []
        for container, key, host, moved in self._places:
            if id(moved) in unused:
                _put(container, key, host)
            else:
                left.append((container, key, host, moved))
        self._places = left
        self._by_id.clear()

    def _walk(self, value: Any) -> Any:
        """Return what replaces a value: itself, changed in place if possible."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if value is None or isinstance(value, _SKIPPED) or hasattr(value, "providers"):
            return value
        if id(value) in self._seen:
            return value
        if _has(value, _WRAPPER):
            self._seen[id(value)] = value
            if _has(value, _TABLE):
                self.adapted.append(value)
            elif _has(value, (_NORM,)):
                self._walk(value.base)
            return value
        if isinstance(value, Module | list | dict | tuple | partial) or _is_ours(value):
            self._seen[id(value)] = value
            spec = getattr(value, "spec", None) if isinstance(value, Module) else None
            self._specs.append(spec if isinstance(spec, LinearSpec) else self._specs[-1])
            try:
                return self._container(value)
            finally:
                self._specs.pop()
        return value

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if is_array(tensor):
            if id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self.tensors.append(tensor)
            return tensor
        if id(tensor) not in self._by_id:
            made: Any = tensor_of(self._placement.weight(array_of(tensor), self._specs[-1]))
            if isinstance(tensor, Parameter):
                made._is_param = True  # what torch asks of subclasses
            self.tensors.append(made)
            self._by_id[id(tensor)] = made
            self._seen[id(tensor)] = tensor  # keeps its id from being reused
        return self._by_id[id(tensor)]

    def _replace(self, container: Any, key: Any, old: Any) -> None:
        new = self._walk(old)
        if new is not old:
            _put(container, key, new)
            if self._keep:
                self._places.append((container, key, old, new))

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items):
                self._replace(value, key, item)
        elif isinstance(value, tuple):
            items = [self._walk(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        elif isinstance(value, partial):
            self._walk(list(value.args))
            self._walk(value.func)
        else:
            for name, item in _attributes(value):
                self._replace(_Attributes(value), name, item)
        return value


class _Attributes:
    """The attributes of an object as a container of items."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)


def _put(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def _has(value: Any, names: tuple[str, ...]) -> bool:
    return _is_ours(value) and all(hasattr(value, name) for name in names)


def _is_ours(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package.startswith(_PACKAGES) and not callable(getattr(value, "__wrapped__", None))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes of an object. Those of modules include the dicts of their parameters."""
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    slots = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    slots = [(name, item) for name, item in slots if name not in ("__weakref__", "__dict__")]
    return [*slots, *vars(value).items()] if hasattr(value, "__dict__") else slots
