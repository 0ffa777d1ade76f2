"""Copy the weights of one module into the memory of another.

Recorded steps hold the addresses of weights, so values are copied in place. Where that is
impossible (another shape, or a number that Python code has read), the new value replaces the old
one and steps must be recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

__all__ = [
    "Baseline", "loaded_memory", "loaded_tensors", "modules_of", "named_tensors", "numbers_of",
    "refill", "set_value", "tensors_of",
]  # fmt: skip

_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
_SCALARS = (int, float, str, bool, bytes, torch.dtype, torch.device)
#: Maximum depth of inspected values: a layer's parts, their codes, tensors of these.
_DEEP = 6


def modules_of(module: Module, finish: Callable[[], None] | None) -> list[Module]:
    """Return a module and those that its finishing function is bound to or gets as arguments."""
    modules: list[Module] = [module]
    open_values: list[Any] = [finish]
    while open_values:
        value = open_values.pop()
        if isinstance(value, Module):
            modules.append(value)
        elif isinstance(value, partial):
            open_values += [*reversed(value.args), *value.keywords.values(), value.func]
        elif isinstance(value, MethodType):
            open_values.append(value.__self__)
        elif isinstance(value, FunctionType) and value.__closure__:
            open_values += [cell.cell_contents for cell in value.__closure__]
    return list({id(each): each for each in modules}.values())


class Baseline:
    """A module's values as it was built, to detect which ones loading has set."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._values = {table: dict(values) for table, values in _tables(module).items()}

    def changes(self) -> list[tuple[str, str, Any]]:
        """Return the changed values: (table, name, value)."""
        return [
            (table, name, value)
            for table, values in _tables(self.module).items()
            for name, value in values.items()
            if name not in self._values[table] or self._values[table][name] is not value
        ]

    def restore(self, table: str, name: str) -> None:
        """Restore a value, which frees the memory of the new one."""
        if name in self._values[table]:
            _tables(self.module)[table][name] = self._values[table][name]
        else:
            del _tables(self.module)[table][name]


def refill(module: Module, table: str, name: str, value: Any) -> bool:
    """Set a value of `Baseline.changes` in a module of the same kind; returns whether in place."""
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


def set_value(module: Module, table: str, name: str, value: Any) -> None:
    """Set a value of `Baseline.changes` in a module of the same kind."""
    _tables(module)[table][name] = value


def loaded_memory(blank: Module, module: Module) -> set[int]:
    """Return the addresses of tensors that loading has put into a module, or into its values.

    blank: the same module as it was built.
    """
    built = _tables(blank)
    return {
        tensor.data_ptr()
        for table, values in _tables(module).items()
        for name, value in values.items()
        if name not in built[table] or table != "__dict__"
        for tensor in _tensors(value, (), _DEEP)
    }


def loaded_tensors(module: Module, *omitted: type) -> Iterator[Tensor]:
    """Yield a module's tensors, and those of its values other than modules and `omitted` types."""
    for values in _tables(module).values():
        for value in values.values():
            yield from _tensors(value, omitted, _DEEP)


def named_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's tensors, and those of its values other than modules, by attribute; further
    ones of one attribute are numbered.
    """
    for values in _tables(module).values():
        for name, value in values.items():
            for number, tensor in enumerate(_tensors(value, (), _DEEP)):
                yield f"{name}.{number}" if number else name, tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value of `Baseline.changes`."""
    return _tensors(value, (), _DEEP)


def numbers_of(value: Any) -> Iterator[int]:
    """Yield the whole numbers in a value of `Baseline.changes`, for example addresses."""
    return _numbers(value, _DEEP)


def _numbers(value: Any, deep: int) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif deep and not isinstance(value, (*_FUNCTIONS, *_SCALARS, Tensor, Module, type(None))):
        for each in value if isinstance(value, list | tuple) else _fields(value).values():
            yield from _numbers(each, deep - 1)


def _tensors(value: Any, omitted: tuple[type, ...], deep: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif deep and not isinstance(value, (*_FUNCTIONS, *_SCALARS, *omitted, Module, type(None))):
        for each in value if isinstance(value, list | tuple) else _fields(value).values():
            yield from _tensors(each, omitted, deep - 1)


def _tables(module: Module) -> dict[str, dict[str, Any]]:
    """Parameters, buffers, and other attributes of a module except submodules."""
    return {
        "_parameters": module._parameters,
        "_buffers": module._buffers,
        "__dict__": _Attributes(module.__dict__),
    }


class _Attributes(dict[str, Any]):
    """A module's own attributes, as a dict that writes through to the module."""

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
    """Whether two values have the same structure; collects their tensors and numbers."""
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
