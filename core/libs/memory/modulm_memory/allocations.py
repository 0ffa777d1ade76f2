"""Records how much memory torch's tensors use while code runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Allocations"]


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the tensors that torch allocates within a `with` statement, in its thread.

    live: bytes of these tensors after each operation. Memory that kernels allocate themselves does
    not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: list[int] = []
        self._live: dict[int, tuple[Any, int]] = {}
        # References keep the addresses of freed storages from being used again.
        self._older: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the default imports torch's compiler, which takes a second."""
        return False

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return max(self.live, default=0)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count its results, unless they are views of older tensors."""
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._live and storage._cdata not in self._older:
                self._older[storage._cdata] = _reference(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._older:
                self._live[storage._cdata] = (_reference(storage), storage.nbytes())
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.live.append(sum(size for _, size in self._live.values()))
        return result


def _reference(storage: torch.UntypedStorage) -> Any:
    """Return a weak reference to a storage."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()
