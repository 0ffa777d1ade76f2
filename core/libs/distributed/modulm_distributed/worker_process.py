"""The process of a worker: `python -m modulm_distributed.worker_process DESCRIPTOR`.

executor                              worker
         --start (flags, plugins, place)-->   with the descriptors of rings, if there are any
         <--ready (capacity, description)--   or error
         --run (plan)-->                      each plan to every rank, in one order; one whose
                                              step is -1 only takes part and has no result
         <--result (step)--                   of the rank that gives results
         <--reports (of step parts)--         of the other ranks, if there are any
         <--failed (step, error)--            of any rank
         --call (number, what, arguments)-->
         <--answer (number, value, error)--

On one machine plans and results go through shared memory (`Ring`); those too long for it go
over the stream, and an empty frame in the ring says when it is a plan's turn.

The worker ends when its connection does, so it never outlives its executor.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import ConfigError, EngineError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.wire import frames
from modulm_distributed.eplb import balance_of
from modulm_distributed.mesh import Place, open_mesh
from modulm_distributed.plan_codec import PlanCodec
from modulm_distributed.replica_experts import ReplicaExperts
from modulm_distributed.ring import SPIN, Ring, wait
from modulm_distributed.stream import FrameStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from modulm.contracts.platform import Platform
    from modulm.engine.worker.worker import Worker
    from modulm.parallel import Mesh

__all__ = ["main", "serve"]

log = logging.getLogger("modulm.worker")

#: Seconds between two looks for the process that started this one.
_LOOK = 1.0


class _Plans:
    """Plans and what else is asked, from the stream and from the ring."""

    def __init__(self, stream: FrameStream, ring: Ring | None, rank: int) -> None:
        self._stream, self._ring, self._rank = stream, ring, rank
        self._long: deque[list[Any]] = deque()
        self._poll = select.poll()
        self._poll.register(stream.fileno(), select.POLLIN)
        if ring is not None:
            self._poll.register(ring.bell(rank), select.POLLIN)

    def __iter__(self) -> Iterator[list[Any]]:
        """Frames until the connection ends."""
        stream, ring = self._stream, self._ring
        while True:
            while (frame := stream.waiting()) is not None:
                if ring is not None and frame[0] == "run":
                    self._long.append(frame)
                else:
                    yield frame
            ready = [number for number, _ in wait(self._poll, SPIN)]
            if ring is not None and ring.bell(self._rank) in ready:
                for data in ring.frames(self._rank):
                    yield ["run", data] if len(data) else self._long_plan()
            elif not stream.read():
                return

    def _long_plan(self) -> list[Any]:
        """The next plan that comes over the stream. Only what the order of plans does not matter
        to may come before it.
        """
        while not self._long:
            frame = self._stream.receive()
            if frame is None:
                raise EngineError("the executor has gone")
            self._long.append(frame)
        return self._long.popleft()


class _Served:
    """A worker and what an executor may ask of it."""

    def __init__(
        self, worker: Worker, stream: FrameStream, mesh: Mesh, results: Ring | None
    ) -> None:
        self._worker, self._stream, self._gives = worker, stream, mesh.gives
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
            "call": worker.call,
        }

    def frame(self, kind: str, *arguments: Any) -> None:
        """Do what a frame says."""
        if kind == "run":
            self._run(*arguments)
        elif kind == "prepare":
            self._prepare(*arguments)
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
        if not self._gives:
            if (reports := self._codec.encode_reports(result)) is not None:
                self._send("reports", reports)
            return
        given = self._codec.encode_result(result)
        if self._results is None or not self._results.write(given):
            self._send("result", given)

    def _call(self, number: int, what: str, *arguments: Any) -> None:
        value = error = None
        try:
            value = self._calls[what](*arguments)
        except Exception as failed:
            error = failed
        self._answer(number, value, error)

    def _prepare(self, number: int, request: str, constraint: dict[str, Any]) -> None:
        """Beside the steps: the answer is sent when the constraint is compiled."""
        try:
            ready = self._worker.prepare(request, StructuredOutputs(**constraint))
        except Exception as error:
            self._answer(number, None, error)
            return
        ready.add_done_callback(partial(self._prepared, number))

    def _prepared(self, number: int, ready: Future[None]) -> None:
        self._answer(number, None, ready.exception())

    def _answer(self, number: int, value: Any, error: BaseException | None) -> None:
        self._send("answer", number, value, frames.pack_error(error))

    def _send(self, *frame: Any) -> None:
        self._stream.send(frames.pack(*frame))


def serve(stream: FrameStream) -> bool:
    """Be a worker until nobody asks any more, or ("stop") until it is told to end: whether the
    connection is still there.
    """
    frame = stream.receive()
    if frame is None:
        return False
    rings: list[Ring] = []
    try:
        _, flags, packed, place = frame
        rings = _rings(stream)
        plugins = PluginManager.replay(frames.unpack_plugins(packed))
        with manager.using(plugins):
            worker, mesh = _started(plugins, flags, Place(**place))
            capacity, description = worker.capacity, worker.description
            stream.send(frames.pack("ready", attrs.asdict(capacity), attrs.asdict(description)))
            plans, results = rings or (None, None)
            served, frame = _Served(worker, stream, mesh, results), None
            for asked in _Plans(stream, plans, place["rank"]):
                if asked[0] == "stop":
                    frame = asked
                    break
                served.frame(*asked)
            worker.close()
    except Exception as error:
        log.exception("the worker cannot go on")
        stream.send(frames.pack("error", frames.pack_error(error)))
        frame = stream.receive()
    finally:
        for ring in rings:
            ring.close()
    if frame is not None:
        stream.send(frames.pack("stopped"))
    return frame is not None


def _rings(stream: FrameStream) -> list[Ring]:
    """Those for plans and for results, whose descriptors came with the first frame, if any did."""
    came, stream.descriptors = stream.descriptors, []
    return [Ring(came[0], came[1:-2]), Ring(came[-2], came[-1:])] if came else []


def _started(plugins: PluginManager, flags: dict[str, Any], place: Place) -> tuple[Worker, Mesh]:
    """The worker, and its ranks."""
    from modulm.engine.worker.worker import worker_class

    opened: list[Mesh] = []

    config = frames.unpack_config(flags)

    def connect(platform: Platform) -> Mesh:
        opened.append(open_mesh(place, platform, plugins, balance_of(config)))
        return opened[0]

    share = None if place.share is None else (place.share[0], place.share[1])
    made = worker_class(config)
    worker = made(config, plugins, rank=place.rank, open_mesh=connect, share=share)
    experts = opened[0].spread
    if isinstance(experts, ReplicaExperts) and not experts.used(opened[0].world):
        words = "this model has no experts that replicas could share: leave it out"
        raise ConfigError("enable_expert_parallel", words)
    return worker, opened[0]


def _end_with(parent: int, folder: str) -> None:
    """End this process when the one that started it is gone, also in a step that does not end; the
    body of a thread.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(descriptor: str, folder: str | None = None) -> None:
    """descriptor: of the inherited socket to the executor. folder: of files that the ranks of this
    machine share, to be removed if the executor was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
