"""The contract kit for executors.

    from modulm.testing.executors import check_executor

    def test_contract():
        check_executor(MyExecutor)

A tiny checkpoint is run with requests that wait, share steps and end at different times. Tokens
must be those of a worker in this process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve

from modulm.config import EngineConfig as Flags
from modulm.contracts.config import EngineConfig
from modulm.contracts.executor import Capacity, Executor, ModelDescription, Plan, StepResult
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.core.loop import EngineLoop
from modulm.engine.parts import open_parts
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.engine.worker.worker import Worker
from modulm.errors import EngineError, ModulmError
from modulm.loading.resolved import resolve_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import ByArrival, Recorder, run_to_end
from modulm.testing.kit import KitNotRun

if TYPE_CHECKING:
    from modulm.contracts.step_part import StepPart

__all__ = ["WorkerExecutor", "check_executor", "generate", "tiny_config"]


class WorkerExecutor(Executor):
    """A worker in this process, as a reference. part: whose values are packed on the way."""

    name: ClassVar[str] = "reference"
    api: ClassVar[int | tuple[int, int]] = 3

    def __init__(self, part: StepPart | None = None) -> None:
        self._part = part
        self._worker: Worker | None = None

    def start(self, config: EngineConfig) -> Capacity:
        self._worker = Worker(config, manager.current())
        return self._worker.capacity

    def run(self, plan: Plan) -> StepResult:
        if self._worker is None:
            raise EngineError("the executor was not started, or has been stopped")
        result = self._worker.run(self._send_plan(plan))
        return result if self._part is None else self._return_result(result)

    def _packed(self, values: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Send this part's value through bytes."""
        import msgspec

        part, sent = self._part, dict(values)
        if part is not None and part.name in sent:
            pack, unpack = getattr(part, f"pack_{what}"), getattr(part, f"unpack_{what}")
            try:
                data = msgspec.msgpack.encode(pack(sent[part.name]))
            except TypeError as error:
                raise AssertionError(f"pack_{what}() gives no plain value: {error}") from error
            sent[part.name] = unpack(msgspec.msgpack.decode(data))
        return sent

    def _send_plan(self, plan: Plan) -> Plan:
        admit = tuple(evolve(start, parts=self._packed(start.parts, "row")) for start in plan.admit)
        return evolve(plan, parts=self._packed(plan.parts, "plan"), admit=admit)

    def _return_result(self, result: StepResult) -> StepResult:
        reports = tuple(
            evolve(report, value=self._packed({report.part: report.value}, "report")[report.part])
            for report in result.parts
        )
        return evolve(result, parts=reports)

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def check_executor(driver: type[Executor]) -> None:
    """Run the kit. Raises AssertionError with what was expected, KitNotRun if the executor cannot
    run here.
    """
    config = tiny_config()
    expected, reference = generate(config, WorkerExecutor())
    executor = driver()
    try:
        tokens, capacity = generate(config, executor)
    except ModulmError as error:
        executor.stop()
        raise KitNotRun(f"{type(error).__name__}: {error}") from error
    assert capacity.vocabulary == reference.vocabulary, (
        f"start() gives a vocabulary of {capacity.vocabulary}, not {reference.vocabulary}"
    )
    kinds = [[group.kind for group in each.groups] for each in (capacity, reference)]
    assert kinds[0] == kinds[1], f"start() gives the cache groups {kinds[0]}, not {kinds[1]}"
    assert tokens == expected, "requests get other tokens than from a worker in this process"


def _check_running(executor: Executor, capacity: Capacity) -> None:
    assert isinstance(capacity, Capacity), f"start() gave {capacity!r}, not a Capacity"
    assert capacity.groups, "start() gives no cache groups"
    facts = executor.describe()
    assert isinstance(facts, ModelDescription), f"describe() gave {facts!r}"
    assert "generate" in facts.tasks, f"describe() gives the tasks {facts.tasks}"
    executor.forget("a request that was never prepared")


def _check_stopped(executor: Executor, plan: Plan | None) -> None:
    executor.stop()
    executor.stop()
    if plan is None:
        return
    try:
        executor.run(plan)
    except Exception:
        return
    raise AssertionError("run() after stop() gives a result; an error was expected")


@cache
def _checkpoint() -> Path:
    return make_tiny(tempfile.mkdtemp(prefix="modulm-kit-"), "LlamaForCausalLM")


def tiny_config(**flags: Any) -> EngineConfig:
    """Return the configuration of an engine for a tiny checkpoint, on the processor."""
    given = Flags.from_keywords(
        model=str(_checkpoint()),
        device="cpu",
        dtype="float32",
        max_model_len=96,
        max_num_seqs=4,
        num_gpu_blocks_override=48,
        **flags,
    )
    return resolve_checkpoint(given, manager.current()).resolved.config


def _requests() -> list[Request]:
    """Return requests of mixed lengths: more than there are rows, greedy and sampled."""
    return [
        Request(
            id=f"r{number}", prompt=[8 + (7 * number + 3 * i) % 400 for i in range(length)],
            params=SamplingParams(
                temperature=0 if number % 2 else 1, max_tokens=3 + number, ignore_eos=True
            ),
            seed=number, arrival=float(number),
        )
        for number, length in enumerate((5, 33, 1, 18, 9, 26))
    ]  # fmt: skip


class _Watched(Executor):
    """Passes calls on, and checks what comes back."""

    name: ClassVar[str] = "watched"
    api: ClassVar[int | tuple[int, int]] = 3

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.last: Plan | None = None

    def start(self, config: EngineConfig) -> Capacity:
        return self._inner.start(config)

    def submit(self, plan: Plan) -> Future[StepResult]:
        self.last = plan
        future = self._inner.submit(plan)
        assert isinstance(future, Future), f"submit() gave {future!r}, not a Future"
        result = future.result()
        assert isinstance(result, StepResult), f"run() gave {result!r}, not a StepResult"
        assert result.step == plan.step, f"the result of step {plan.step} says step {result.step}"
        return future

    def run(self, plan: Plan) -> StepResult:
        return self.submit(plan).result()

    def stop(self) -> None:
        self._inner.stop()


def generate(
    config: EngineConfig, executor: Executor, parts: Sequence[StepPart] | None = None
) -> tuple[dict[str, list[int]], Capacity]:
    """Run requests with an executor and stop it; return their tokens, and the capacity."""
    watched = _Watched(executor)
    try:
        capacity = executor.start(config)
        if not isinstance(executor, WorkerExecutor):
            _check_running(executor, capacity)
        if parts is None:
            parts = open_parts(config, manager.current())
        scheduler = BudgetScheduler(Limits(rows=4, tokens=32), capacity, ByArrival(), tuple(parts))
        recorder = Recorder()
        engine = EngineLoop(scheduler, watched, recorder, lambda hook, **more: None, 1)
        asked = _requests()
        run_to_end(engine, asked, 500)
        for request in asked:
            finish = recorder.finished.get(request.id)
            ended = finish is not None and finish.reason == "length"
            assert ended, f"request {request.id} ended with {finish}"
    finally:
        executor.stop()
    _check_stopped(executor, watched.last)
    return {name: list(tokens) for name, tokens in recorder.tokens.items()}, capacity
