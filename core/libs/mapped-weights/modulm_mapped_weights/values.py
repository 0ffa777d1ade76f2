"""Values of loaded modules as plain data and arrays, and back.

Tensors, numbers, names, None, lists, tuples and mappings of these are described; of other objects
those of attrs classes, and those with a method `fields`, which returns the arguments that their
class is created with. What several modules share is described once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from modulm_mapped_weights.file import Array, InvalidFile, Mapped

__all__ = ["Describer", "Restorer", "Undescribable"]

_PLAIN = (bool, int, float, str, type(None))


class Undescribable(Exception):
    """A value of a type that cannot be described."""


class Describer:
    """Describes values. `values` has what they refer to by number.

    add: writes a tensor.
    """

    def __init__(self, add: Callable[[Tensor], Array]) -> None:
        self._add = add
        self.values: list[Any] = []
        #: By id, numbers of described values, which `_held` keeps alive.
        self._numbers: dict[int, int] = {}
        self._arrays: dict[tuple[Any, ...], Array] = {}
        self._held: list[Any] = []

    def describe(self, value: Any) -> Any:
        """Return a value as JSON data. Raises Undescribable."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return {type(value).__name__: [self.describe(each) for each in value]}
        if isinstance(value, dict):
            return {"dict": [[self.describe(k), self.describe(v)] for k, v in value.items()]}
        if id(value) not in self._numbers:
            described = self._referred(value)
            self._numbers[id(value)] = len(self.values)
            self._held.append(value)
            self.values.append(described)
        return {"value": self._numbers[id(value)]}

    def replace(self, made: Mapping[int, Any]) -> None:
        """Forget the values described so far. made: by number, what has replaced all of them."""
        self._held.clear()
        self._arrays.clear()
        self._numbers = {id(value): number for number, value in made.items()}

    def _referred(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            if value.layout != torch.strided or kind not in (Tensor, torch.nn.Parameter):
                raise Undescribable(f"a tensor of {kind.__name__}")
            place = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if place not in self._arrays:
                self._arrays[place] = self._add(value)
            return {"tensor": self._arrays[place], "parameter": kind is torch.nn.Parameter}
        fields = _fields(value)
        if fields is None:
            raise Undescribable(f"{kind.__module__}.{kind.__qualname__}")
        described = {name: self.describe(field) for name, field in fields.items()}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": described}


class Restorer:
    """Makes values out of descriptions.

    mapped: has the arrays of the values to be made. made: by number, those made so far.
    """

    def __init__(self, values: list[Any], mapped: Mapped | None = None) -> None:
        self._values, self.mapped = values, mapped
        self.made: dict[int, Any] = {}

    def restore(self, described: Any) -> Any:
        """Return the value. Raises InvalidFile."""
        if isinstance(described, _PLAIN):
            return described
        ((kind, content),) = described.items()
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "list":
            return [self.restore(each) for each in content]
        if kind == "tuple":
            return tuple(self.restore(each) for each in content)
        if kind == "dict":
            return {self.restore(key): self.restore(value) for key, value in content}
        if content not in self.made:
            self.made[content] = self._make(self._values[content])
        return self.made[content]

    def _make(self, described: Any) -> Any:
        if "tensor" in described:
            if self.mapped is None:
                raise InvalidFile("has no arrays")
            tensor = self.mapped.tensor(described["tensor"])
            if described["parameter"]:
                return torch.nn.Parameter(tensor, requires_grad=False)
            return tensor
        module, _, name = described["class"].partition(":")
        kind = getattr(sys.modules.get(module), name, None)  # nothing is imported for a file
        if not isinstance(kind, type) or not (attrs.has(kind) or hasattr(kind, "fields")):
            raise InvalidFile(f"has values of the unknown class {described['class']}")
        fields = {key: self.restore(value) for key, value in described["fields"].items()}
        return kind(**fields)


def _fields(value: Any) -> Mapping[str, Any] | None:
    """Return the arguments that an object's class is created with; None if they are unknown."""
    kind = type(value)
    if attrs.has(kind):
        return {each.alias: getattr(value, each.name) for each in attrs.fields(kind) if each.init}
    fields = getattr(value, "fields", None)
    return fields() if callable(fields) else None
