"""The engine loop: admit requests, plan, run, commit, publish events."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from attrs import define, frozen

from modulm.contracts.executor import Executor, Plan, StepResult
from modulm.contracts.policy import Scheduler
from modulm.contracts.requests import Finish, Request, StepEvents
from modulm.errors import EngineDead, EngineError, ModulmError, RequestError, UnsupportedError

__all__ = ["EngineLoop", "Listener"]

log = logging.getLogger("modulm.engine")

T = TypeVar("T")

#: Consecutive failed steps before the engine gives up, if the executor cannot check itself.
_MAX_FAILED_STEPS = 3

#: Seconds between steps that only poll transfers.
_TRANSFER_POLL = 0.0005


class Listener(Protocol):
    """Receives the engine's events, on the engine's thread."""

    def events(self, events: StepEvents) -> None:
        """Handle a step's events, or requests that ended outside of a step."""

    def died(self, error: EngineDead) -> None:
        """Handle a fatal error; no events follow."""


@frozen
class _Abort:
    request: str


@frozen(eq=False)
class _Call:
    """A function to run on the engine's thread between two steps."""

    function: Callable[[], object]
    answer: Future[Any]

    def run(self) -> None:
        try:
            self.answer.set_result(self.function())
        except Exception as error:
            self.answer.set_exception(error)


@define(eq=False)
class _SubmittedStep:
    """A step whose result is not committed. future: None if it has not been started."""

    plan: Plan
    future: Future[StepResult] | None


class _Inbox:
    """Items from other threads for the engine's thread, in order.

    count: number of requests. requests, tokens: number of requests and prompt tokens by tenant.
    """

    def __init__(self) -> None:
        self._items: deque[Request | _Abort | _Call] = deque()
        self._filled = threading.Event()
        self._lock = threading.Lock()
        self.count = 0
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def put(self, item: Request | _Abort | _Call) -> None:
        if isinstance(item, Request):
            self._count(item.tenant, 1, item.prompt_len)
        self._items.append(item)
        self._filled.set()

    def wake(self) -> None:
        """Make `wait` return."""
        self._filled.set()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for an item, a wake-up or the timeout."""
        self._filled.wait(seconds)

    def drain(self) -> Iterable[Request | _Abort | _Call]:
        self._filled.clear()
        while self._items:
            item = self._items.popleft()
            if isinstance(item, Request):
                self._count(item.tenant, -1, -item.prompt_len)
            yield item

    def _count(self, tenant: str, requests: int, tokens: int) -> None:
        with self._lock:
            self.count += requests
            self.requests[tenant] += requests
            self.tokens[tenant] += tokens


class EngineLoop:
    """Steps a scheduler and an executor. One thread ticks; any may submit, abort and call.

    depth: plans in flight; 2 prepares a step while one runs (asynchronous scheduling). notify:
    calls hooks (`PluginManager.notify`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        listener: Listener,
        notify: Callable[..., None],
        depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.dead: EngineDead | None = None
        #: For watchdogs on other threads: since when `run` is busy (monotonic seconds), None while
        #: it waits or runs a call; and the last plan that was run.
        self.busy_since: float | None = None
        self.plan: Plan | None = None
        self._listener = listener
        self._notify = notify
        self._depth = depth
        self._inbox = _Inbox()
        self._submitted: deque[_SubmittedStep] = deque()
        # By request id: done once its constraint is compiled; kept until the request has ended.
        self._prepared: dict[str, Future[None]] = {}
        self._compiling: dict[str, Request] = {}
        self._failures = 0
        self._ended_between = False
        self._stopping = False
        executor.watch(self.fail)

    def tick(self) -> bool:
        """Run one engine step; False if there was nothing to do."""
        self._admit()
        plan = self.scheduler.plan()
        if not plan.idle:
            self._submit_step(plan)
        if not self._submitted:
            self._publish_idle()
            return False
        if len(self._submitted) >= self._depth or plan.idle:
            step = self._submitted.popleft()
            self._finish_step(step)
            if not len(step.plan.rows):
                self._inbox.wait(_TRANSFER_POLL)
        return True

    def wait(self) -> None:
        """Wait for work after a tick that returned False."""
        self._inbox.wait()

    def _publish_idle(self) -> None:
        """Publish current gauges if requests ended outside of a step."""
        if self._ended_between:
            self._ended_between = False
            self._listener.events(StepEvents(stats=self.scheduler.gauges()))

    def _submit_step(self, plan: Plan) -> None:
        for start in plan.admit:
            self._notify("modulm_request_admitted", request=start.request, params=start.params)
        future = self.executor.submit(plan) if self._depth > 1 else None
        self._submitted.append(_SubmittedStep(plan, future))

    def _finish_step(self, step: _SubmittedStep) -> None:
        self.plan = step.plan
        try:
            future = step.future
            result = self.executor.run(step.plan) if future is None else future.result()
        except Exception as error:
            self._step_failed(step, error)
            return
        self._failures = 0
        self._publish(self.scheduler.commit(step.plan, result))

    def _publish(self, events: StepEvents) -> None:
        for finish in events.finished:
            self._forget(finish.request)
            self._notify("modulm_request_finished", request=finish.request, reason=finish.reason)
        if events.stats is not None:
            self._notify("modulm_step_finished", stats=events.stats)
        self._listener.events(events)

    # The inbox.

    def _admit(self) -> None:
        ended: list[Finish] = []
        for item in self._inbox.drain():
            if isinstance(item, Request):
                self._enqueue(item, ended)
            elif isinstance(item, _Abort):
                self._abort_request(item.request)
            else:
                self.busy_since = None
                item.run()
                self.busy_since = time.monotonic()
        for request in [r for r in self._compiling.values() if self._prepared[r.id].done()]:
            del self._compiling[request.id]
            self._enqueue(request, ended)
        if ended:
            self._publish(StepEvents(finished=ended))

    def _enqueue(self, request: Request, ended: list[Finish]) -> None:
        """Queue a request, once its constraint is compiled."""
        try:
            ready = self._prepared.get(request.id)
            if ready is not None and not ready.done():
                self._compiling[request.id] = request
                ready.add_done_callback(lambda _: self._inbox.wake())
                return
            if ready is not None:
                ready.result()
            self.scheduler.add(request)
        except Exception as error:
            if not isinstance(error, ModulmError):
                log.exception("request %s could not be queued", request.id)
                error = RequestError(f"the request could not be queued: {error}")
            ended.append(Finish(request.id, "error", None, error))

    def _forget(self, request: str) -> None:
        """Drop the compiled constraint of a request that has ended."""
        if self._prepared.pop(request, None) is not None:
            self.executor.forget(request)

    def _abort_request(self, request: str) -> None:
        """Abort a request. There is no event for it."""
        compiling = self._compiling.pop(request, None)
        self._forget(request)
        if compiling is not None or self.scheduler.abort(request) is not None:
            self._ended_between = True
            self._notify("modulm_request_finished", request=request, reason="abort")

    # From other threads.

    def submit(self, *requests: Request) -> None:
        """Submit requests, all or none. Raises QueueFull or EngineDead."""
        self.check()
        inbox, tenant = self._inbox, requests[0].tenant if requests else ""
        tokens = inbox.tokens[tenant] + sum(request.prompt_len for request in requests)
        self.scheduler.check_room_of(tenant, inbox.requests[tenant] + len(requests), tokens)
        self._prepare(requests)
        for request in requests:
            inbox.put(request)

    def _prepare(self, requests: Sequence[Request]) -> None:
        """Compile constraints in the background. Raises QueueFull."""
        try:
            for request in requests:
                if request.constraint is not None:
                    ready = self.executor.prepare(request.id, request.constraint)
                    self._prepared[request.id] = ready
        except Exception:
            for request in requests:
                self._forget(request.id)
            raise

    def wait_prepared(self, requests: Iterable[str]) -> None:
        """Wait until the constraints of these requests are compiled. Raises their errors."""
        for request in requests:
            if (ready := self._prepared.get(request)) is not None:
                ready.result()

    def abort(self, request: str) -> None:
        """End a request before the next step; unknown ones are ignored. There is no event."""
        self._inbox.put(_Abort(request))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps."""
        self.check()
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # a caller that stops waiting cannot cancel it
        self._inbox.put(_Call(function, answer))
        return answer

    def check(self) -> None:
        """Raise EngineDead if the engine cannot continue."""
        if self.dead is not None:
            raise self.dead

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._inbox.count or self._compiling or self.scheduler.busy)

    # Life cycle.

    def run(self) -> None:
        """Tick until stopped or dead; the body of the engine's thread."""
        try:
            while not self._stopping and self.dead is None:
                self.busy_since = time.monotonic()
                if not self.tick() and not self._stopping:
                    self.busy_since = None
                    self.wait()
        except BaseException as error:
            log.exception("the engine failed")
            self._die(error)
        finally:
            self.busy_since = None
            self._drain()

    def fail(self, error: EngineDead) -> None:
        """End the engine after a fatal error of the executor, also between steps."""
        answer: Future[None] = Future()
        self._inbox.put(_Call(lambda: self._die(error), answer))

    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._stopping = True
        self._inbox.wake()

    def _drain(self) -> None:
        """Finish submitted steps and refuse pending calls, so that nobody waits forever."""
        if self.dead is None:
            while self._submitted:
                self._finish_step(self._submitted.popleft())
        for item in self._inbox.drain():
            if isinstance(item, _Call):
                item.answer.set_exception(self.dead or EngineDead("the engine has stopped"))

    def _step_failed(self, step: _SubmittedStep, error: Exception) -> None:
        """End the requests of the step and of those submitted after it."""
        log.error("step %d failed", step.plan.step, exc_info=error)
        failed = EngineError(f"the step failed: {error or type(error).__name__}")
        self._ended_between = True
        finished = list(self.scheduler.fail(step.plan, failed))
        while self._submitted:
            behind = self._submitted.popleft()
            if behind.future is not None:
                behind.future.exception()
            finished += self.scheduler.fail(behind.plan, failed)
        self._publish(StepEvents(finished=finished))
        self._failures = 0 if self._recovered() else self._failures + 1
        if isinstance(error, EngineDead) or self._failures >= _MAX_FAILED_STEPS:
            self._die(error)

    def _recovered(self) -> bool:
        """Whether the executor confirms that it works, so that only this step's requests failed.

        If it reports that it does not work, the engine gives up.
        """
        try:
            self.executor.check()
        except UnsupportedError:
            return False
        except Exception as error:
            log.error("the executor has failed", exc_info=error)
            self._failures = _MAX_FAILED_STEPS
            return False
        return True

    def _die(self, error: BaseException) -> None:
        if self.dead is None:
            self.dead = EngineDead(f"the engine cannot go on: {error or type(error).__name__}")
            self.dead.__cause__ = error
            self._notify("modulm_engine_failed", error=error)
            self._listener.died(self.dead)
