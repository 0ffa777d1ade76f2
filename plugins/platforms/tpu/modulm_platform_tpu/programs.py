"""Compile a model's forward pass and head: one program for each shape of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from attrs import evolve

from modulm.contracts.kernels import RecordedForward
from modulm.contracts.state import StatePlan
from modulm.errors import UnsupportedError
from modulm_kernels_pallas.bridge import array_of, numpy_of, tensor_of
from modulm_kernels_pallas.recurrence import ScanPlan
from modulm_kernels_pallas.torchax_import import torchax
from modulm_platform_tpu.compilations import COMPILATIONS
from modulm_platform_tpu.sizes import steps_of
from modulm_platform_tpu.tensors import DeviceTensor, Hidden, Logits
from modulm_platform_tpu.weights import move_weights

if TYPE_CHECKING:
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Batch
    from modulm.contracts.platform import StepSizes

__all__ = ["CompiledForward"]

log = logging.getLogger("modulm.tpu")


class CompiledForward(RecordedForward):
    """A model's forward pass as programs. Replaces the model's `logits` by programs as well.

    forward: the model's bound method. sizes: the sizes of steps, all of which `record` compiles.
    """

    def __init__(self, forward: Forward, sizes: StepSizes) -> None:
        self._forward, self._sizes = forward, sizes
        self._model: Any = getattr(forward, "__self__", None)
        if not isinstance(self._model, torch.nn.Module):
            raise UnsupportedError("device tpu: states of single layers are not supported yet")
        name = type(self._model).__name__
        if self._model.media:
            raise UnsupportedError(f"device tpu: {name}: images and audio are not supported yet")
        if not self._model.caches:
            raise UnsupportedError(f"device tpu: {name}: encoders are not supported yet")
        self._weights = move_weights(self._model)
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._head = jax.jit(self._run_head)
        self._model.logits = self._logits
        self._recorded = False

    @property
    def steps(self) -> Sequence[np.ndarray]:
        return steps_of(self._sizes)

    def padded(self, counts: np.ndarray) -> np.ndarray:
        return counts

    @property
    def memory(self) -> int:
        return 0

    def clear(self) -> None:
        self._programs.clear()
        self._head = jax.jit(self._run_head)

    def record(self, batch: Batch) -> None:
        """Compile the forward pass for this batch's shape, and what reads its result."""
        began, before = time.perf_counter(), COMPILATIONS.count
        hidden = self(batch)
        for size in self._sizes.samples:
            logits = self._logits(hidden[torch.zeros(size, dtype=torch.int64)])
            logits.argmax_on_device()
        log.info(
            "compiled a step of %d rows and %d tokens: %d programs in %.1f s",
            len(batch.query_starts) - 1, len(batch.tokens), COMPILATIONS.count - before,
            time.perf_counter() - began,
        )  # fmt: skip

    def __call__(self, batch: Batch) -> torch.Tensor:
        plans = (ScanPlan.of(p) if isinstance(p, StatePlan) else p for p in batch.plans)
        batch = evolve(batch, plans=tuple(plans))
        key = batch.key()
        if key is None or batch.adapters is not None:
            raise UnsupportedError(
                "device tpu: steps with embeddings, media, adapters or encoder inputs are not "
                "supported yet"
            )
        tensors = [numpy_of(tensor) for tensor in batch.tensors()]
        tables = [numpy_of(table) for table in batch.tables()]
        key = key, tuple(array.shape for array in (*tensors, *tables))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = jax.jit(self._traced(batch), donate_argnums=1)
        caches = jax.tree.leaves(batch.caches)
        arrays = [cache.array for cache in caches]
        hidden, changed = program(_arrays(self._weights), arrays, tensors, tables)
        for cache, array in zip(caches, changed, strict=True):
            cache.array = array
        return Hidden(hidden)

    def _traced(self, batch: Batch) -> Callable[..., Any]:
        """Return the function of arrays that the forward pass of such batches is."""

        structure = jax.tree.structure(batch.caches)

        def run(weights: Any, caches: Any, tensors: Any, tables: Any) -> Any:
            held = list(map(tensor_of, caches))
            step = batch.over(list(map(tensor_of, tensors)), list(map(tensor_of, tables)))
            step = evolve(step, caches=jax.tree.unflatten(structure, held))
            hidden = self._with_weights(weights, lambda: self._forward(step))
            return array_of(hidden), [array_of(cache) for cache in held]

        return run

    def _logits(self, hidden: torch.Tensor) -> Logits:
        states = hidden.array if isinstance(hidden, DeviceTensor) else numpy_of(hidden)
        return Logits(self._head(_arrays(self._weights), states))

    def _run_head(self, weights: Any, hidden: Any) -> Any:
        logits = type(self._model).logits
        states = tensor_of(hidden)
        return array_of(self._with_weights(weights, lambda: logits(self._model, states)))

    def _with_weights(self, arrays: Sequence[jax.Array], call: Callable[[], Any]) -> Any:
        """Call with the weights that a program takes as arguments."""
        before = _arrays(self._weights)
        try:
            for tensor, array in zip(self._weights, arrays, strict=True):
                tensor._elem = array
            with torch.inference_mode(False), torch.no_grad(), torchax.default_env():
                return call()
        except (torchax.tensor.OperatorNotFound, jax.errors.JAXTypeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise UnsupportedError(
                f"device tpu: {type(self._model).__name__} is not supported yet: {reason}"
            ) from error
        finally:
            for tensor, array in zip(self._weights, before, strict=True):
                tensor._elem = array


def _arrays(tensors: Sequence[Any]) -> list[jax.Array]:
    return [tensor._elem for tensor in tensors]
