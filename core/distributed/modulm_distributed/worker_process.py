"""The process of a worker: `python -m modulm_distributed.worker_process FD` or `HOST:PORT`.

executor                              worker
         --start (flags, plugins, place)-->
         <--ready (capacity, description)--   or error
         --run (plan)-->                      each plan to every rank, in one order
         <--result (step)--                   of the rank that gives results
         <--failed (step, error)--            of any rank
         --call (number, what, arguments)-->
         <--answer (number, value, error)--

The worker ends when its connection does, so it never outlives its executor.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from modulm.contracts.sampling import StructuredOutputs
from modulm.engine.types import frames
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm_distributed.mesh import Place, open_mesh
from modulm_distributed.plan_codec import decode_plan, encode_result
from modulm_distributed.stream import FrameStream

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from modulm.contracts.platform import Platform
    from modulm.engine.worker.worker import Worker
    from modulm.parallel import Mesh

__all__ = ["main", "serve"]

log = logging.getLogger("modulm.worker")


class _Served:
    """A worker and what an executor may ask of it."""

    def __init__(self, worker: Worker, stream: FrameStream, gives: bool) -> None:
        self._worker, self._stream, self._gives = worker, stream, gives
        self._calls: dict[str, Callable[..., Any]] = {
            "check": worker.check,
            "sleep": worker.sleep,
            "wake_up": worker.wake_up,
            "forget": worker.forget,
            "add_adapter": lambda name, path: worker.add_adapter(name, Path(path)),
            "prepare_adapter": worker.prepare_adapter,
            "remove_adapter": worker.remove_adapter,
        }

    def frame(self, kind: str, *arguments: Any) -> None:
        """Do what a frame says."""
        if kind == "run":
            self._run(*arguments)
        elif kind == "prepare":
            self._prepare(*arguments)
        else:
            self._call(*arguments)

    def _run(self, data: bytes) -> None:
        plan = decode_plan(data)
        try:
            result = self._worker.run(plan)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            self._send("failed", plan.step, frames.pack_error(error))
            return
        if self._gives:
            self._send("result", encode_result(result))

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
    try:
        _, flags, packed, place = frame
        plugins = PluginManager.replay(frames.unpack_plugins(packed))
        with manager.using(plugins):
            worker, gives = _started(plugins, flags, Place(**place))
            capacity, description = worker.capacity, worker.description
            stream.send(frames.pack("ready", attrs.asdict(capacity), attrs.asdict(description)))
            served = _Served(worker, stream, gives)
            while (frame := stream.receive()) is not None and frame[0] != "stop":
                served.frame(*frame)
            worker.close()
    except Exception as error:
        log.exception("the worker cannot go on")
        stream.send(frames.pack("error", frames.pack_error(error)))
        frame = stream.receive()
    if frame is not None:
        stream.send(frames.pack("stopped"))
    return frame is not None


def _started(plugins: PluginManager, flags: dict[str, Any], place: Place) -> tuple[Worker, bool]:
    """The worker, and whether it gives results."""
    from modulm.engine.worker.worker import Worker

    opened: list[Mesh] = []

    def connect(platform: Platform) -> Mesh:
        opened.append(open_mesh(place, platform, plugins))
        return opened[0]

    worker = Worker(frames.unpack_config(flags), plugins, rank=place.rank, open_mesh=connect)
    return worker, opened[0].gives


def main(where: str) -> None:
    """where: a file descriptor that was inherited, or HOST:PORT of the executor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    host, _, port = where.rpartition(":")
    peer = socket.create_connection((host, int(port))) if host else socket.socket(fileno=int(port))
    serve(FrameStream(peer))


if __name__ == "__main__":
    main(sys.argv[1])
