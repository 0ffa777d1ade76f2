"""Weights of a sleeping worker in host memory (sleep level 1).

Tensors stay the objects that they are; only their memory on the device is released, and allocated
again when the worker wakes up. On CPUs weights are in host memory already and stay in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from modulm.contracts.quantization import QuantizationMethod
from modulm_weight_transfer.refill import loaded_tensors

if TYPE_CHECKING:
    from modulm.engine.worker.worker import Worker

__all__ = ["restore_weights", "suspend_weights"]

Storage = torch.UntypedStorage

#: By worker: released memory of its device, and the copies in host memory.
_SUSPENDED: WeakKeyDictionary[Worker, list[tuple[Storage, Storage]]] = WeakKeyDictionary()


def suspend_weights(worker: Worker) -> None:
    """Copy a worker's weights to host memory and release those of the device, if it has its own."""
    if not worker.platform.queued or worker.loaded is None or worker in _SUSPENDED:
        return
    worker.platform.synchronize()
    copies = []
    for storage in _storages(worker):
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        copies.append((storage, copy.copy_(storage, non_blocking=False)))
        storage.resize_(0)
    _SUSPENDED[worker] = copies
    worker.platform.empty_cache()


def restore_weights(worker: Worker) -> None:
    """Bring suspended weights back to the device; load them if they have been discarded."""
    for storage, copy in _SUSPENDED.pop(worker, ()):
        storage.resize_(copy.nbytes())
        storage.copy_(copy, non_blocking=False)
    worker.load()


def _storages(worker: Worker) -> Iterator[Storage]:
    """The memory of a model's weights, each once; only memory that can be released."""
    seen: set[int] = set()
    model: object = worker.model
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for tensor in loaded_tensors(module, QuantizationMethod):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage
