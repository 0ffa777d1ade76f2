"""Give a module the weights of another one, in the memory that it has.

Recorded steps hold the addresses of weights, so new numbers go where the old ones lay. Where that
cannot be (another shape, a number that Python code has read) the new value takes the old one's
place, and recordings must be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["Baseline", "modules_of", "refill"]

_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
_SCALARS = (int, float, str, bool, bytes, torch.dtype, torch.device)
#: How deep values are looked into: a layer's parts, their codes, tensors of these.
_DEEP = 6


def modules_of(module: Module, finish: Callable[[], None] | None) -> list[Module]:
    """A module and those that the function which finishes it is bound to, or is given."""
    found: list[Module] = [module]
    open_values: list[Any] = [finish]
    while open_values:
        value = open_values.pop()
        if isinstance(value, Module):
            found.append(value)
        elif isinstance(value, partial):
            open_values += [*reversed(value.args), *value.keywords.values(), value.func]
        elif isinstance(value, MethodType):
            open_values.append(value.__self__)
        elif isinstance(value, FunctionType) and value.__closure__:
            open_values += [cell.cell_contents for cell in value.__closure__]
    return list({id(each): each for each in found}.values())


class Baseline:
    """The values of a module as it was built, to tell later which were set by loading it."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._values = {table: dict(values) for table, values in _tables(module).items()}

    def changes(self) -> list[tuple[str, str, Any]]:
        """The values that are other ones now: which table they are in, their names, the values."""
        return [
            (table, name, value)
            for table, values in _tables(self.module).items()
            for name, value in values.items()
            if name not in self._values[table] or self._values[table][name] is not value
        ]

    def restore(self, table: str, name: str) -> None:
        """Set a value back to what it was, which gives its memory back."""
        if name in self._values[table]:
            _tables(self.module)[table][name] = self._values[table][name]
        else:
            del _tables(self.module)[table][name]


def refill(module: Module, table: str, name: str, value: Any) -> bool:
    """Set a value of `Baseline.changes` in another module of the same kind; whether in place."""
    values = _tables(module)[table]
    old = values.get(name)
    if old is value:
        return True
    pairs: list[tuple[Tensor, Tensor]] = []
    scalars: list[tuple[Any, Any]] = []
    if name in values and _matches(old, value, pairs, scalars, set(), _DEEP):
        moved = {new.data_ptr(): held.data_ptr() for held, new in pairs}
        if all(before == moved.get(after, after) for before, after in scalars):
            for held, new in pairs:
                held.copy_(new)
            return True
    values[name] = value
    return False


def _tables(module: Module) -> dict[str, dict[str, Any]]:
    """Parameters, buffers, and all else that a module holds but other modules."""
    return {
        "_parameters": module._parameters,
        "_buffers": module._buffers,
        "__dict__": _Attributes(module.__dict__),
    }


class _Attributes(dict[str, Any]):
    """A module's own attributes; changes reach the module."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__(
            {
                name: value
                for name, value in attributes.items()
                if name not in _OWN and not isinstance(value, Module)
            }
        )
        self._attributes = attributes

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._attributes[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._attributes[name]


_OWN = frozenset(torch.nn.Module().__dict__)


def _matches(
    old: Any,
    new: Any,
    pairs: list[tuple[Tensor, Tensor]],
    scalars: list[tuple[Any, Any]],
    seen: set[int],
    deep: int,
) -> bool:
    """Whether two values have the same form; collects their tensors and numbers."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        pairs.append((old, new))
        return (old.shape, old.dtype, old.device, old.layout) == (
            new.shape, new.dtype, new.device, new.layout,
        ) and old.stride() == new.stride()  # fmt: skip
    if isinstance(old, _FUNCTIONS) and isinstance(new, _FUNCTIONS):
        return True
    if type(old) is not type(new) or deep == 0:
        return False
    if old is None or id(old) in seen:
        return True
    if isinstance(old, _SCALARS):
        scalars.append((old, new))
        return True
    seen.add(id(old))
    if isinstance(old, list | tuple):
        fields = [(each, other) for each, other in zip(old, new, strict=False)]
        if len(old) != len(new):
            return False
    else:
        before, after = _fields(old), _fields(new)
        if before.keys() != after.keys():
            return False
        fields = [(value, after[key]) for key, value in before.items()]
    return all(_matches(*each, pairs, scalars, seen, deep - 1) for each in fields)


def _fields(value: Any) -> Mapping[Any, Any]:
    """The fields of a mapping or of an object."""
    if isinstance(value, Mapping):
        return value
    slots = [
        name
        for kind in type(value).__mro__
        for name in _names(getattr(kind, "__slots__", ()))
        if not name.startswith("__")
    ]
    fields = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **fields}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
