"""Saves of blocks while the step that computes them runs, layer by layer.

The planner names the blocks that a step fills in the step's own plan. The runner tells the mover
which layers are computed, and the mover's thread copies them. A later plan says whether the step
succeeded; only then the blocks are stored.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from modulm.contracts.connector import BlockTransfer, TransferPlan
from modulm_kv_transfer.copies import CopyingMover
from modulm_kv_transfer.remote import LayeredPlan

__all__ = ["BlockWriter", "LayeredMover"]


class BlockWriter(ABC):
    """Takes the blocks of a save, some tensors at a time. Called in the mover's thread."""

    @abstractmethod
    def write(self, tensors: Sequence[int]) -> None:
        """Copy these tensors of all blocks; indices in `BlockCopier.tensors`, in order."""

    @abstractmethod
    def end(self, *, worked: bool) -> None:
        """Store the blocks, or discard them."""


class _StepSaves:
    """The saves of one step, between the thread that runs it and the mover's."""

    def __init__(self, transfers: Sequence[BlockTransfer]) -> None:
        self.transfers = transfers
        self.worked: bool | None = None
        self.reason = "its step failed"
        #: After all work of the step, on devices that queue it.
        self.ready: Any = None
        self._computed: list[tuple[Sequence[int], Any]] = []
        self._seen: set[int] = set()
        self._changed = threading.Condition()

    def add(self, tensors: Sequence[int], ready: Any) -> None:
        """Note tensors that a layer has filled, after the event `ready`."""
        with self._changed:
            if self._seen.intersection(tensors) and self.worked is None:
                self.worked, self.reason = False, "a layer ran twice in a step"
            self._seen.update(tensors)
            self._computed.append((tensors, ready))
            self._changed.notify()

    def end(self, ready: Any, *, worked: bool) -> None:
        """Note the end of the step, after the event `ready`."""
        with self._changed:
            if self.worked is None:
                self.worked = worked
            self.ready = ready
            self._changed.notify()

    def take(self) -> tuple[list[int], Any]:
        """Wait for computed tensors, in order, and their event; none: the step has ended."""
        with self._changed:
            while not self._computed and self.worked is None:
                self._changed.wait()
            if self.worked is False:
                return [], None
            computed, self._computed = self._computed, []
        tensors = sorted(index for indices, _ in computed for index in indices)
        return tensors, computed[-1][1] if computed else None


class LayeredMover(CopyingMover):
    """A mover that also copies blocks while they are computed."""

    def __init__(self) -> None:
        super().__init__()
        #: Saves whose step has not ended, by id.
        self._unended: dict[int, _StepSaves] = {}
        self._current: _StepSaves | None = None

    @abstractmethod
    def writer(self, transfer: BlockTransfer) -> BlockWriter:
        """Begin to save the transfer's blocks. Called in the thread."""

    @property
    def computing(self) -> bool:
        """Whether there are saves whose step has not been committed or dropped."""
        return bool(self._unended)

    def begin(self, plan: TransferPlan) -> None:
        super().begin(plan)
        self._current = None
        if not isinstance(plan, LayeredPlan):
            return
        ended = dict.fromkeys(plan.committed, True) | dict.fromkeys(plan.dropped, False)
        for identity, worked in ended.items():
            saves = self._unended.pop(identity, None)
            if saves is not None:
                saves.end(self._event(), worked=worked)
        if plan.computing:
            self._current = saves = _StepSaves(plan.computing)
            self._unended.update((transfer.id, saves) for transfer in plan.computing)
            self.call(partial(self._save, saves))

    def computed(self, tensors: Sequence[int]) -> None:
        """Note that a layer of the running step has filled these tensors."""
        if self._current is not None:
            self._current.add(tensors, self._event())

    def _event(self) -> Any:
        if self._stream is None:
            return None
        return torch.get_device_module(self.copier.device).current_stream().record_event()

    def _save(self, saves: _StepSaves) -> None:
        """Copy the blocks of a step as its layers are computed."""
        writers: list[BlockWriter] = []
        reason = None
        try:
            writers.extend(map(self.writer, saves.transfers))
            left = set(range(len(self.copier.tensors)))
            while left:
                tensors, ready = saves.take()
                if not tensors:
                    break
                self._write(writers, tensors, ready)
                left.difference_update(tensors)
            while saves.worked is None:
                saves.take()
            if left and saves.worked:
                self._write(writers, sorted(left), saves.ready)
        except Exception as error:
            reason = str(error) or type(error).__name__
        if reason is None and not saves.worked:
            reason = saves.reason
        for writer in writers:
            writer.end(worked=reason is None)
        for transfer in saves.transfers:
            if reason is None:
                self.complete(transfer)
            else:
                self.fail(transfer, reason)

    def _write(self, writers: Sequence[BlockWriter], tensors: Sequence[int], ready: Any) -> None:
        with self.streamed(ready):
            for writer in writers:
                writer.write(tensors)

    def close(self) -> None:
        for saves in self._unended.values():
            saves.end(None, worked=False)
        super().close()
