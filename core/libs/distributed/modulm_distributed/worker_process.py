"""The process of a worker: `python -m modulm_distributed.worker_process DESCRIPTOR`.

executor                              worker
         --start (flags, plugins, spec)-->    with the descriptors of rings, if there are any
         <--ready (capacity, description)--   or error
         --run (plan)-->                      each plan to every rank, in one order; one whose
                                              step is -1 only takes part and has no result
         <--result (step)--                   of the output rank
         <--reports (of step parts)--         of the other ranks, if there are any
         <--failed (step, error)--            of any rank
         --call (number, name, arguments)-->
         --function (number, name, arguments)-->  of a package; to every rank, in order with plans
         <--answer (number, value, error)--

On one machine plans and results go through shared memory (`Ring`); those too long for it, and
calls of functions, go over the stream, and an empty frame in the ring says when it is their turn.

The worker ends when its connection closes, so it never outlives its executor.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import ConfigError, EngineError, ModulmError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm_distributed.choice import custom_sums
from modulm_distributed.eplb import balance_of
from modulm_distributed.mesh import RankSpec, open_mesh
from modulm_distributed.plan_codec import PlanCodec
from modulm_distributed.replica_experts import ReplicaExperts
from modulm_distributed.ring import SHORT, SPIN, Ring, wait
from modulm_distributed.stream import FrameStream
from modulm_distributed.worker_calls import pack_answer
from modulm_wire import frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from modulm.contracts.platform import Platform
    from modulm.engine.worker.worker import Worker
    from modulm.parallel import Mesh

__all__ = ["main", "serve"]

log = logging.getLogger("modulm.worker")

#: Kinds of frames that are announced by an empty frame in the ring.
_ORDERED = ("run", "function")
#: Seconds between two checks that the parent process lives.
_LOOK = 1.0


class _Plans:
    """Plans and calls, from the stream and from the ring."""

    def __init__(self, stream: FrameStream, ring: Ring | None, rank: int) -> None:
        self._stream, self._ring, self._rank = stream, ring, rank
        self._ordered: deque[list[Any]] = deque()
        self._gap = SHORT
        self._poll = select.poll()
        self._poll.register(stream.fileno(), select.POLLIN)
        if ring is not None:
            self._poll.register(ring.bell(rank), select.POLLIN)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield frames until the connection ends."""
        stream, ring = self._stream, self._ring
        while True:
            while (frame := stream.waiting()) is not None:
                if ring is not None and frame[0] in _ORDERED:
                    self._ordered.append(frame)
                else:
                    yield frame
            ready = self._wait()
            if ring is not None and ring.bell(self._rank) in ready:
                for data in ring.frames(self._rank):
                    if len(data):
                        yield ["run", data]
                    else:
                        yield from self._next_ordered()
            elif not stream.read():
                return

    def _wait(self) -> list[int]:
        """Return descriptors that are ready. If the last gap was short, this one probably is."""
        began = time.perf_counter()
        ready = wait(self._poll, SHORT if self._gap < SHORT else SPIN)
        self._gap = time.perf_counter() - began
        return [number for number, _ in ready]

    def _next_ordered(self) -> Iterator[list[Any]]:
        """Yield the stream's frames up to the next one that is in order with plans."""
        while not self._ordered:
            frame = self._stream.receive()
            if frame is None:
                raise EngineError("the executor has gone")
            if frame[0] in _ORDERED:
                self._ordered.append(frame)
            else:
                yield frame
        yield self._ordered.popleft()


class _WorkerServer:
    """Runs an executor's plans and calls on a worker."""

    def __init__(
        self, worker: Worker, stream: FrameStream, mesh: Mesh, results: Ring | None, repeats: bool
    ) -> None:
        self._worker, self._stream = worker, stream
        self._returns_results = mesh.gives and not repeats
        self._results = results
        self._codec = PlanCodec(worker.parts)
        self._experts = mesh.spread if isinstance(mesh.spread, ReplicaExperts) else None
        self._calls: dict[str, Callable[..., Any]] = {
            "check": worker.check,
            "sleep": worker.sleep,
            "wake_up": worker.wake_up,
            "forget": worker.forget,
            "add_adapter": lambda name, path: worker.add_adapter(name, Path(path)),
            "prepare_adapter": worker.prepare_adapter,
            "remove_adapter": worker.remove_adapter,
            "function": worker.call,
        }

    def frame(self, kind: str, *arguments: Any) -> None:
        """Handle a frame."""
        if kind == "run":
            self._run(*arguments)
        elif kind == "prepare":
            self._prepare(*arguments)
        elif kind == "function":
            number, *call = arguments
            self._call(number, kind, *call)
        else:
            self._call(*arguments)

    def _run(self, data: bytes | memoryview) -> None:
        plan = self._codec.decode_plan(data)
        empty = plan.step < 0
        if self._experts is not None:
            self._experts.empty = empty
        try:
            result = self._worker.run(plan)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            self._send("failed", plan.step, frames.pack_error(error))
            return
        if empty:
            return
        if not self._returns_results:
            if (reports := self._codec.encode_reports(result)) is not None:
                self._send("reports", reports)
            return
        encoded = self._codec.encode_result(result)
        if self._results is None or not self._results.write(encoded):
            self._send("result", encoded)

    def _call(self, number: int, what: str, *arguments: Any) -> None:
        value = error = None
        try:
            value = self._calls[what](*arguments)
        except Exception as failed:
            error = failed
        self._answer(number, value, error)

    def _prepare(self, number: int, request: str, constraint: dict[str, Any]) -> None:
        """Compile a constraint between steps; the answer follows when it is done."""
        try:
            ready = self._worker.prepare(request, StructuredOutputs(**constraint))
        except Exception as error:
            self._answer(number, None, error)
            return
        ready.add_done_callback(partial(self._prepared, number))

    def _prepared(self, number: int, ready: Future[None]) -> None:
        self._answer(number, None, ready.exception())

    def _answer(self, number: int, value: Any, error: BaseException | None) -> None:
        self._stream.send(pack_answer(number, value, error))

    def _send(self, *frame: Any) -> None:
        self._stream.send(frames.pack(*frame))


def serve(stream: FrameStream) -> bool:
    """Run a worker until the connection ends or a "stop" frame arrives; returns whether the
    connection is still open.
    """
    frame = stream.receive()
    if frame is None:
        return False
    rings: list[Ring] = []
    try:
        _, flags, packed, spec = frame
        rings = _rings(stream)
        plugins = PluginManager.replay(frames.unpack_plugins(packed))
        with manager.using(plugins):
            rank = RankSpec(**spec)
            worker, mesh = _start(plugins, flags, rank)
            capacity, description = worker.capacity, worker.description
            stream.send(frames.pack("ready", attrs.asdict(capacity), attrs.asdict(description)))
            plans, results = rings or (None, None)
            served, frame = _WorkerServer(worker, stream, mesh, results, rank.repeats), None
            for request in _Plans(stream, plans, rank.rank):
                if request[0] == "stop":
                    frame = request
                    break
                served.frame(*request)
            worker.close()
    except Exception as error:
        if not isinstance(error, ModulmError):  # the executor reports ModulmErrors by message
            log.exception("the worker has failed")
        frame = None
        with suppress(OSError):  # another rank's error has ended the executor
            stream.send(frames.pack("error", frames.pack_error(error)))
            frame = stream.receive()
    finally:
        for ring in rings:
            ring.close()
    if frame is not None:
        stream.send(frames.pack("stopped"))
    return frame is not None


def _rings(stream: FrameStream) -> list[Ring]:
    """Return the rings for plans and results, if their descriptors came with the first frame."""
    came, stream.descriptors = stream.descriptors, []
    return [Ring(came[0], came[1:-2]), Ring(came[-2], came[-1:])] if came else []


def _start(plugins: PluginManager, flags: dict[str, Any], spec: RankSpec) -> tuple[Worker, Mesh]:
    """Build the worker and connect it with the other ranks."""
    from modulm.engine.worker.worker import worker_class

    opened: list[Mesh] = []

    config = frames.unpack_config(flags)

    def connect(platform: Platform) -> Mesh:
        sums = custom_sums(config)
        opened.append(open_mesh(spec, platform, plugins, balance_of(config), custom_sums=sums))
        return opened[0]

    share = None if spec.host_slot is None else (spec.host_slot[0], spec.host_slot[1])
    worker_type = worker_class(config)
    worker = worker_type(config, plugins, rank=spec.rank, open_mesh=connect, share=share)
    experts = opened[0].spread
    if isinstance(experts, ReplicaExperts) and not experts.used(opened[0].world):
        message = "this model has no experts that replicas could share: leave it out"
        raise ConfigError("enable_expert_parallel", message)
    return worker, opened[0]


def _end_with(parent: int, folder: str) -> None:
    """End this process when its parent has died, even during a step; the body of a thread."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(descriptor: str, folder: str | None = None) -> None:
    """Run the process.

    descriptor: of the inherited socket to the executor. folder: of files that the ranks of this
    machine share, to be removed if the executor was killed.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal's signals are for the parent
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    peer = socket.socket(fileno=int(descriptor))
    if folder is not None:
        watching = partial(_end_with, os.getppid(), folder)
        threading.Thread(target=watching, name="modulm-parent", daemon=True).start()
    try:
        serve(FrameStream(peer))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
