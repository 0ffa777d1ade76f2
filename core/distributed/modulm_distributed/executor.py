"""What executors are written with whose workers are processes, here or elsewhere."""

from __future__ import annotations

import logging
import selectors
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs

from modulm.contracts.executor import Capacity, Executor, ModelDescription, StepResult
from modulm.engine.types import frames
from modulm.engine.types.packing import changed
from modulm.errors import EngineDead, EngineError, ModulmError
from modulm.plugins import manager
from modulm_distributed.flags import DistributedConfig
from modulm_distributed.plan_codec import decode_result, encode_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from modulm.config import EngineConfig
    from modulm.contracts.executor import Plan
    from modulm.contracts.sampling import StructuredOutputs
    from modulm_distributed.mesh import Place
    from modulm_distributed.stream import FrameStream

__all__ = ["WorkersExecutor"]

log = logging.getLogger("modulm.engine")

#: Seconds that the other ranks have to report a step that failed on one of them.
_ALL_FAIL = 5.0
#: Seconds that workers have to end when they are told to.
_GRACE = 10.0
#: Seconds between two looks at steps that do not end.
_LOOK = 1.0


class WorkersExecutor(Executor):
    """Gives every plan to all ranks, and takes results from the one that gives them.

    A thread reads what the ranks say, so that a death is known at once, in a step or between two.
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
        #: The rank that gives results: the first of the last stage.
        self._giver = 0
        self._reader: threading.Thread | None = None

    @abstractmethod
    def connect(self, config: EngineConfig) -> Sequence[tuple[FrameStream, Place]]:
        """Start the workers' processes: the connection and the place of each, by rank."""

    @abstractmethod
    def end(self, seconds: float) -> None:
        """End the processes, by force if they have not ended after so many seconds."""

    @abstractmethod
    def ending(self, rank: int) -> str:
        """How the process of a rank ended, for people."""

    def start(self, config: EngineConfig) -> Capacity:
        flags = config.group(DistributedConfig)
        self._seconds = flags.worker_timeout or None
        self._giver = config.parallel.ranks - config.parallel.tensor_parallel_size
        plugins = frames.pack_plugins(manager.current().snapshot())
        packed = frames.pack_config(config), plugins
        try:
            for stream, place in self.connect(config):
                self._streams.append(stream)
                stream.send(frames.pack("start", *packed, attrs.asdict(place)))
            capacity, self._description = self._ready()
        except BaseException:
            self.stop()
            raise
        self._reader = threading.Thread(target=self._read, name="modulm-workers", daemon=True)
        self._reader.start()
        return capacity

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
                        raise EngineDead(f"worker {key.data}: {self.ending(key.data)}")
                    if frame[0] == "error":
                        raise frames.unpack_error(frame[1]) or EngineDead("a worker did not start")
                    said[key.data] = frame
        _, capacity, description = said[self._giver]
        capacity["groups"] = tuple(tuple(group) for group in capacity["groups"])
        capacity["notes"] = tuple(capacity["notes"])
        described = frames.unpack_description(description)
        weights = sum(frame[2]["weight_bytes"] for frame in said.values())
        return Capacity(**capacity), attrs.evolve(described, weight_bytes=weights)

    # Steps.

    def run(self, plan: Plan) -> StepResult:
        return self.submit(plan).result()

    def submit(self, plan: Plan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        with self._lock:
            if self._dead is not None:
                future.set_exception(self._dead)
                return future
            self._steps[plan.step] = time.monotonic(), future
        self._broadcast(frames.pack("run", encode_plan(plan)))
        return future

    def _broadcast(self, data: bytes) -> None:
        for rank, stream in enumerate(self._streams):
            try:
                stream.send(data)
            except OSError:
                self._die(EngineDead(f"worker {rank}: {self.ending(rank)}"))
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
                            self._die(EngineDead(f"worker {rank}: {self.ending(rank)}"))
                        return
                    while (frame := self._streams[rank].waiting()) is not None:
                        self._heard(rank, *frame)
                self._look()

    def _heard(self, rank: int, kind: str, *arguments: Any) -> None:
        if kind == "result":
            result = decode_result(arguments[0])
            self._resolve(result.step).set_result(result)
        elif kind == "failed":
            self._step_failed(rank, *arguments)
        elif kind == "error":
            self._die(EngineDead(f"worker {rank}: {frames.unpack_error(arguments[0])}"))
        else:
            self._answered(rank, *arguments)

    def _resolve(self, step: int) -> Future[StepResult]:
        with self._lock:
            _, future = self._steps.pop(step, (0.0, Future()))
        return future

    def _step_failed(self, rank: int, step: int, error: list[Any]) -> None:
        """A step has failed once all ranks say so; where some do not, they wait for ever."""
        _, reported = self._failed.setdefault(step, (time.monotonic(), {}))
        reported[rank] = frames.unpack_error(error) or EngineError("a step failed")
        if len(reported) == len(self._streams):
            del self._failed[step]
            self._resolve(step).set_exception(reported[rank])

    def _look(self) -> None:
        """Give up steps that failed on some ranks and not on all, and those that do not end."""
        now = time.monotonic()
        for step, (since, reported) in self._failed.items():
            if now - since > _ALL_FAIL:
                words = "; ".join(f"worker {rank}: {error}" for rank, error in reported.items())
                self._die(EngineDead(f"step {step} failed on some ranks only ({words})"))
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
        self.end(_GRACE)
