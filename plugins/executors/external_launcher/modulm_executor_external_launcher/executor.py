"""Run a worker in this process, one of the ranks that torchrun started with the same script.

Each rank has its own engine, which gets the same requests in the same order and so makes the same
plans. Before a step the ranks compare their plans; after it the rank that samples broadcasts its
result.
"""

from __future__ import annotations

import zlib
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np
import torch

from modulm.config.environ import variables
from modulm.contracts.executor import Capacity, Executor, ModelDescription, Plan, StepResult
from modulm.engine.parts import open_parts
from modulm.engine.worker.worker import worker_class
from modulm.errors import ConfigError, EngineDead, EngineError, ModulmError
from modulm.parallel import Mesh
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm_distributed.choice import custom_sums
from modulm_distributed.eplb import balance_of
from modulm_distributed.executor import unpack_capacity
from modulm_distributed.flags import DistributedConfig
from modulm_distributed.mesh import RankSpec, open_mesh
from modulm_distributed.plan_codec import PlanCodec
from modulm_distributed.worker_calls import TimedCalls, pack_answer
from modulm_executor_external_launcher.launched import Launched
from modulm_wire import frames
from modulm_wire.packing import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Platform
    from modulm.contracts.sampling import StructuredOutputs
    from modulm.engine.worker.worker import Worker

__all__ = ["LaunchedExecutor"]

#: Number of executors of this process; each has its own names in torchrun's store.
_MADE = count()
#: Bytes of the first broadcast, of which eight are the length.
_ROOM = 4096
_SAME = "every rank has to run the same script on the same requests, in the same order"


class _Step(Future[StepResult]):
    """A step that this rank has run. Its result is exchanged when it is requested, because other
    stages may still run earlier steps.
    """

    def __init__(self, land: Callable[[], StepResult]) -> None:
        super().__init__()
        self._land = land

    def result(self, timeout: float | None = None) -> StepResult:
        self._finish()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._finish()
        return super().exception(timeout)

    def _finish(self) -> None:
        if not self.done():
            try:
                self.set_result(self._land())
            except Exception as error:
                self.set_exception(error)


class LaunchedExecutor(Executor):
    """An executor whose worker is this process's rank."""

    name: ClassVar[str] = "external_launcher"
    api: ClassVar[int | tuple[int, int]] = 3
    offline_only: ClassVar[bool] = True

    def __init__(self) -> None:
        self._loaded: Worker | None = None
        self._codec = PlanCodec(())
        self._mesh = Mesh()
        self._device = torch.device("cpu")
        self._description = ModelDescription()
        self._output_rank = 0
        self._timed = TimedCalls()
        #: Set when ranks diverge or one has ended.
        self._dead: EngineDead | None = None

    def start(self, config: EngineConfig) -> Capacity:
        launched = Launched.of(variables())
        parallel = config.parallel
        if parallel.ranks != launched.ranks:
            raise ConfigError(
                "tensor_parallel_size",
                f"torchrun has started {launched.ranks} ranks, and tensor_parallel_size "
                f"{parallel.tensor_parallel_size} x pipeline_parallel_size "
                f"{parallel.pipeline_parallel_size} takes {parallel.ranks}",
            )
        if "worker_timeout" in config.changed():
            raise ConfigError(
                "worker_timeout", "external_launcher does not end ranks: torchrun does"
            )
        for name in sorted(PlanCodec(open_parts(config, manager.current())).of_all_ranks):
            raise ConfigError(
                "distributed_executor_backend",
                f"external_launcher does not run {name}, which needs reports of all ranks: use mp",
            )
        self._output_rank = parallel.ranks - parallel.tensor_parallel_size
        spec = RankSpec.all_ranks(
            parallel,
            f"launcher:modulm {next(_MADE)}",
            hosts=-(-launched.ranks // launched.local_ranks),
            seconds=config.group(DistributedConfig).distributed_timeout_seconds,
            host_slot=(launched.local_rank, launched.local_ranks),
            address=launched.address,
        )[launched.rank]
        plugins = manager.current()

        def connect(platform: Platform) -> Mesh:
            self._mesh = open_mesh(
                spec, platform, plugins, balance_of(config), custom_sums=custom_sums(config)
            )
            self._device = platform.device
            self._check_plugins(plugins)
            return self._mesh

        worker = worker_class(config)(
            config, plugins, rank=spec.rank, open_mesh=connect, share=spec.host_slot
        )
        self._loaded = worker
        self._codec = PlanCodec(worker.parts)
        described_here = [attrs.asdict(worker.capacity), attrs.asdict(worker.description)]
        capacity, described = self._share_result(described_here)
        weights = torch.tensor([worker.description.weight_bytes], device=self._device)
        self._description = attrs.evolve(
            frames.unpack_description(described),
            weight_bytes=int(self._mesh.world.all_reduce(weights).item()),
        )
        return unpack_capacity(capacity)

    def _check_plugins(self, plugins: PluginManager) -> None:
        """Raise PluginConflict if rank 0 has other plugins."""
        theirs = self._share_result(frames.pack_plugins(plugins.snapshot()))
        if not self._mesh.gives:
            PluginManager.replay(frames.unpack_plugins(theirs))

    # Steps.

    def run(self, plan: Plan) -> StepResult:
        return self.submit(plan).result()

    def submit(self, plan: Plan) -> Future[StepResult]:
        mark = _mark(plan, self._codec)
        try:
            self._compare(plan.step, mark)
            result, error = self._worker.run(plan), None
        except EngineDead as dead:
            gone: Future[StepResult] = Future()
            gone.set_exception(dead)
            return gone
        except Exception as failed:
            result, error = StepResult(plan.step, np.zeros(0, np.int64)), failed
        return _Step(lambda: self._finish(mark, result, error))

    def _finish(self, mark: int, result: StepResult, error: Exception | None) -> StepResult:
        """Return the step's result from the output rank."""
        local = [mark, self._codec.encode_result(result), frames.pack_error(error)]
        theirs, data, failed = self._share_result(local)
        if theirs != mark:
            raise self._end(f"step {result.step} is not the same on all ranks: {_SAME}")
        if failed is not None:
            raise error or frames.unpack_error(failed) or EngineError("a step failed")
        if error is not None:
            raise self._end(f"step {result.step} failed on some ranks only: {error}") from error
        return result if self._mesh.gives else self._codec.decode_result(data)

    def _compare(self, step: int, mark: int) -> None:
        """Raise EngineDead unless all ranks of this stage have the same plan. Uses sockets, which
        report the end of a rank at once, unlike the shared memory of steps.
        """
        self._check_alive()
        group = self._mesh.tensor
        marks = torch.zeros(group.size, dtype=torch.int64, device=self._device)
        marks[group.rank] = mark
        try:
            marks = group.all_reduce(marks)
        except RuntimeError as error:
            raise self._disconnected(error) from error
        if len(set(marks.tolist())) > 1:
            raise self._end(f"step {step} is not the same on all ranks: {_SAME}")

    def _share_result(self, local: list[Any]) -> list[Any]:
        """Broadcast the value of the output rank to all ranks."""
        self._check_alive()
        if self._mesh.world.size == 1:
            return local
        data = frames.pack(*local) if self._mesh.gives else b""
        return self._share_frame(data, self._output_rank)

    def _share_frame(self, data: bytes, source: int) -> list[Any]:
        """Broadcast a frame from one rank; returns its content."""
        self._check_alive()
        try:
            size = len(data).to_bytes(8, "big")
            heard = self._broadcast((size + data)[:_ROOM], _ROOM, source)
            length = int.from_bytes(heard[:8], "big")
            rest = max(0, length - (_ROOM - 8))
            if rest:
                heard += self._broadcast(data[_ROOM - 8 :], rest, source)
        except RuntimeError as error:
            raise self._disconnected(error) from error
        return frames.unpack(heard[12 : 8 + length])

    def _broadcast(self, data: bytes, size: int, source: int) -> bytes:
        """Broadcast `size` bytes from a rank."""
        room = np.zeros(size, np.uint8)
        room[: len(data)] = np.frombuffer(data, np.uint8)
        heard = self._mesh.world.broadcast(torch.from_numpy(room).to(self._device), source)
        return heard.cpu().numpy().tobytes()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _disconnected(self, error: Exception) -> EngineDead:
        return self._end(f"another rank has ended, or does not answer: {error}")

    def _end(self, message: str) -> EngineDead:
        self._dead = EngineDead(message)
        return self._dead

    @property
    def _worker(self) -> Worker:
        if self._loaded is None:
            raise EngineError("the executor was not started, or has been stopped")
        self._timed.wait()
        return self._loaded

    def check(self) -> None:
        self._check_alive()
        self._worker.check()

    # Calls between steps, made by each rank's own script.

    def describe(self) -> ModelDescription:
        return self._description

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        """Compile immediately, so that all ranks schedule the request at the same time."""
        error: ModulmError | None = None
        if self._mesh.gives:
            try:
                self._worker.prepare(request, constraint).result()
            except ModulmError as refused:
                error = refused
        (failed,) = self._share_result([frames.pack_error(error)])
        ready: Future[None] = Future()
        refusal = frames.unpack_error(failed)
        ready.set_result(None) if refusal is None else ready.set_exception(refusal)
        return ready

    def forget(self, request: str) -> None:
        if self._mesh.gives:
            self._worker.forget(request)

    def sleep(self, level: int) -> None:
        self._worker.sleep(level)

    def wake_up(self) -> None:
        self._worker.wake_up()

    def add_adapter(self, name: str, path: Path) -> None:
        self._worker.add_adapter(name, path)

    def prepare_adapter(self, name: str) -> None:
        self._worker.prepare_adapter(name)

    def remove_adapter(self, name: str) -> None:
        self._worker.remove_adapter(name)

    def call(
        self,
        function: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """See `Executor.call`. Each rank's script makes the same call and gets all answers."""
        name = getattr(function, "__qualname__", str(function))
        call = partial(self._call, self._worker, function, args, kwargs)
        return self._timed.run(name, call, timeout)

    def _call(
        self,
        worker: Worker,
        function: str | Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> list[Any]:
        world, value = self._mesh.world, None
        error: EngineError | None = None
        try:
            value = worker.call(function, args, kwargs)
        except EngineError as failed:
            error = EngineError(f"worker {world.rank}: {failed}")
        if world.size == 1:
            if error is not None:
                raise error
            return [value]
        data = pack_answer(0, value, error)
        answers = [
            self._share_frame(data if rank == world.rank else b"", rank)
            for rank in range(world.size)
        ]
        for *_, packed in answers:
            if (refused := frames.unpack_error(packed)) is not None:
                raise refused
        return [answer for _, _, answer, _ in answers]

    def stop(self) -> None:
        self._timed.close()
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None


def _mark(plan: Plan, codec: PlanCodec) -> int:
    """Return a checksum of the plan that is equal on all ranks. Seeds are excluded: each rank draws
    its own for requests without one, and only one rank samples.
    """
    mark = zlib.crc32(plan.step.to_bytes(8, "big"))
    for array in (plan.rows, plan.starts, plan.counts, plan.tokens, *plan.tables, plan.samples):
        mark = zlib.crc32(np.ascontiguousarray(array), mark)
    for start in plan.admit:
        mark = zlib.crc32(np.ascontiguousarray(start.prompt), mark)
    rows = [codec.pack_row_parts(start.parts) for start in plan.admit]
    return zlib.crc32(encode([plan.release, codec.pack_parts(plan.parts), rows]), mark)
