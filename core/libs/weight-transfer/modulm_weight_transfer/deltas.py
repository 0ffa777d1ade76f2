"""Updates of changed values only: flat indices and values of each tensor.

A delta comes as two tensors, `NAME.indices` (integers, flat, no one twice) and `NAME.values`, and
`update_info` has its shape: `{"deltas": {NAME: [rows, columns]}}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modulm.contracts.loader import StoredTensor
from modulm.errors import RequestError
from modulm_weight_transfer.finite import check_finite

if TYPE_CHECKING:
    from modulm_weight_transfer.contract import TensorSource

__all__ = ["DeltaSource", "changed_values"]

_INDICES, _VALUES = ".indices", ".values"
_FLOATS = ("bfloat16", "float16", "float32")


def changed_values(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the differences of two checkpoints: tensors for a backend, and the table `deltas`.

    Tensors without a change are left out. Raises ValueError if names, shapes or dtypes differ.
    """
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    if before.keys() != after.keys():
        raise ValueError("the checkpoints have different names")
    for name, new in after.items():
        old = before[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(f"{name}: shapes or dtypes differ")
        flat = new.detach().reshape(-1)
        indices = (flat != old.detach().reshape(-1)).nonzero().view(-1)
        if indices.numel():
            tensors[name + _INDICES], tensors[name + _VALUES] = indices, flat[indices]
            shapes[name] = list(new.shape)
    return tensors, shapes


class DeltaSource:
    """The tensors of an update, in which deltas are tensors with NaN where nothing changes.

    Only the tensor that is being read takes memory.
    """

    def __init__(self, source: TensorSource, deltas: Any) -> None:
        """deltas: of `update_info`. Raises RequestError."""
        self._source, self._shapes = source, _shapes(deltas)
        stored = dict(source.index())
        self._index: dict[str, StoredTensor] = {}
        for name, shape in self._shapes.items():
            indices, values = stored.pop(name + _INDICES, None), stored.pop(name + _VALUES, None)
            if indices is None or values is None:
                raise _refusal(f"{name}: a delta needs {name}{_INDICES} and {name}{_VALUES}")
            if indices.dtype not in ("int32", "int64") or values.dtype not in _FLOATS:
                raise _refusal(f"{name}: indices must be int32 or int64, values floats")
            if len(indices.shape) != 1 or indices.shape != values.shape:
                raise _refusal(f"{name}: indices and values must be one-dimensional, of one length")
            size = prod(shape) * getattr(torch, values.dtype).itemsize
            self._index[name] = StoredTensor(name, shape, values.dtype, values.file, size)
        self._index = stored | self._index

    @property
    def sparse(self) -> frozenset[str]:
        """The names of the deltas."""
        return frozenset(self._shapes)

    def index(self) -> Mapping[str, StoredTensor]:
        return self._index

    def read(self) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, Tensor] = {}
        for stored, tensor in self._source.read():
            name = stored.removesuffix(_INDICES).removesuffix(_VALUES)
            if name == stored or name not in self._shapes:
                yield stored, tensor
                continue
            other = waiting.pop(name, None)
            if other is None:
                waiting[name] = tensor
                continue
            pair = (tensor, other) if stored.endswith(_INDICES) else (other, tensor)
            yield name, self._expand(name, *pair)

    def _expand(self, name: str, indices: Tensor, values: Tensor) -> Tensor:
        shape = self._shapes[name]
        _check_indices(name, indices, prod(shape))
        check_finite(name + _VALUES, values)
        whole = torch.full((prod(shape),), torch.nan, dtype=values.dtype)
        whole[indices.long()] = values
        return whole.view(shape)

    def check(self) -> None:
        """Check all indices. Raises RequestError naming a tensor."""
        for stored, tensor in self._source.read():
            name = stored.removesuffix(_INDICES)
            if name != stored and name in self._shapes:
                _check_indices(name, tensor, prod(self._shapes[name]))

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as they were sent."""
        return self._source.read()

    def close(self) -> None:
        self._source.close()


def _check_indices(name: str, indices: Tensor, size: int) -> None:
    if not indices.numel():
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= size:
        raise _refusal(f"{name}: index {low if low < 0 else high} is outside the {size} values")
    if bool(indices.sort().values.diff().eq(0).any()):
        raise _refusal(f"{name}: an index occurs twice")


def _shapes(deltas: Any) -> dict[str, tuple[int, ...]]:
    """Read the table of shapes. Raises RequestError."""
    if not isinstance(deltas, Mapping):
        raise _refusal("deltas must be a table of names and shapes")
    for name, shape in deltas.items():
        if not isinstance(shape, list | tuple) or not all(
            type(size) is int and 0 <= size < 1 << 40 for size in shape
        ):
            raise _refusal(f"{name}: the shape of a delta must be a list of sizes")
    return {name: tuple(shape) for name, shape in deltas.items()}


def _refusal(message: str) -> RequestError:
    return RequestError(message, "deltas")
