"""Base classes of connectors that store copies of blocks, made in a background thread.

A block is stored as contiguous bytes: its slices of each layer's tensors, concatenated.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from modulm.contracts.connector import (
    BlockHold,
    BlockTransfer,
    KVMover,
    TransferPlan,
    TransferResult,
)
from modulm.errors import UnsupportedError

__all__ = ["BlockCopier", "CopyingMover", "TransferFailed", "merged"]

T = TypeVar("T")

#: Number of blocks that are staged in device memory at a time.
_STAGED = 32
#: Threads that load blocks into host memory, which one alone does not keep busy.
_THREADS = 2


class TransferFailed(Exception):
    """A transfer failed. The message has no final full stop."""


class BlockCopier:
    """Copies blocks between caches and bytes in host memory.

    tensors: each with its index in `BlockTransfer.blocks`, in the order of their bytes. width:
    bytes of a block over all tensors. layout: digest of their shapes and dtypes; bytes can be
    loaded into caches with the same layout. Raises UnsupportedError for a tensor whose blocks are
    not contiguous.
    """

    def __init__(self, caches: Mapping[int, Sequence[torch.Tensor]]) -> None:
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self._views: list[tuple[int, int, torch.Tensor]] = []
        self.width = 0
        seen: set[tuple[int, int]] = set()
        described = []
        for group, tensors in sorted(caches.items()):
            for tensor in tensors:
                if (group, tensor.data_ptr()) in seen:
                    continue  # a layer that shares an earlier one's cache
                seen.add((group, tensor.data_ptr()))
                try:
                    view = tensor.view(tensor.shape[0], -1).view(torch.uint8)
                except RuntimeError as error:
                    raise UnsupportedError(
                        f"cache blocks of strides {tensor.stride()} cannot be copied as a whole"
                    ) from error
                self.tensors.append((group, tensor))
                self._views.append((group, self.width, view))
                self.width += view.shape[1]
                described.append(f"{group} {tuple(tensor.shape[1:])} {tensor.dtype}")
        self.layout = hashlib.blake2b("\n".join(described).encode(), digest_size=16).hexdigest()
        self.device = self._views[0][2].device if self._views else torch.device("cpu")
        self.staged = self.device != torch.empty(0, device="cpu").device
        # numpy's copies of slices take a third of the time of torch's.
        self._arrays = (
            [] if self.staged else [(g, start, view.numpy()) for g, start, view in self._views]
        )

    def save(
        self,
        blocks: Sequence[Sequence[int]],
        into: Sequence[torch.Tensor],
        tensors: Sequence[int] | None = None,
    ) -> None:
        """Copy blocks to `into`, a uint8 tensor [width] for each.

        blocks: ids per group. tensors: indices of those to copy, in order; by default all.
        """
        if not self.staged:
            arrays = _chosen(self._arrays, tensors)
            for index, out in enumerate(into):
                target = out.numpy()
                for group, start, array in arrays:
                    target[start : start + array.shape[1]] = array[blocks[group][index]]
            return
        views, spans = _chosen(self._views, tensors), self.spans(tensors)
        for part in _parts(len(into)):
            stage = self._stage(len(into[part]), spans)
            at = 0
            for group, _, view in views:
                ids = torch.tensor(blocks[group][part], device=self.device)
                stage[:, at : at + view.shape[1]] = view.index_select(0, ids)
                at += view.shape[1]
            for out, row in zip(into[part], stage, strict=True):
                at = 0
                for start, end in spans:
                    out[start:end].copy_(row[at : at + end - start], non_blocking=True)
                    at += end - start

    def load(
        self,
        blocks: Sequence[Sequence[int]],
        stored: Sequence[torch.Tensor],
        tensors: Sequence[int] | None = None,
    ) -> None:
        """Fill blocks with bytes copied by `save`; ids that are 0 are left out.

        tensors: as in `save`.
        """
        if not self.staged:
            arrays = _chosen(self._arrays, tensors)
            for index, source in enumerate(stored):
                stored_row = source.numpy()
                for group, start, array in arrays:
                    if block := blocks[group][index]:
                        array[block] = stored_row[start : start + array.shape[1]]
            return
        views, spans = _chosen(self._views, tensors), self.spans(tensors)
        for part in _parts(len(stored)):
            stage = self._stage(len(stored[part]), spans)
            for row, source in zip(stage, stored[part], strict=True):
                at = 0
                for start, end in spans:
                    row[at : at + end - start].copy_(source[start:end], non_blocking=True)
                    at += end - start
            at = 0
            for group, _, view in views:
                # Block 0 pads tables; what it holds does not matter.
                ids = torch.tensor(blocks[group][part], device=self.device)
                view.index_copy_(0, ids, stage[:, at : at + view.shape[1]])
                at += view.shape[1]

    def spans(self, tensors: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """Return where tensors are in a block's bytes: (start, end), adjacent ones as one."""
        if tensors is None:
            return [(0, self.width)]
        places = _chosen(self._views, tensors)
        return merged((start, start + view.shape[1]) for _, start, view in places)

    def _stage(self, blocks: int, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
        width = sum(end - start for start, end in spans)
        return torch.empty((blocks, width), dtype=torch.uint8, device=self.device)

    def buffer(self, blocks: int) -> torch.Tensor:
        """Allocate host memory: [blocks, width] uint8, pinned if the caches are on a device."""
        return torch.empty((blocks, self.width), dtype=torch.uint8, pin_memory=self.staged)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in the same order, adjacent ones as one."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def _chosen(items: Sequence[T], indices: Sequence[int] | None) -> Sequence[T]:
    return items if indices is None else [items[index] for index in indices]


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _STAGED) for start in range(0, count, _STAGED))


class CopyingMover(KVMover):
    """Runs transfers one by one in a thread, on devices in a separate stream.

    `save`, `load` and `hold` run in the thread. The first two raise TransferFailed, OSError or
    MemoryError, and call `forget` for blocks that are no longer stored.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[
            tuple[bool, BlockTransfer, Any] | BlockHold | Callable[[], None] | None
        ] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._done: list[int] = []
        self._failed: list[tuple[int, str]] = []
        self._removed: list[bytes] = []
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._closed = False

    def open(
        self, caches: Mapping[int, Sequence[torch.Tensor]], *, rank: int = 0, ranks: int = 1
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.copier = BlockCopier(caches)
        self.prepare()
        if self.copier.staged:
            self._stream = torch.get_device_module(self.copier.device).Stream()
        self._thread = threading.Thread(target=self._work, name="kv-transfers", daemon=True)
        self._thread.start()

    def prepare(self) -> None:
        """Called by `open`, once `copier`, `rank` and `ranks` are set."""

    @abstractmethod
    def save(self, transfer: BlockTransfer) -> None:
        """Store the transfer's blocks."""

    @abstractmethod
    def load(self, transfer: BlockTransfer) -> None:
        """Fill the transfer's blocks."""

    def hold(self, hold: BlockHold) -> None:
        """Keep blocks from eviction. Called in the thread."""

    def forget(self, names: Sequence[bytes]) -> None:
        """Report blocks that are no longer stored."""
        with self._lock:
            self._removed += names

    def begin(self, plan: TransferPlan) -> None:
        ready = None
        if self._stream is not None and (plan.loads or plan.saves):
            ready = torch.get_device_module(self.copier.device).current_stream().record_event()
        for transfer in plan.saves:
            self._waiting.put((False, transfer, ready))
        for hold in plan.holds:
            self._waiting.put(hold)
        for transfer in plan.loads:
            self.start_load(transfer, ready)

    def start_load(self, transfer: BlockTransfer, ready: Any) -> None:
        """Queue a load. ready: an event after which its blocks may be written, or None.

        A subclass may fetch the bytes first, in other threads.
        """
        self._waiting.put((True, transfer, ready))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, after what was queued before. It must not raise."""
        self._waiting.put(function)

    def fail(self, transfer: BlockTransfer, reason: str) -> None:
        """Report a transfer that has failed and is not queued."""
        with self._lock:
            self._failed.append((transfer.id, reason))
            self._lock.notify_all()

    def complete(self, transfer: BlockTransfer) -> None:
        """Report a transfer that has succeeded without being queued."""
        with self._lock:
            self._done.append(transfer.id)
            self._lock.notify_all()

    def ended(self) -> TransferResult:
        with self._lock:
            result = TransferResult(tuple(self._done), tuple(self._failed), tuple(self._removed))
            self._done, self._failed, self._removed = [], [], []
        return result

    def wait(self, seconds: float) -> None:
        with self._lock:
            if not (self._done or self._failed):
                self._lock.wait(seconds)

    def close(self) -> None:
        """Drop queued transfers and wait for the current one."""
        self._closed = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @torch.inference_mode()
    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._closed:
                continue
            if isinstance(item, BlockHold):
                self.hold(item)
                continue
            if callable(item):
                item()
                continue
            loads, transfer, ready = item
            fault = self._move(loads, transfer, ready)
            with self._lock:
                if fault is None:
                    self._done.append(transfer.id)
                else:
                    self._failed.append((transfer.id, fault))
                self._lock.notify_all()

    def _move(self, loads: bool, transfer: BlockTransfer, ready: Any) -> str | None:
        """Run a transfer; return why it failed, or None."""
        try:
            with self.streamed(ready):
                (self.load if loads else self.save)(transfer)
        except Exception as error:
            return str(error) or type(error).__name__
        return None

    @contextlib.contextmanager
    def streamed(self, ready: Any) -> Iterator[None]:
        """Run the block's work in the mover's stream, after `ready`, and wait for it."""
        if self._stream is None:
            yield
            return
        module = torch.get_device_module(self.copier.device)
        with module.stream(self._stream):
            self._stream.wait_event(ready)
            yield
            self._stream.synchronize()

    def spread(self, count: int, load: Callable[[int, range], None]) -> None:
        """Call `load(number, indices)` in a few threads that divide `count` blocks among them.

        number: of the thread, less than `loaders`. With a device, there is one.
        """
        size = -(-count // self.loaders)
        parts = [range(start, min(start + size, count)) for start in range(0, count, max(size, 1))]
        if len(parts) < 2:
            for part in parts:
                load(0, part)
            return
        with ThreadPoolExecutor(len(parts), "kv-loads") as threads:
            for future in [threads.submit(load, i, part) for i, part in enumerate(parts)]:
                future.result()

    @property
    def loaders(self) -> int:
        """Number of threads of `spread`."""
        return 1 if self.copier.staged else _THREADS

    def synchronize(self) -> None:
        """Wait until copies from the device are in host memory."""
        if self._stream is not None:
            self._stream.synchronize()
