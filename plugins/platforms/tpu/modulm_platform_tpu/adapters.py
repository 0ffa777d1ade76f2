"""The adapters of a model in programs: stacks that programs take as arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from modulm.contracts.quantization import LinearKind
from modulm_kernels_pallas.lora import AdapterStack, stack_of

if TYPE_CHECKING:
    import torch

    from modulm_platform_tpu.placement import Placement

__all__ = ["DeviceAdapters"]


class DeviceAdapters:
    """The stacks of all layers that adapters may change. False if there are none.

    layers: the bank's wrappers. rank: maximum rank of an adapter.
    """

    def __init__(self, layers: Sequence[Any], rank: int, placement: Placement) -> None:
        self._step = layers[0].step if layers else None
        self._stacks = [_stack(layer, rank, placement) for layer in layers if rank]

    def __bool__(self) -> bool:
        return bool(self._stacks)

    def refresh(self) -> None:
        """Send adapters that were loaded into slots."""
        for stack in self._stacks:
            stack.refresh()

    def tensors(self, on: bool) -> list[torch.Tensor]:
        """Return the tensors that hold the stacks; none without adapters in the step."""
        return [tensor for stack in self._stacks for tensor in stack.tensors()] if on else []

    def arrays(self, on: bool) -> list[jax.Array]:
        """Return the arrays of `tensors`."""
        return [tensor._elem for tensor in self.tensors(on)]  # type: ignore[attr-defined]

    def current(self, rows: int) -> np.ndarray | None:
        """Return the slots of rows whose logits are computed now; None if none has an adapter."""
        step = self._step
        if step is None or step.groups is None or step.tokens != rows:
            return None
        slots = np.zeros(rows, np.int32)
        for slot, at in step.groups.rows():
            slots[at.numpy()] = slot
        return slots

    @contextmanager
    def pretending(self, tokens: int) -> Iterator[None]:
        """Let the bank's layers expect adapters in a step of so many tokens."""
        step: Any = self._step
        before = step.groups, step.tokens
        step.groups, step.tokens = step.held, tokens
        try:
            yield
        finally:
            step.groups, step.tokens = before

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the bank's layers expect no adapters."""
        step: Any = self._step
        before = None if step is None else step.groups
        if step is not None:
            step.groups = None
        try:
            yield
        finally:
            if step is not None:
                step.groups = before


def _stack(layer: Any, rank: int, placement: Placement) -> AdapterStack:
    spec = layer.spec
    embeds = spec.kind is LinearKind.EMBEDDING
    outputs = spec.inputs if embeds else spec.outputs

    return stack_of(layer.table) or AdapterStack(layer.table, rank, outputs, embeds, placement.put)
