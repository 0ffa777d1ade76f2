"""Steps recorded as graphs, in full or piecewise around attention.

A step with a recorded shape copies its inputs into the recording's buffers and replays it: one
launch, or one per piece. Since only one recording runs at a time, all share one memory pool, and a
recording's outputs are overwritten by the next.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.kernels import RecordedForward
from modulm.ops.recording import FixedInputs, signature
from modulm_gpu.pieces import Breaks, PlanPlaceholder, TokensOnly

if TYPE_CHECKING:
    import numpy as np

    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Batch
    from modulm_gpu.runtime import Runtime
    from modulm_gpu.shapes import RecordedShapes

__all__ = ["GraphRecorder", "Graphs", "RuntimeGraphs"]

log = logging.getLogger("modulm.gpu")

Result: TypeAlias = Tensor | tuple[Tensor, ...]


class Graphs(ABC):
    """Captures a device's launches and replays them."""

    #: Memory of the captured graphs in bytes.
    memory: int = 0

    @abstractmethod
    def begin(self) -> None:
        """Start capturing: launches of this thread are recorded and not executed."""

    @abstractmethod
    def end(self, failed: bool = False) -> Callable[[], None]:
        """Stop capturing and return a function that replays the launches."""

    @abstractmethod
    def unowned(self, tensor: Tensor) -> Tensor:
        """A view of the tensor that does not keep its pool memory from being reused."""

    @abstractmethod
    def clear(self) -> None:
        """All recordings are gone: release the pool's memory."""


class RuntimeGraphs(Graphs):
    """CUDA graphs, or the equivalent of other runtimes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pool: Any = None
        self._graph: Any = None
        self._free = 0

    def begin(self) -> None:
        if self._pool is None:
            self._pool = self._runtime.module.graph_pool_handle()
        self._free = self._runtime.memory()[0]
        self._graph = self._runtime.begin_capture(self._pool)

    def end(self, failed: bool = False) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        replay = self._runtime.end_capture(graph, failed)
        self.memory += max(self._free - self._runtime.memory()[0], 0)
        return replay or _nothing

    def unowned(self, tensor: Tensor) -> Tensor:
        return self._runtime.unowned(tensor)

    def clear(self) -> None:
        self._runtime.module.synchronize()
        self._runtime.module.empty_cache()
        self._pool, self.memory = None, 0


def _nothing() -> None:
    """Used after a failure: there is nothing to replay."""


def _as_given(width: int) -> int:
    return width


def _any(width: int) -> int:
    return 0


@frozen(eq=False)
class _Whole:
    """A step recorded in full, from its inputs to its result."""

    inputs: FixedInputs[Any]
    replay: Callable[[], None]
    result: Result

    def fits(self, batch: Batch) -> bool:
        """Whether the recorded block tables are at least as wide as the step's."""
        pairs = zip(self.inputs.step.tables(), batch.tables(), strict=True)
        return all(recorded.shape[1] >= table.shape[1] for recorded, table in pairs)

    def repeat(self, batch: Batch) -> Result:
        self.inputs.put(batch)
        self.replay()
        return self.result


@frozen(eq=False)
class _Call:
    """A call between two pieces; plan: index of the plan among its arguments, and its cache
    group.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    plan: tuple[int, int]

    @classmethod
    def of(cls, call: Callable[..., Any], arguments: tuple[Any, ...]) -> _Call:
        """Raises StopIteration if the arguments include no plan."""
        at = next(i for i, value in enumerate(arguments) if isinstance(value, PlanPlaceholder))
        return cls(call, arguments, (at, arguments[at].index))

    def repeat(self, batch: Batch) -> Any:
        at, group = self.plan
        return self.call(*self.arguments[:at], batch.plans[group], *self.arguments[at + 1 :])


@frozen(eq=False)
class _Pieces:
    """A step recorded piecewise, between its attention calls."""

    inputs: FixedInputs[TokensOnly]
    pieces: Sequence[Callable[[], None]]
    calls: Sequence[_Call]
    result: Result

    def repeat(self, batch: Batch) -> Result:
        self.inputs.put(TokensOnly(batch))
        self.pieces[0]()
        for call, piece in zip(self.calls, self.pieces[1:], strict=True):
            call.repeat(batch)
            piece()
        return self.result


class GraphRecorder(RecordedForward):
    """A forward pass whose steps are recorded as graphs for certain shapes.

    Steps with adapters have recordings of their own, which differ by an input of the batch.
    compiled: backend that compiles steps before they are recorded, or None. reasons: the first
    reason why steps could not be recorded in full ("whole") or piecewise ("pieces"), or not with
    adapters ("whole, adapters", "pieces, adapters").
    """

    def __init__(
        self,
        forward: Forward,
        shapes: RecordedShapes,
        graphs: Graphs,
        breaks: Breaks,
        compiled: str | Callable[..., Any] | None = None,
    ) -> None:
        self.shapes = shapes
        self._forward, self._graphs, self._breaks = forward, graphs, breaks
        self._compiled = compiled
        self._compiled_forward: Forward | None = None if compiled else forward
        self._recordings: dict[Hashable, _Whole | _Pieces] = {}
        self.reasons: dict[str, str] = {}
        self.seconds = 0.0
        self.repeated = self.passed = 0

    @property
    def steps(self) -> Sequence[np.ndarray]:
        return self.shapes.steps

    def padded(self, counts: np.ndarray) -> np.ndarray:
        return self.shapes.padded(counts) if self._recordings else counts

    @property
    def memory(self) -> int:
        return self._graphs.memory

    @property
    def recordings(self) -> int:
        """Number of recordings."""
        return len(self._recordings)

    def clear(self) -> None:
        self._recordings.clear()
        self.reasons.clear()
        self.seconds = 0.0
        self._graphs.clear()

    def __call__(self, batch: Batch) -> Result:
        recording = self._recordings.get(_whole(batch)) or self._recordings.get(_in_pieces(batch))
        if recording is None or (isinstance(recording, _Whole) and not recording.fits(batch)):
            self.passed += 1
            return self._forward(batch)
        self.repeated += 1
        return recording.repeat(batch)

    def record(self, batch: Batch) -> None:
        began = time.perf_counter()
        single = batch.tokens.shape[0] == batch.query_starts.shape[0] - 1
        # Other steps may differ only in their tensors, or each would need a recording of its own.
        alike = not any(plan.key() for plan in batch.plans)
        whole = self.shapes.decode if single else self.shapes.mixed and alike
        suffix = "" if batch.adapters is None else ", adapters"
        if whole and not {"whole", f"whole{suffix}"} & self.reasons.keys():
            self._keep(f"whole{suffix}", _whole(batch), batch, self._record_whole)
        done = {_whole(batch), _in_pieces(batch)} & set(self._recordings)
        pieces = self.shapes.pieces and not {"pieces", f"pieces{suffix}"} & self.reasons.keys()
        if pieces and not done:
            self._keep(f"pieces{suffix}", _in_pieces(batch), batch, self._record_pieces)
        self.seconds += time.perf_counter() - began

    def _keep(
        self,
        kind: str,
        key: Hashable,
        batch: Batch,
        recorded: Callable[[Batch], _Whole | _Pieces],
    ) -> None:
        """Record a step, or note why that is not possible.

        Errors of the step itself are raised.
        """
        if key is None:
            self.reasons[kind] = "the plans of its attention or states cannot be recorded"
        else:
            self._forward(batch)  # compiles kernels and creates their cached state
            try:
                self._recordings[key] = recorded(batch)
            except Exception as error:
                self.reasons[kind] = f"{type(error).__name__}: {error}"
        if kind in self.reasons:
            log.info("steps are not recorded (%s): %s", kind, self.reasons[kind])

    def _record_whole(self, batch: Batch) -> _Whole:
        inputs = FixedInputs(batch, room=_as_given)
        forward = self._prepared(inputs.step)
        parts: list[Callable[[], None]] = []
        with self._captured(parts):
            result = forward(inputs.step)
        return _Whole(inputs, parts[0], self._release_ownership(result))

    def _record_pieces(self, batch: Batch) -> _Pieces:
        inputs = FixedInputs(TokensOnly(batch))
        parts: list[Callable[[], None]] = []
        calls: list[_Call] = []

        def plain(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
            return _Call.of(call, arguments).repeat(batch)

        def broken_off(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
            parts.append(self._graphs.end())
            try:
                result = _Call.of(call, arguments).repeat(batch)
            finally:
                self._graphs.begin()
            calls.append(_Call.of(call, tuple(map(self._placeholder, arguments))))
            return result

        with self._breaks.set(plain):
            forward = self._prepared(inputs.step.batch)
        with self._captured(parts), self._breaks.set(broken_off):
            result = forward(inputs.step.batch)
        return _Pieces(inputs, parts, calls, self._release_ownership(result))

    @contextmanager
    def _captured(self, parts: list[Callable[[], None]]) -> Iterator[None]:
        self._graphs.begin()
        try:
            yield
        except BaseException:
            self._graphs.end(failed=True)
            raise
        parts.append(self._graphs.end())

    def _prepared(self, step: Batch) -> Forward:
        """The forward pass to record, compiled and run once if requested."""
        if self._compiled_forward is None:
            apart: Any = torch.compiler.disable
            for backend in self._breaks.backends:
                backend.forward = apart(backend.forward)  # type: ignore[method-assign]
                backend.forward_qkv = apart(backend.forward_qkv)  # type: ignore[method-assign]
            self._compiled_forward = torch.compile(
                self._forward, backend=self._compiled or "inductor"
            )
        if self._compiled:
            self._compiled_forward(step)
        return self._compiled_forward

    def _placeholder(self, value: Any) -> Any:
        return self._graphs.unowned(value) if isinstance(value, Tensor) else value

    def _release_ownership(self, result: Result) -> Result:
        if isinstance(result, Tensor):
            return self._graphs.unowned(result)
        return tuple(map(self._graphs.unowned, result))


def _whole(batch: Batch) -> Hashable | None:
    """Key of a full recording; its tables may be wider than the step's."""
    key = signature(batch, room=_any)
    return None if key is None else ("whole", key)


def _in_pieces(batch: Batch) -> Hashable | None:
    key = signature(TokensOnly(batch))
    return None if key is None else ("pieces", key)
