"""Checksums of a worker's weights, to verify updates, and a reset of the weights to zero.

What counts as a weight is what loading has put into the model's modules, in the form that it has
there: fused, sharded and quantized.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modulm.errors import EngineError
from modulm_weight_transfer.blank import blank_parts
from modulm_weight_transfer.elsewhere import moved_weights_of
from modulm_weight_transfer.refill import loaded_memory, modules_of, named_tensors

if TYPE_CHECKING:
    from modulm.engine.worker.worker import Worker

__all__ = ["weight_checksums", "zero_weights"]


def weight_checksums(worker: Worker) -> dict[str, str]:
    """Return the SHA-256 of each weight's bytes, in hexadecimal, by its name in this worker.

    Steps wait for it. Raises EngineError while the weights are released, UnsupportedError for
    models that load themselves.
    """
    parallel, world = worker.config.parallel, worker.mesh.world
    prefix = f"dp{parallel.data_parallel_rank_local}:rank{world.rank}:"
    return {prefix + name: _digest(tensor) for name, tensor in _weights(worker)}


@torch.inference_mode()
def zero_weights(worker: Worker) -> None:
    """Set all weights to zero, so that a complete update can be told from a partial one."""
    for _, tensor in _weights(worker):
        tensor.zero_()
    if (moved := moved_weights_of(worker.model)) is not None:
        moved.store()


def _weights(worker: Worker) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a worker's model, each once, by the names of its modules."""
    if worker.loaded is None:
        raise EngineError("the worker has released its weights: wake it up first")
    _, built = blank_parts(worker)
    moved = moved_weights_of(worker.loaded.model)
    seen: set[int] = set()
    for unit, running in zip(built.shared.units, worker.loaded.units, strict=True):
        if moved is not None:
            moved.fetch(running)
        pairs = zip(
            modules_of(unit.module, unit.finish),
            modules_of(running.module, running.finish),
            strict=True,
        )
        for number, (blank, module) in enumerate(pairs):
            path = f"{running.path}.{number}" if number else running.path
            loaded = loaded_memory(blank, module)
            for name, tensor in named_tensors(module):
                address = tensor.data_ptr()
                if address in loaded and address not in seen and tensor.numel():
                    seen.add(address)
                    yield f"{path}.{name}", tensor


def _digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's values, in the order of its dimensions."""
    values = tensor.detach()
    values = values if values.layout is torch.strided else values.to_dense()
    data = values.cpu().contiguous().reshape(-1).view(torch.uint8)
    octets: Any = data.numpy()
    return hashlib.sha256(memoryview(octets)).hexdigest()
