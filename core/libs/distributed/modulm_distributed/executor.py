"""Base class of executors whose workers are processes, on this machine or others."""

from __future__ import annotations

import logging
import select
import selectors
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import define, field

from modulm.contracts.executor import (
    Capacity,
    Executor,
    GroupCapacity,
    ModelDescription,
    PartReport,
    Plan,
    StepResult,
)
from modulm.engine.parts import open_parts
from modulm.errors import EngineDead, EngineError, EngineTimeout, ModulmError, PluginConflict
from modulm.plugins import manager
from modulm_distributed.flags import DistributedConfig
from modulm_distributed.plan_codec import PlanCodec
from modulm_distributed.ring import SHORT, Ring, wait
from modulm_distributed.rounds import Rounds
from modulm_distributed.worker_calls import function_name, pack_call
from modulm_wire import frames
from modulm_wire.packing import changed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.config.parallel import ParallelConfig
    from modulm.contracts.sampling import StructuredOutputs
    from modulm_distributed.mesh import RankSpec
    from modulm_distributed.stream import FrameStream

__all__ = ["WorkersExecutor", "unpack_capacity"]

log = logging.getLogger("modulm.engine")

#: Seconds for the other ranks to report a step that failed on one rank.
_ALL_FAIL = 5.0
#: Seconds for workers to end.
_GRACE = 10.0
#: Seconds between two checks for steps that take too long.
_LOOK = 1.0
#: Minimum seconds to wait for the next step before a replica that shares experts runs an empty
#: pass, and between two checks.
_NEXT = 3e-3
#: Longer gaps between two steps (seconds) mean that the replica was idle.
_IDLE = 5e-2
#: Seconds between a failed step and the end of its replica, so that a dead rank is reported first.
_FIRST_DEAD = 1.0


def unpack_capacity(table: dict[str, Any]) -> Capacity:
    """Build a capacity from its fields as plain values."""
    groups = tuple(GroupCapacity(**group) for group in table["groups"])
    return Capacity(**{**table, "groups": groups, "notes": tuple(table["notes"])})


class _Step(Future[StepResult]):
    """A running step. The thread that waits for it reads results until its own has arrived."""

    def __init__(self, land: Callable[[_Step], None]) -> None:
        super().__init__()
        self._land = land

    def result(self, timeout: float | None = None) -> StepResult:
        self._land(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._land(self)
        return super().exception(timeout)


@define(eq=False)
class _Call:
    """A call that some ranks have not answered yet.

    missing: those ranks. values: the answers by rank. named: error messages name their rank.
    """

    missing: set[int]
    named: bool = False
    values: dict[int, Any] = field(factory=dict)
    answer: Future[Any] = field(factory=Future)


class WorkersExecutor(Executor):
    """Sends every plan to all ranks and receives results from the output rank.

    On one machine plans and results go through shared memory (`Ring`); the thread that waits for a
    result reads it. Another thread reads all other frames, so that the death of a rank is noticed
    at once. A subclass starts the processes (`connect`) and ends them (`end`).
    """

    def __init__(self) -> None:
        self._streams: list[FrameStream] = []
        #: Running steps: start (monotonic seconds) and future; and the failures reported so far.
        self._steps: dict[int, tuple[float, Future[StepResult]]] = {}
        self._failed: dict[int, tuple[float, dict[int, ModulmError]]] = {}
        self._calls: dict[int, _Call] = {}
        self._numbers = count()
        self._lock = threading.Lock()
        self._dead: EngineDead | None = None
        self._died: Callable[[EngineDead], None] | None = None
        self._stopping = False
        self._description = ModelDescription()
        self._seconds: float | None = None
        self._codec = PlanCodec(())
        #: Reports of the other ranks since the last result.
        self._reports: list[PartReport] = []
        #: The rank that returns results: the first of the last stage; and all that sample.
        self._output_rank = 0
        self._sampling_ranks: Sequence[int] = (0,)
        self._reader: threading.Thread | None = None
        #: Rings for plans and for results, if all workers are on this machine.
        self._rings: tuple[Ring, Ring] | None = None
        self._landing = threading.Lock()
        self._bell = select.poll()
        #: Seconds spent waiting for the last result.
        self._waited = 0.0
        #: For replicas that share experts: the passes of all replicas, and an encoded empty plan.
        self._rounds: Rounds | None = None
        self._empty = b""
        self._empty_pass_thread: threading.Thread | None = None
        #: When the last step ended (monotonic seconds), and how long until the next one begins.
        self._ended = self._gap = 0.0

    @abstractmethod
    def connect(self, config: EngineConfig) -> Sequence[tuple[FrameStream, RankSpec]]:
        """Start the workers' processes; returns the connection and the spec of each, by rank."""

    @abstractmethod
    def end(self, seconds: float) -> None:
        """Wait for the processes to end; kill them after this many seconds."""

    def at(self, rank: int) -> str:
        """Return the name of a rank for error messages."""
        return f"worker {rank}"

    @abstractmethod
    def ending(self, rank: int) -> str:
        """Return how the process of a rank ended, for error messages."""

    def trouble(self) -> str | None:
        """Why a rank whose process exists does not respond, or None. Called on any thread."""
        return None

    def start(self, config: EngineConfig) -> Capacity:
        flags = config.group(DistributedConfig)
        self._seconds = flags.worker_timeout or None
        self._output_rank = config.parallel.ranks - config.parallel.tensor_parallel_size
        self._codec = PlanCodec(open_parts(config, manager.current()))
        plugins = frames.pack_plugins(manager.current().snapshot())
        packed = frames.pack_config(config), plugins
        try:
            connected = self.connect(config)
            self._streams = [stream for stream, _ in connected]
            repeating = [spec.rank for _, spec in connected if spec.repeats]
            self._sampling_ranks = (self._output_rank, *repeating)
            if all(stream.local for stream in self._streams):
                self._rings = Ring.create(len(connected)), Ring.create(1)
                self._bell.register(self._rings[1].bell(), select.POLLIN)
            shared = [d for ring in self._rings or () for d in ring.descriptors]
            for stream, spec in connected:
                stream.send(frames.pack("start", *packed, attrs.asdict(spec)), shared)
            capacity, self._description = self._ready()
            self._join(config.parallel, capacity)
        except BaseException:
            self.stop()
            raise
        self._reader = threading.Thread(target=self._read, name="modulm-workers", daemon=True)
        self._reader.start()
        return capacity

    def _join(self, parallel: ParallelConfig, capacity: Capacity) -> None:
        """Synchronize steps with the other replicas, if they share experts."""
        if parallel.data_parallel_group is None:
            return
        replica, size = parallel.data_parallel_rank_local, parallel.data_parallel_size
        self._rounds = Rounds(parallel.data_parallel_group, replica, size)
        one = np.ones(1, np.int32)
        tables = tuple(np.zeros((1, 1), np.int32) for _ in capacity.groups)
        self._empty = self._codec.encode_plan(
            Plan(
                step=-1,
                rows=-one,
                starts=one - 1,
                counts=one,
                tokens=np.zeros(1, np.int64),
                tables=tables,
                samples=np.zeros(1, bool),
            )
        )
        self._empty_pass_thread = threading.Thread(
            target=self._run_empty_passes, args=(self._rounds,), name="modulm-rounds", daemon=True
        )
        self._empty_pass_thread.start()

    def _ready(self) -> tuple[Capacity, ModelDescription]:
        """Wait until all ranks have loaded; returns the output rank's capacity and description."""
        frames_by_rank: dict[int, list[Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, stream in enumerate(self._streams):
                selector.register(stream, selectors.EVENT_READ, rank)
            while len(frames_by_rank) < len(self._streams):
                for key, _ in selector.select():
                    frame = self._streams[key.data].receive()
                    if frame is None:
                        raise EngineDead(f"{self.at(key.data)}: {self.ending(key.data)}")
                    if frame[0] == "error":
                        raise self._start_error(key.data, frame[1])
                    frames_by_rank[key.data] = frame
        _, capacity, description = frames_by_rank[self._output_rank]
        described = frames.unpack_description(description)
        repeating = self._sampling_ranks[1:]
        weights = sum(
            frame[2]["weight_bytes"]
            for rank, frame in frames_by_rank.items()
            if rank not in repeating
        )
        return unpack_capacity(capacity), attrs.evolve(described, weight_bytes=weights)

    def _start_error(self, rank: int, packed: list[Any] | None) -> ModulmError:
        error = frames.unpack_error(packed) or EngineDead("a worker did not start")
        if isinstance(error, PluginConflict):
            return PluginConflict(f"{self.at(rank)}: {error}")
        return error

    # Steps.

    def run(self, plan: Plan) -> StepResult:
        return self.submit(plan).result()

    def submit(self, plan: Plan) -> Future[StepResult]:
        data, future = self._codec.encode_plan(plan), _Step(self._land)
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._dead)
                return future
            self._steps[plan.step] = time.monotonic(), future
        if self._rounds is None:
            self._send_plan(data)
        else:
            if (gap := time.monotonic() - self._ended) < _IDLE:
                self._gap = gap
            with self._rounds.order:
                if len(plan.rows):
                    self._rounds.begin()
                self._send_plan(data)
        return future

    def _send_plan(self, data: bytes) -> None:
        """Send a plan to all ranks."""
        if self._rings is None or not self._rings[0].write(data, lambda: self._dead is None):
            self._broadcast(frames.pack("run", data))

    def _run_empty_passes(self, rounds: Rounds) -> None:
        """Run an empty pass for each pass of another replica while this one is idle; the body of a
        thread. A replica that is running, or has just run, starts its next pass itself.
        """
        while rounds.wait():
            while rounds.behind and self._dead is None:
                if self._steps or time.monotonic() - self._ended < max(_NEXT, 2 * self._gap):
                    time.sleep(_NEXT)
                    continue
                with rounds.order:
                    if rounds.behind and not self._steps:
                        rounds.begin()
                        self._send_plan(self._empty)

    def _land(self, step: _Step) -> None:
        """Read results until that of `step` has arrived."""
        if self._rings is None:
            return
        with self._landing:
            began = time.perf_counter()
            while not step.done():
                wait(self._bell, SHORT if self._waited < SHORT else 0.0)
                for data in self._rings[1].frames():
                    if len(data):  # longer results come over the stream
                        self._resolve_step(self._codec.decode_result(data))
            self._waited = time.perf_counter() - began

    def _resolve_step(self, result: StepResult) -> None:
        step = self._resolve(result.step)
        if step is not None:
            with self._lock:
                reports, self._reports = self._reports, []
            if reports:
                result = attrs.evolve(result, parts=(*result.parts, *reports))
            step.set_result(result)

    def _wake(self) -> None:
        """Wake the thread that waits for a result, to check whether its step has failed."""
        if self._rings is not None:
            self._rings[1].wake()

    def _broadcast(self, data: bytes) -> None:
        for rank, stream in enumerate(self._streams):
            try:
                stream.send(data)
            except OSError:
                self._die(EngineDead(f"{self.at(rank)}: {self.ending(rank)}"))
                return

    # Frames from workers, on the reading thread.

    def _read(self) -> None:
        try:
            self._listen()
        except Exception as error:
            log.exception("a frame from a worker cannot be read")
            self._die(EngineDead(f"a frame from a worker cannot be read: {error}"))

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, stream in enumerate(self._streams):
                selector.register(stream, selectors.EVENT_READ, rank)
            while self._dead is None and not self._stopping:
                for key, _ in selector.select(_LOOK):
                    rank = key.data
                    if not self._streams[rank].read():
                        if not self._stopping:
                            self._die(EngineDead(f"{self.at(rank)}: {self.ending(rank)}"))
                        return
                    while (frame := self._streams[rank].waiting()) is not None:
                        self._handle(rank, *frame)
                self._check_steps()

    def _handle(self, rank: int, kind: str, *arguments: Any) -> None:
        if kind == "result":
            self._resolve_step(self._codec.decode_result(arguments[0]))
            self._wake()
        elif kind == "reports":
            with self._lock:
                self._reports += self._codec.decode_reports(arguments[0])
        elif kind == "failed":
            self._handle_failed_step(rank, *arguments)
        elif kind == "error":
            self._die(EngineDead(f"{self.at(rank)}: {frames.unpack_error(arguments[0])}"))
        else:
            self._handle_answer(rank, *arguments)

    def _resolve(self, step: int) -> Future[StepResult] | None:
        """Remove a step and return its future; None if it was removed before."""
        with self._lock:
            self._ended = time.monotonic()
            return self._steps.pop(step, (0.0, None))[1]

    def _handle_failed_step(self, rank: int, step: int, error: list[Any]) -> None:
        """Fail a step once all ranks have reported its failure. If only some do, the others hang,
        as do replicas that share experts with this one.
        """
        _, reported = self._failed.setdefault(step, (time.monotonic(), {}))
        reported[rank] = frames.unpack_error(error) or EngineError("a step failed")
        if len(reported) == len(self._streams) and self._rounds is None:
            del self._failed[step]
            future = self._resolve(step)
            if future is not None:
                future.set_exception(reported[rank])
                self._wake()

    def _check_steps(self) -> None:
        """End the engine if a step failed on some ranks only, or takes too long."""
        now = time.monotonic()
        most, others = _ALL_FAIL, "some ranks"
        if self._rounds is not None:
            most, others = _FIRST_DEAD, "this replica"
        for step, (since, reported) in self._failed.items():
            if now - since > most:
                failures = "; ".join(
                    f"{self.at(rank)}: {error}" for rank, error in reported.items()
                )
                self._die(EngineDead(f"step {step} failed on {others} only ({failures})"))
                return
        with self._lock:
            step, since = next(((s, t) for s, (t, _) in self._steps.items()), (0, now))
        if self._seconds is not None and now - since > self._seconds:
            failures = f"step {step} took longer than --worker-timeout, {self._seconds:.0f} s"
            self._die(EngineDead(failures))

    def _handle_answer(self, rank: int, number: int, value: Any, error: list[Any] | None) -> None:
        call = self._calls[number]
        call.missing.discard(rank)
        call.values[rank] = value
        failed = frames.unpack_error(error)
        if failed is not None and not call.answer.done():
            if call.named and isinstance(failed, EngineError):
                failed = type(failed)(f"{self.at(rank)}: {failed}")
            call.answer.set_exception(failed)
        if not call.missing:
            del self._calls[number]
            if not call.answer.done():
                call.answer.set_result([call.values[rank] for rank in sorted(call.values)])

    def _die(self, error: EngineDead) -> None:
        """Kill the processes and fail all steps and calls."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
            steps = [future for _, future in self._steps.values()]
            waiting = [*steps, *(call.answer for call in self._calls.values())]
            self._steps.clear()
            self._calls.clear()
        log.error("%s", error)
        self.end(0)
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        self._wake()
        if self._died is not None:
            self._died(error)

    # Calls between steps.

    def watch(self, died: Callable[[EngineDead], None]) -> None:
        self._died = died

    def describe(self) -> ModelDescription:
        return self._description

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        return self._ask("prepare", request, changed(constraint), ranks=self._sampling_ranks)

    def forget(self, request: str) -> None:
        self._ask("call", "forget", request, ranks=self._sampling_ranks)

    def check(self) -> None:
        self._ask("call", "check").result(self._seconds)

    def sleep(self, level: int) -> None:
        self._ask("call", "sleep", level).result(self._seconds)

    def wake_up(self) -> None:
        self._ask("call", "wake_up").result()

    def add_adapter(self, name: str, path: Path) -> None:
        self._ask("call", "add_adapter", name, str(path)).result()

    def prepare_adapter(self, name: str) -> None:
        self._ask("call", "prepare_adapter", name).result()

    def remove_adapter(self, name: str) -> None:
        self._ask("call", "remove_adapter", name).result()

    def call(
        self,
        function: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        name = function_name(function)
        with self._lock:
            steps = [future for _, future in self._steps.values()]
        for step in steps:  # their time does not include the call's
            step.exception()
        number, call = next(self._numbers), _Call(set(range(len(self._streams))), named=True)
        data = pack_call("function", number, name, args, kwargs)
        with nullcontext() if self._rounds is None else self._rounds.order:
            self._send_call(number, call, data)
            if self._rings is not None:
                self._rings[0].write(b"", lambda: self._dead is None)
        try:
            return list(call.answer.result(timeout))
        except TimeoutError as error:
            if call.answer.done():
                raise
            ranks = ", ".join(map(self.at, sorted(call.missing)))
            message = f"{name}: no answer from {ranks} within {timeout:g} s"
            raise EngineTimeout(message) from error

    def _ask(self, kind: str, *arguments: Any, ranks: Sequence[int] | None = None) -> Future[Any]:
        """Call a function on the ranks, all by default; done when each has answered."""
        targets = range(len(self._streams)) if ranks is None else ranks
        number, call = next(self._numbers), _Call(set(targets))
        what, rest = (kind, arguments) if kind == "prepare" else ("call", arguments)
        self._send_call(number, call, frames.pack(what, number, *rest))
        return call.answer

    def _send_call(self, number: int, call: _Call, data: bytes) -> None:
        """Send a call to its ranks."""
        call.answer.set_running_or_notify_cancel()
        with self._lock:
            if self._dead is not None:
                call.answer.set_exception(self._dead)
                return
            self._calls[number] = call
        for rank in sorted(call.missing):
            with suppress(OSError):  # the reading thread notices the loss
                self._streams[rank].send(data)

    def stop(self) -> None:
        self._stopping = True
        for stream in self._streams:
            stream.end()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        for stream in self._streams:
            stream.close()
        self._streams = []
        with self._lock:  # later steps and calls get an error
            self._dead = self._dead or EngineDead("the executor was stopped")
        self._close_rings()
        self._leave()
        self.end(_GRACE)

    def _leave(self) -> None:
        """Stop synchronizing with other replicas."""
        if self._rounds is not None and self._empty_pass_thread is not None:
            self._rounds.end()
            self._empty_pass_thread.join()
            self._rounds.close()

    def _close_rings(self) -> None:
        rings, self._rings = self._rings or (), None
        for ring in rings:
            ring.close()
