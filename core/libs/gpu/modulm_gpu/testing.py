"""Graphs on the test device that simulates a queue (`modulm.testing.queued`).

Captured operations are recorded without running and run on replay. What a real capture rejects or a
real graph would compute wrongly raises an error here: the host reads a value or waits, memory is
allocated outside the pool, a shape depends on values, a graph reads freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from modulm.contracts.attention import (
    PLAIN,
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    AttentionSpec,
    KVLayout,
    StepLayout,
)
from modulm.contracts.ops import Ops
from modulm.contracts.platform import Flags, Platform
from modulm.errors import EngineError
from modulm.testing.queued import (
    HostRead,
    Queue,
    QueuedPlatform,
    holds_tensor,
    listed,
    nonsense,
    output_shapes,
    really,
    undivided,
    written,
)
from modulm_gpu.flags import CompilationConfig
from modulm_gpu.graphs import GraphRecorder, Graphs, Result
from modulm_gpu.pieces import Breaks
from modulm_gpu.shapes import RecordedShapes, compiler

__all__ = ["GatherAttention", "GraphError", "GraphPlatform", "TapeGraphs"]

_FROM_HOST = frozenset({"tensor", "as_tensor", "from_numpy", "frombuffer", "asarray"})


class GraphError(EngineError):
    """Something that a device would not capture, or a graph that would compute garbage."""


class _Outside:
    """Memory that a graph uses and does not own; it must exist when the graph runs."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        """Raises GraphError if the memory was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise GraphError(f"the graph reads memory that was freed: {list(self._size)}")
        view = torch.empty(0, dtype=self._dtype)
        return view.set_(storage, self._offset, self._size, self._stride)


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations. Views are created immediately; new tensors are in the pool."""

    def __init__(self, pool: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self.steps: list[Callable[[], object]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default imports torch's compiler, and wraps each operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            raise GraphError("host memory is allocated while a graph is captured")
        if func not in undivided:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            undivided.add(func)
        with really():
            return self._write(func, args, kwargs)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = func._schema
        inputs = [each for each in (*args, *kwargs.values()) if holds_tensor(each)]
        views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if views and inputs:
            return func(*args, **kwargs)
        references = self._weak_outside((args, kwargs))
        if schema.is_mutable:
            self.steps.append(lambda: _done(func, references))
            return written(schema, args, kwargs)
        try:
            shapes = output_shapes(func, args, kwargs) if inputs else func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise HostRead(f"{func}: the output depends on values: {error}"[:300]) from error
        outputs = tree_map_only(Tensor, nonsense, shapes)
        self._pool.update(each.untyped_storage()._cdata for each in listed(outputs))
        targets = listed(outputs)

        def fill() -> None:
            for target, value in zip(targets, listed(_done(func, references)), strict=True):
                target.copy_(value)

        self.steps.append(fill)
        return outputs

    def _weak_outside(self, values: Any) -> Any:
        """Hold tensors outside the pool weakly, as a graph does."""

        def reference(tensor: Tensor) -> Any:
            inside = tensor.untyped_storage()._cdata in self._pool
            return tensor if inside else _Outside(tensor)

        return tree_map_only(Tensor, reference, values)


def _done(func: Any, references: Any) -> Any:
    args, kwargs = tree_map_only(_Outside, _Outside.tensor, references)
    return func(*args, **kwargs)


class _NoHostMemory(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _FROM_HOST and not (args and isinstance(args[0], Tensor)):
            raise GraphError(f"torch.{name} uses host memory while a graph is captured")
        return func(*args, **(kwargs or {}))


class TapeGraphs(Graphs):
    """Graphs of the test device.

    captured, replayed: counts of graphs; each piece counts. each: bytes per graph.
    """

    each = 0

    def __init__(self, work: Queue) -> None:
        self._work = work
        self._pool: set[int] = set()
        self._tape: _Tape | None = None
        self._modes = ExitStack()
        self._recorded: list[list[Callable[[], object]]] = []
        self.captured = self.replayed = 0

    def begin(self) -> None:
        self._tape = _Tape(self._pool)
        self._work.closed = "the host waits or sends something while a graph is captured"
        self._modes.enter_context(_NoHostMemory())
        self._modes.enter_context(self._tape)

    def end(self, failed: bool = False) -> Callable[[], None]:
        self._modes.close()
        self._work.closed = ""
        steps = [] if self._tape is None else self._tape.steps
        self._tape = None
        self.captured += not failed
        self.memory += 0 if failed else self.each

        def replay() -> None:
            self.replayed += 1
            for step in steps:
                self._work.put(step)

        return replay

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor

    def clear(self) -> None:
        self.memory = 0


class _Overwriting(GraphRecorder):
    """Invalidates a recording's outputs when the next step runs."""

    last: Result | None = None
    work: Queue

    def __call__(self, batch: Any) -> Result:
        if self.last is not None:
            for tensor in self.last if isinstance(self.last, tuple) else (self.last,):
                self.work.put(lambda stale=tensor: stale.copy_(nonsense(stale)))  # type: ignore[misc]
        before = self.repeated
        result = super().__call__(batch)
        self.last = result if self.repeated > before else None
        return result


class GraphPlatform(QueuedPlatform):
    """Register as platform "graphs" and run with `device="graphs"`.

    `recorder` and `graphs` belong to the model loaded last.
    """

    name = "graphs"
    attention = ("gather", "sdpa")
    capabilities = frozenset({"graphs"})
    recorder: GraphRecorder | None = None
    graphs: TapeGraphs | None = None

    def __init__(self) -> None:
        super().__init__()
        self.breaks = Breaks()

    def recorded(self, forward: Any, config: Flags) -> Any:
        shapes = RecordedShapes.of(config)
        if not shapes.sizes:
            return forward
        graphs, backend = TapeGraphs(self._work), compiler(config.group(CompilationConfig))
        recorder = _Overwriting(forward, shapes, graphs, self.breaks, backend)
        recorder.work = self._work
        GraphPlatform.recorder, GraphPlatform.graphs = recorder, graphs
        return recorder

    def attending(self, backend: Any) -> Any:
        return self.breaks.around(backend)


@frozen(eq=False)
class _GatherPlan(AttentionPlan):
    """rows: [tokens] int64, row of each token; positions: [tokens] int64."""

    block_tables: Tensor
    rows: Tensor
    positions: Tensor
    slots: Tensor

    def key(self) -> Hashable:
        return ()

    def tensors(self) -> tuple[Tensor, ...]:
        return self.rows, self.positions, self.slots

    def tables(self) -> tuple[Tensor, ...]:
        return (self.block_tables,)

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> _GatherPlan:
        return _GatherPlan(*tables, *tensors)


class GatherAttention(AttentionBackend):
    """Reads the whole block table of every token.

    Nothing depends on lengths, so any step can be recorded. Cache [blocks, block size, 2, kv heads,
    head dim].
    """

    name = "gather"
    api = 3
    features = frozenset({"window"})

    def __init__(
        self,
        spec: AttentionSpec,
        platform: Platform,
        ops: Ops,
        block_size: int,
        options: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(spec, platform, ops, block_size, options)
        self._staging = platform.staging()

    @classmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        return None if spec.kv_dtype == spec.dtype else "stores the model's dtype only"

    def layout(self, blocks: int) -> KVLayout:
        spec = self.spec
        shape = (blocks, self.block_size, 2, spec.kv_heads, spec.head_dim)
        one = self.block_size * 2 * spec.kv_heads * spec.head_dim
        return KVLayout(shape, spec.kv_dtype, one * getattr(torch, spec.kv_dtype).itemsize)

    def plan(self, step: StepLayout) -> _GatherPlan:
        counts = np.diff(step.query_starts)
        rows = np.repeat(np.arange(len(counts)), counts)
        starts = (step.context_lens - counts - step.query_starts[:-1]).astype(np.int64)
        positions = np.arange(len(rows)) + starts[rows]
        sent = self._staging.send((step.block_tables, rows, positions, step.slots))
        return _GatherPlan(*sent)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        plan: AttentionPlan,
        out: Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> None:
        step: Any = plan
        entries = cache.view(-1, *cache.shape[2:])
        entries[step.slots] = torch.stack([k, v], 1)
        table = step.block_tables.long()
        inner = torch.arange(self.block_size)
        slots = (table[:, :, None] * self.block_size + inner).flatten(1)
        gathered = entries[slots[step.rows]]  # [tokens, keys, 2, kv heads, head dim]
        keys, values = gathered[:, :, 0], gathered[:, :, 1]
        at = torch.arange(slots.shape[1])
        seen = at <= step.positions[:, None]
        if self.spec.window is not None:
            seen = seen & (at > step.positions[:, None] - self.spec.window)
        group = self.spec.heads // self.spec.kv_heads
        keys = keys.repeat_interleave(group, 2)
        values = values.repeat_interleave(group, 2)
        scores = (q[:, None] * keys).sum(-1) * self.spec.scale
        weights = scores.masked_fill(~seen[:, :, None], -torch.inf).softmax(1)
        values = values.masked_fill(~seen[:, :, None, None], 0)
        out.copy_((weights[..., None] * values).sum(1))
