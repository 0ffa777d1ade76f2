"""What executors are written with whose workers are processes, here or elsewhere."""

from __future__ import annotations

import logging
import select
import selectors
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

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
from modulm.errors import EngineDead, EngineError, ModulmError, PluginConflict
from modulm.plugins import manager
from modulm.wire import frames
from modulm.wire.packing import changed
from modulm_distributed.flags import DistributedConfig
from modulm_distributed.plan_codec import PlanCodec
from modulm_distributed.ring import Ring, wait
from modulm_distributed.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.config.parallel import ParallelConfig
    from modulm.contracts.sampling import StructuredOutputs
    from modulm_distributed.mesh import Place
    from modulm_distributed.stream import FrameStream

__all__ = ["WorkersExecutor", "unpack_capacity"]

log = logging.getLogger("modulm.engine")

#: Seconds that the other ranks have to report a step that failed on one of them.
_ALL_FAIL = 5.0
#: Seconds that workers have to end when they are told to.
_GRACE = 10.0
#: Seconds between two looks at steps that do not end.
_LOOK = 1.0
#: Steps of fewer seconds are waited for awake.
_SHORT = 5e-4
#: Seconds after a step in which the next one may come before a replica that shares experts is given
#: an empty one, at least, and between two looks at that.
_NEXT = 3e-3
#: Seconds between two steps that are no measure of it: there was nothing to do.
_IDLE = 5e-2
#: Seconds that a step may have failed before its replica ends: one whose rank died says so first.
_FIRST_DEAD = 1.0


def unpack_capacity(table: dict[str, Any]) -> Capacity:
    """From its fields as plain values."""
    groups = tuple(GroupCapacity(**group) for group in table["groups"])
    return Capacity(**{**table, "groups": groups, "notes": tuple(table["notes"])})


class _Step(Future[StepResult]):
    """A step under way. Who waits for it reads results until it is there."""

    def __init__(self, land: Callable[[_Step], None]) -> None:
        super().__init__()
        self._land = land

    def result(self, timeout: float | None = None) -> StepResult:
        self._land(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._land(self)
        return super().exception(timeout)


class WorkersExecutor(Executor):
    """Gives every plan to all ranks, and takes results from the one that gives them.

    On one machine plans and results go through shared memory (`Ring`), and who waits for a result
    reads it. A thread reads what else the ranks say, so that a death is known at once, in a step or
    between two.
    A subclass starts the processes (`connect`) and can end them (`end`).
    """

    def __init__(self) -> None:
        self._streams: list[FrameStream] = []
        #: Of each step under way: since when (monotonic seconds), its result, and what failed.
        self._steps: dict[int, tuple[float, Future[StepResult]]] = {}
        self._failed: dict[int, tuple[float, dict[int, ModulmError]]] = {}
        self._calls: dict[int, tuple[Future[Any], set[int]]] = {}
        self._numbers = count()
        self._lock = threading.Lock()
        self._dead: EngineDead | None = None
        self._died: Callable[[EngineDead], None] | None = None
        self._stopping = False
        self._description = ModelDescription()
        self._seconds: float | None = None
        self._codec = PlanCodec(())
        #: What ranks whose results nobody looks at have reported since the last result.
        self._reports: list[PartReport] = []
        #: The rank that gives results: the first of the last stage.
        self._giver = 0
        self._reader: threading.Thread | None = None
        #: For plans and for results, where all workers are on this machine.
        self._rings: tuple[Ring, Ring] | None = None
        self._landing = threading.Lock()
        self._bell = select.poll()
        #: Seconds that the result of the last step was waited for.
        self._waited = 0.0
        #: Where replicas share experts: the passes of all, and what this one begins without work.
        self._rounds: Rounds | None = None
        self._empty = b""
        self._partaker: threading.Thread | None = None
        #: When the last step ended (monotonic seconds), and how long until the next one begins.
        self._ended = self._gap = 0.0

    @abstractmethod
    def connect(self, config: EngineConfig) -> Sequence[tuple[FrameStream, Place]]:
        """Start the workers' processes: the connection and the place of each, by rank."""

    @abstractmethod
    def end(self, seconds: float) -> None:
        """End the processes, by force if they have not ended after so many seconds."""

    def at(self, rank: int) -> str:
        """What a rank is called for people."""
        return f"worker {rank}"

    @abstractmethod
    def ending(self, rank: int) -> str:
        """How the process of a rank ended, for people."""

    def start(self, config: EngineConfig) -> Capacity:
        flags = config.group(DistributedConfig)
        self._seconds = flags.worker_timeout or None
        self._giver = config.parallel.ranks - config.parallel.tensor_parallel_size
        self._codec = PlanCodec(open_parts(config, manager.current()))
        plugins = frames.pack_plugins(manager.current().snapshot())
        packed = frames.pack_config(config), plugins
        try:
            connected = self.connect(config)
            self._streams = [stream for stream, _ in connected]
            if all(stream.local for stream in self._streams):
                self._rings = Ring.made(len(connected)), Ring.made(1)
                self._bell.register(self._rings[1].bell(), select.POLLIN)
            shared = [d for ring in self._rings or () for d in ring.descriptors]
            for stream, place in connected:
                stream.send(frames.pack("start", *packed, attrs.asdict(place)), shared)
            capacity, self._description = self._ready()
            self._join(config.parallel, capacity)
        except BaseException:
            self.stop()
            raise
        self._reader = threading.Thread(target=self._read, name="modulm-workers", daemon=True)
        self._reader.start()
        return capacity

    def _join(self, parallel: ParallelConfig, capacity: Capacity) -> None:
        """Keep step with the other replicas, if experts are shared."""
        if parallel.data_parallel_group is None:
            return
        place, size = parallel.data_parallel_rank_local, parallel.data_parallel_size
        self._rounds = Rounds(parallel.data_parallel_group, place, size)
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
        self._partaker = threading.Thread(
            target=self._take_part, args=(self._rounds,), name="modulm-rounds", daemon=True
        )
        self._partaker.start()

    def _ready(self) -> tuple[Capacity, ModelDescription]:
        """Wait until all ranks have loaded their part; what the last one, which gives, can hold."""
        said: dict[int, list[Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, stream in enumerate(self._streams):
                selector.register(stream, selectors.EVENT_READ, rank)
            while len(said) < len(self._streams):
                for key, _ in selector.select():
                    frame = self._streams[key.data].receive()
                    if frame is None:
                        raise EngineDead(f"{self.at(key.data)}: {self.ending(key.data)}")
                    if frame[0] == "error":
                        raise self._not_started(key.data, frame[1])
                    said[key.data] = frame
        _, capacity, description = said[self._giver]
        described = frames.unpack_description(description)
        weights = sum(frame[2]["weight_bytes"] for frame in said.values())
        return unpack_capacity(capacity), attrs.evolve(described, weight_bytes=weights)

    def _not_started(self, rank: int, packed: list[Any] | None) -> ModulmError:
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
            self._give(data)
        else:
            if (gap := time.monotonic() - self._ended) < _IDLE:
                self._gap = gap
            with self._rounds.order:
                if len(plan.rows):
                    self._rounds.begin()
                self._give(data)
        return future

    def _give(self, data: bytes) -> None:
        """A plan to all ranks."""
        if self._rings is None or not self._rings[0].write(data, lambda: self._dead is None):
            self._broadcast(frames.pack("run", data))

    def _take_part(self, rounds: Rounds) -> None:
        """Begin an empty pass for each of another replica that this one has no work for; the body
        of a thread. One that has steps under way, or has just had one, begins the next by itself.
        """
        while rounds.wait():
            while rounds.behind and self._dead is None:
                if self._steps or time.monotonic() - self._ended < max(_NEXT, 2 * self._gap):
                    time.sleep(_NEXT)
                    continue
                with rounds.order:
                    if rounds.behind and not self._steps:
                        rounds.begin()
                        self._give(self._empty)

    def _land(self, step: _Step) -> None:
        """Read results until the one of `step` is there."""
        if self._rings is None:
            return
        with self._landing:
            began = time.perf_counter()
            while not step.done():
                wait(self._bell, _SHORT if self._waited < _SHORT else 0.0)
                for data in self._rings[1].frames():
                    if len(data):  # a longer one comes over its stream
                        self._gave(self._codec.decode_result(data))
            self._waited = time.perf_counter() - began

    def _gave(self, result: StepResult) -> None:
        found = self._resolve(result.step)
        if found is not None:
            with self._lock:
                reports, self._reports = self._reports, []
            if reports:
                result = attrs.evolve(result, parts=(*result.parts, *reports))
            found.set_result(result)

    def _wake(self) -> None:
        """Let who waits for a step look whether it has ended in another way."""
        if self._rings is not None:
            self._rings[1].wake()

    def _broadcast(self, data: bytes) -> None:
        for rank, stream in enumerate(self._streams):
            try:
                stream.send(data)
            except OSError:
                self._die(EngineDead(f"{self.at(rank)}: {self.ending(rank)}"))
                return

    # What workers say, on the reading thread.

    def _read(self) -> None:
        try:
            self._listen()
        except Exception as error:
            log.exception("a worker sent what cannot be read")
            self._die(EngineDead(f"a worker sent what cannot be read: {error}"))

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
                        self._heard(rank, *frame)
                self._look()

    def _heard(self, rank: int, kind: str, *arguments: Any) -> None:
        if kind == "result":
            self._gave(self._codec.decode_result(arguments[0]))
            self._wake()
        elif kind == "reports":
            with self._lock:
                self._reports += self._codec.decode_reports(arguments[0])
        elif kind == "failed":
            self._step_failed(rank, *arguments)
        elif kind == "error":
            self._die(EngineDead(f"{self.at(rank)}: {frames.unpack_error(arguments[0])}"))
        else:
            self._answered(rank, *arguments)

    def _resolve(self, step: int) -> Future[StepResult] | None:
        """The step whose end is known, for who ends it; None: somebody else has."""
        with self._lock:
            self._ended = time.monotonic()
            return self._steps.pop(step, (0.0, None))[1]

    def _step_failed(self, rank: int, step: int, error: list[Any]) -> None:
        """A step has failed once all ranks say so; where some do not, they wait for ever, as do
        those of other replicas that share experts.
        """
        _, reported = self._failed.setdefault(step, (time.monotonic(), {}))
        reported[rank] = frames.unpack_error(error) or EngineError("a step failed")
        if len(reported) == len(self._streams) and self._rounds is None:
            del self._failed[step]
            found = self._resolve(step)
            if found is not None:
                found.set_exception(reported[rank])
                self._wake()

    def _look(self) -> None:
        """Give up steps that failed on some ranks and not on all, and those that do not end."""
        now = time.monotonic()
        most, others = _ALL_FAIL, "some ranks"
        if self._rounds is not None:
            most, others = _FIRST_DEAD, "this replica"
        for step, (since, reported) in self._failed.items():
            if now - since > most:
                words = "; ".join(f"{self.at(rank)}: {error}" for rank, error in reported.items())
                self._die(EngineDead(f"step {step} failed on {others} only ({words})"))
                return
        with self._lock:
            step, since = next(((s, t) for s, (t, _) in self._steps.items()), (0, now))
        if self._seconds is not None and now - since > self._seconds:
            words = f"step {step} took longer than --worker-timeout, {self._seconds:.0f} s"
            self._die(EngineDead(words))

    def _answered(self, rank: int, number: int, value: Any, error: list[Any] | None) -> None:
        answer, missing = self._calls[number]
        missing.discard(rank)
        failed = frames.unpack_error(error)
        if failed is not None and not answer.done():
            answer.set_exception(failed)
        if not missing:
            del self._calls[number]
            if not answer.done():
                answer.set_result(value)

    def _die(self, error: EngineDead) -> None:
        """Nothing can be run any more: the processes are ended, and all who wait are told."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
            steps = [future for _, future in self._steps.values()]
            waiting = [*steps, *(answer for answer, _ in self._calls.values())]
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

    # What is asked of workers beside steps.

    def watch(self, died: Callable[[EngineDead], None]) -> None:
        self._died = died

    def describe(self) -> ModelDescription:
        return self._description

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        return self._ask("prepare", request, changed(constraint), ranks=(self._giver,))

    def forget(self, request: str) -> None:
        self._ask("call", "forget", request, ranks=(self._giver,))

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

    def call(self, name: str, *arguments: Any) -> list[Any]:
        answers = [
            self._ask("call", "call", name, *arguments, ranks=(rank,))
            for rank in range(len(self._streams))
        ]
        values = []
        for rank, answer in enumerate(answers):
            try:
                values.append(answer.result(self._seconds))
            except EngineDead:
                raise
            except ModulmError as error:
                raise EngineError(f"{self.at(rank)}: {name}: {error}") from error
        return values

    def _ask(self, kind: str, *arguments: Any, ranks: Sequence[int] | None = None) -> Future[Any]:
        """Ask some ranks, or all: the answer is there when each has given one."""
        asked = range(len(self._streams)) if ranks is None else ranks
        number, answer = next(self._numbers), Future[Any]()
        answer.set_running_or_notify_cancel()
        with self._lock:
            if self._dead is not None:
                answer.set_exception(self._dead)
                return answer
            self._calls[number] = answer, set(asked)
        what, rest = (kind, arguments) if kind == "prepare" else ("call", arguments)
        data = frames.pack(what, number, *rest)
        for rank in asked:
            with suppress(OSError):  # the reading thread sees that it is gone
                self._streams[rank].send(data)
        return answer

    def stop(self) -> None:
        self._stopping = True
        for stream in self._streams:
            stream.end()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        for stream in self._streams:
            stream.close()
        self._streams = []
        self._close_rings()
        self._leave()
        self.end(_GRACE)

    def _leave(self) -> None:
        """Keep step with nobody any more."""
        if self._rounds is not None and self._partaker is not None:
            self._rounds.end()
            self._partaker.join()
            self._rounds.close()

    def _close_rings(self) -> None:
        rings, self._rings = self._rings or (), None
        for ring in rings:
            ring.close()
