"""Steps recorded as graphs: whole ones, and ones in pieces around attention.

A step of a recorded shape copies its inputs to where those of the recording lie and repeats it:
one launch, or one for each piece. All recordings share a pool of memory, since only one runs at a
time; what one gives is overwritten by the next.
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
from modulm_gpu.pieces import Breaks, Place, TokensOnly

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
    """How a device writes down what is launched, and does it again."""

    #: Bytes that what was written down takes.
    held: int = 0

    @abstractmethod
    def begin(self) -> None:
        """From here on the thread's launches are written down, and none is done."""

    @abstractmethod
    def end(self, failed: bool = False) -> Callable[[], None]:
        """Stop that; what does them again."""

    @abstractmethod
    def unowned(self, tensor: Tensor) -> Tensor:
        """The same place of the pool, whose memory others may take meanwhile."""

    @abstractmethod
    def clear(self) -> None:
        """Everything that was written down is gone: give the pool's memory back."""


class RuntimeGraphs(Graphs):
    """CUDA graphs, and what other runtimes have like them."""

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
        self.held += max(self._free - self._runtime.memory()[0], 0)
        return replay or _nothing

    def unowned(self, tensor: Tensor) -> Tensor:
        return self._runtime.unowned(tensor)

    def clear(self) -> None:
        self._runtime.module.synchronize()
        self._runtime.module.empty_cache()
        self._pool, self.held = None, 0


def _nothing() -> None:
    """After a failure: there is nothing to repeat."""


def _as_given(width: int) -> int:
    return width


def _any(width: int) -> int:
    return 0


@frozen(eq=False)
class _Whole:
    """A step recorded from its inputs to its result."""

    inputs: FixedInputs[Any]
    replay: Callable[[], None]
    result: Result

    def fits(self, batch: Batch) -> bool:
        """Whether its tables are as wide as the step's, at least."""
        pairs = zip(self.inputs.step.tables(), batch.tables(), strict=True)
        return all(held.shape[1] >= given.shape[1] for held, given in pairs)

    def repeat(self, batch: Batch) -> Result:
        self.inputs.put(batch)
        self.replay()
        return self.result


@frozen(eq=False)
class _Call:
    """A call between two pieces; plan: the place of the plan among its arguments, and its group."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    plan: tuple[int, int]

    @classmethod
    def of(cls, call: Callable[..., Any], arguments: tuple[Any, ...]) -> _Call:
        """Raises StopIteration if there is no plan among the arguments."""
        at = next(i for i, value in enumerate(arguments) if isinstance(value, Place))
        return cls(call, arguments, (at, arguments[at].index))

    def repeat(self, batch: Batch) -> Any:
        at, group = self.plan
        return self.call(*self.arguments[:at], batch.plans[group], *self.arguments[at + 1 :])


@frozen(eq=False)
class _Pieces:
    """A step recorded between its calls of attention."""

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
    """A forward pass whose steps of certain shapes are graphs.

    compiled: the backend by which what is recorded is compiled before, or None. reasons: why steps
    were not recorded, whole ("whole") or in pieces ("pieces"): the first reason of each.
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
        self._made: Forward | None = None if compiled else forward
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
    def held(self) -> int:
        return self._graphs.held

    @property
    def recordings(self) -> int:
        """How many there are."""
        return len(self._recordings)

    def clear(self) -> None:
        self._recordings.clear()
        self.reasons.clear()
        self.seconds = 0.0
        self._graphs.clear()

    def __call__(self, batch: Batch) -> Result:
        found = self._recordings.get(_whole(batch)) or self._recordings.get(_in_pieces(batch))
        if found is None or (isinstance(found, _Whole) and not found.fits(batch)):
            self.passed += 1
            return self._forward(batch)
        self.repeated += 1
        return found.repeat(batch)

    def record(self, batch: Batch) -> None:
        began = time.perf_counter()
        single = batch.tokens.shape[0] == batch.query_starts.shape[0] - 1
        # Of other steps nothing but tensors may change, or each of them would be one of its own.
        alike = not any(plan.key() for plan in batch.plans)
        whole = self.shapes.decode if single else self.shapes.mixed and alike
        if whole and "whole" not in self.reasons:
            self._keep("whole", _whole(batch), batch, self._record_whole)
        done = {_whole(batch), _in_pieces(batch)} & set(self._recordings)
        if self.shapes.pieces and "pieces" not in self.reasons and not done:
            self._keep("pieces", _in_pieces(batch), batch, self._record_pieces)
        self.seconds += time.perf_counter() - began

    def _keep(
        self,
        kind: str,
        key: Hashable,
        batch: Batch,
        recorded: Callable[[Batch], _Whole | _Pieces],
    ) -> None:
        """Record, or say why that cannot be done. A step that does not even run is no matter of
        recordings: what it raises is passed on.
        """
        if key is None:
            self.reasons[kind] = "the plans of its attention or states cannot be recorded"
        else:
            self._forward(batch)  # compiles kernels, and makes what they keep
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
        return _Whole(inputs, parts[0], self._kept(result))

    def _record_pieces(self, batch: Batch) -> _Pieces:
        inputs = FixedInputs(TokensOnly(batch))
        parts: list[Callable[[], None]] = []
        calls: list[_Call] = []

        def plain(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
            return _Call.of(call, arguments).repeat(batch)

        def broken_off(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
            parts.append(self._graphs.end())
            try:
                found = _Call.of(call, arguments).repeat(batch)
            finally:
                self._graphs.begin()
            calls.append(_Call.of(call, tuple(map(self._place_of, arguments))))
            return found

        with self._breaks.set(plain):
            forward = self._prepared(inputs.step.batch)
        with self._captured(parts), self._breaks.set(broken_off):
            result = forward(inputs.step.batch)
        return _Pieces(inputs, parts, calls, self._kept(result))

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
        """The pass that is recorded, compiled if it is to be and run once if it was not yet."""
        if self._made is None:
            apart: Any = torch.compiler.disable
            for backend in self._breaks.backends:
                backend.forward = apart(backend.forward)  # type: ignore[method-assign]
                backend.forward_qkv = apart(backend.forward_qkv)  # type: ignore[method-assign]
            self._made = torch.compile(self._forward, backend=self._compiled or "inductor")
        if self._compiled:
            self._made(step)
        return self._made

    def _place_of(self, value: Any) -> Any:
        return self._graphs.unowned(value) if isinstance(value, Tensor) else value

    def _kept(self, result: Result) -> Result:
        if isinstance(result, Tensor):
            return self._graphs.unowned(result)
        return tuple(map(self._graphs.unowned, result))


def _whole(batch: Batch) -> Hashable | None:
    """What steps of one whole recording have in common; tables may be narrower than recorded."""
    found = signature(batch, room=_any)
    return None if found is None else ("whole", found)


def _in_pieces(batch: Batch) -> Hashable | None:
    found = signature(TokensOnly(batch))
    return None if found is None else ("pieces", found)
