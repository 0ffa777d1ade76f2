"""Ranks of one process, whose interpreted kernels run in turn.

Each rank is a thread, and one runs at a time. At atomic operations of a kernel, and some of its
loads and stores, another may go on, as random numbers of a seed decide, so that a run can be
repeated.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["in_turn", "memories"]

#: Turns after which ranks are taken to wait for one another forever.
_TURNS = 200_000
#: Operations, and the share of them at which turns may change.
_POINTS = {"create_atomic_rmw": 1.0, "create_masked_load": 0.05, "create_masked_store": 0.1}


class _Turns:
    """Whose turn it is, among ranks that have not ended."""

    def __init__(self, ranks: int, seed: int) -> None:
        self._next, self._left = random.Random(seed), _TURNS
        self._alive = list(range(ranks))
        self._gates = [threading.Semaphore(rank == 0) for rank in range(ranks)]

    def wait(self, rank: int) -> None:
        self._gates[rank].acquire()

    def give(self, rank: int, share: float) -> None:
        """Let a rank go on, perhaps this one, and wait for this one's turn."""
        if self._next.random() >= share:
            return
        self._left -= 1
        if self._left < 0:
            raise AssertionError("the ranks wait for one another")
        other = self._next.choice(self._alive)
        if other != rank:
            self._gates[other].release()
            self.wait(rank)

    def end(self, rank: int) -> None:
        self._alive.remove(rank)
        if self._alive:
            self._gates[self._next.choice(self._alive)].release()


@contextmanager
def _points(turns: _Turns, rank_of: threading.local) -> Iterator[None]:
    """Make operations of kernels points at which turns change."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    kept = ("grid_idx", "grid_dim", "options", "codegen_fns")

    def point(operation: Callable[..., Any], share: float) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            own = {name: getattr(builder, name) for name in kept if hasattr(builder, name)}
            turns.give(rank_of.rank, share)
            for name, value in own.items():
                setattr(builder, name, value)
            return operation(*arguments)

        return call

    cut_off = builder.create_fp_trunc

    def rounded(source: Any, kind: Any) -> Any:
        """Round to bfloat16 as GPUs do; the interpreter cuts off."""
        if kind.scalar.name != "bf16":
            return cut_off(source, kind)
        bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, kind.scalar)

    builder.create_fp_trunc = rounded
    for name, share in _POINTS.items():
        setattr(builder, name, point(getattr(builder, name), share))
    try:
        yield
    finally:
        for name in (*_POINTS, "create_fp_trunc"):
            delattr(builder, name)


def in_turn(ranks: int, seed: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work(rank)` for all ranks; return the results by rank, or raise what one raised."""
    turns, rank_of = _Turns(ranks, seed), threading.local()
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        rank_of.rank = rank
        turns.wait(rank)
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
        finally:
            turns.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    with _points(turns, rank_of):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


def memories(ranks: int, constants: Any) -> tuple[list[Any], list[Tensor]]:
    """Create the memory of each rank, in that of this process, and the buffers."""
    from modulm_kernels_triton.symmetric_sum import SumMemory, buffer_bytes

    size = buffer_bytes(constants)
    buffers = [torch.zeros(size // 8, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return [SumMemory.of(rank, constants, addresses.clone()) for rank in range(ranks)], buffers
