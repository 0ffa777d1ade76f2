"""Bytes of the tensors that objects hold, each memory counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import field, mutable
from torch import Tensor
from torch.nn import Module

__all__ = ["HeldMemory", "tensors_of"]

#: Large buffers of packed weights are aligned to pages of this size, in areas with one more page,
#: which is never touched.
_HUGE_PAGE = 2 << 20
#: Attributes of modules that are shared by the model, or that describe a layer.
_SHARED = frozenset(
    {
        "method", "ops", "spec", "platform", "config", "backend", "group", "reduce", "build",
        "shared", "mesh",
    }
)  # fmt: skip
_PLAIN = (str, bytes, int, float, bool, torch.dtype, torch.device, type)
#: How deep objects are searched: a layer holds packed parts, which hold tensors or codes.
_DEPTH = 6


@mutable(eq=False)
class HeldMemory:
    """Adds up the memory of tensors. Tensors that share memory count once."""

    _storages: dict[int, int] = field(factory=dict)
    _aligned: set[int] = field(factory=set)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors; those on the meta device have no memory."""
        for tensor in tensors:
            if tensor.is_meta:
                continue
            try:
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr(), storage.nbytes()
            except (NotImplementedError, RuntimeError):  # opaque layouts of oneDNN
                place, size = id(tensor), tensor.numel() * tensor.element_size()
            if size - _HUGE_PAGE == tensor.nbytes >= _HUGE_PAGE:
                self._aligned.add(place)
            self._storages[place] = size

    @property
    def bytes(self) -> int:
        """Bytes of all tensors so far."""
        return sum(self._storages.values()) - _HUGE_PAGE * len(self._aligned)


def tensors_of(root: object, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors that an object holds itself: those of a module without its submodules."""
    if isinstance(root, Tensor):
        yield root
    elif isinstance(root, Module):
        own = {name: value for name, value in vars(root).items() if name not in _SHARED}
        own.pop("_modules", None)
        yield from _within(own.values(), depth)
    elif isinstance(root, Mapping):
        yield from _within(root.values(), depth)
    elif isinstance(root, list | tuple | set | frozenset):
        yield from _within(root, depth)
    elif not isinstance(root, _PLAIN) and not callable(root):
        yield from _within(_attributes(root), depth)


def _within(values: Iterable[object], depth: int) -> Iterator[Tensor]:
    if depth:
        for value in values:
            if not isinstance(value, Module):
                yield from tensors_of(value, depth - 1)


def _attributes(value: object) -> list[Any]:
    """Return the attributes of a value with `__dict__` or `__slots__`."""
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    names += list(getattr(value, "__dict__", ()))
    return [getattr(value, name, None) for name in names if name not in _SHARED]
