"""Test helpers: serialized plans, and ranks that serve several models in turn."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import attrs

from modulm.config.environ import isolated
from modulm.engine.worker.worker import Worker
from modulm.plugins import manager
from modulm.testing.connectors import FakeConnector
from modulm.testing.engines import step_parts
from modulm_distributed.executor import WorkersExecutor
from modulm_distributed.mesh import RankSpec
from modulm_distributed.plan_codec import PlanCodec
from modulm_distributed.stream import FrameStream
from modulm_distributed.worker_process import serve
from modulm_wire import frames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.executor import Plan, StepResult
    from modulm.contracts.step_part import StepPart
    from modulm.plugins.manager import PluginManager

__all__ = ["MarkedWorker", "PoolExecutor", "RankPool", "through_bytes"]


def through_bytes(run: Callable[[Any, Plan], StepResult]) -> Callable[[Any, Plan], StepResult]:
    """Wrap `run` so that each plan and result is encoded and decoded."""

    codecs: WeakKeyDictionary[PluginManager, tuple[int, dict[str, StepPart]]] = WeakKeyDictionary()

    @wraps(run)
    def crossed(self: Any, plan: Plan) -> StepResult:
        plugins = manager.current()
        installed = {declared.name for declared in plugins.names("step_parts")}
        count = len(installed)  # a test may register one
        if plugins not in codecs or codecs[plugins][0] != count:
            codecs[plugins] = count, {part.name: part for part in step_parts(FakeConnector())}
        parts = codecs[plugins][1]
        own = installed.intersection(getattr(self, "parts", ()))
        for name in {*plan.parts, *own} - parts.keys():
            parts[name] = plugins.load("step_parts", name)()  # of a platform
        codec = PlanCodec(parts.values())
        data = codec.encode_plan(plan)
        arrived = codec.decode_plan(data)
        if codec.encode_plan(arrived) != data:
            raise AssertionError(f"plan {plan.step} changes when it is encoded and decoded")
        return codec.decode_result(codec.encode_result(run(self, arrived)))

    return crossed


class MarkedWorker(Worker):
    """A custom worker (`--worker-cls`) that appears in its model description."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.description = attrs.evolve(self.description, device="marked")

    def label(self, suffix: str) -> str:
        """Return the rank's name; for calls into workers."""
        return f"rank {self.rank}{suffix}"


class RankPool:
    """Processes that are ranks of several models in turn, because processes start slowly."""

    def __init__(self, size: int) -> None:
        self.streams: list[FrameStream] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for _ in range(size):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                self.processes.append(
                    subprocess.Popen(command, pass_fds=[theirs.fileno()], env=isolated())
                )
            self.streams.append(FrameStream(ours))

    def close(self) -> None:
        """End the processes."""
        for stream in self.streams:
            stream.close()
        for process in self.processes:
            process.wait(300)


class PoolExecutor(WorkersExecutor):
    """An executor whose workers are the processes of `pool`."""

    name: ClassVar[str] = "pool"
    api: ClassVar[int | tuple[int, int]] = 3
    pool: ClassVar[RankPool]

    def connect(self, config: EngineConfig) -> Sequence[tuple[FrameStream, RankSpec]]:
        self._folder = tempfile.mkdtemp(prefix="modulm-ranks-")
        parallel = config.parallel
        specs = RankSpec.all_ranks(parallel, f"file:{self._folder}/store", seconds=600)
        first = parallel.data_parallel_rank_local * len(specs)
        return list(zip(self.pool.streams[first:], specs, strict=False))

    def end(self, seconds: float) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def ending(self, rank: int) -> str:
        return f"its process ended with {self.pool.processes[rank].poll()}"

    def stop(self) -> None:
        self._stopping = True
        if self._reader is not None:
            self._reader.join()
        for stream in self._streams:
            stream.send(frames.pack("stop"))
        for stream in self._streams:
            while (frame := stream.receive()) is not None and frame[0] != "stopped":
                pass
        self._streams = []
        self._close_rings()
        self.end(0)


if __name__ == "__main__":
    stream = FrameStream(socket.socket(fileno=int(sys.argv[1])))
    while serve(stream):
        pass
