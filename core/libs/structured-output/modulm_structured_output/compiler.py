"""Compiles constraints to grammars in background threads, within limits.

A request can only delay itself, for a limited time: the size of constraints is limited; all but
ordinary constraints are first compiled in a process that is killed if it takes too long; grammars
that are too slow to step through are refused before a row uses them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from modulm.contracts.grammar import Grammar, GrammarBackend
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import (
    ModulmError,
    PluginError,
    QueueFull,
    RequestError,
)
from modulm_structured_output.backends import (
    as_request_error,
    check_size,
    compile_by,
    is_ordinary,
    open_backends,
)
from modulm_structured_output.compile_process import CompileProcesses
from modulm_structured_output.reasoning import Gate, gate_for

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.executor import RowStart
    from modulm.contracts.tokenizer import Tokenizer
    from modulm.plugins.manager import PluginManager

__all__ = [
    "ConstraintCompiler",
    "GrammarCompiler",
    "RequestGrammars",
    "open_compiler",
]

log = logging.getLogger("modulm.engine")

_FIELD = "structured_outputs"
_BUSY = "too many grammars are being compiled; try again later"
#: Raises RequestError for a constraint that must not be compiled.
Check = Callable[[StructuredOutputs], None]


class GrammarCompiler:
    """Compiles constraints with the first backend that accepts them, and caches grammars.

    check: raises RequestError for constraints that must not be compiled here; called for all but
    ordinary constraints, which are cheap. workers: threads for these; ordinary ones have separate
    threads, so that they do not wait for others. seconds: how long a constraint may wait for a
    thread. entries, size: maximum number and bytes of cached grammars; the least recently used ones
    are dropped. waiting: maximum number of waiting constraints.
    """

    def __init__(
        self,
        backends: Sequence[GrammarBackend],
        *,
        check: Check | None = None,
        seconds: float = 30.0,
        entries: int = 128,
        size: int = 512 << 20,
        workers: int = 2,
        waiting: int = 64,
    ) -> None:
        self.backends = tuple(backends)
        self._check = check
        self._seconds = seconds
        self._entries, self._size = entries, size
        self._waiting = waiting
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._open = 0
        self._ordinary: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._others: SimpleQueue[Callable[[], None]] = SimpleQueue()
        for jobs in (self._ordinary, *[self._others] * workers):
            work = partial(_work, jobs)
            threading.Thread(target=work, name="modulm-grammars", daemon=True).start()

    def __call__(self, constraint: StructuredOutputs) -> Future[Grammar]:
        """Return a future of the grammar; it fails with RequestError for an invalid constraint.

        Raises QueueFull if too many constraints are waiting.
        """
        try:
            check_size(constraint)
        except RequestError as error:
            refused: Future[Grammar] = Future()
            refused.set_exception(error)
            return refused
        key = json.dumps(asdict(constraint, recurse=False), sort_keys=True, default=str)
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return _own(known)
            if self._open >= self._waiting:
                raise QueueFull(_BUSY, _FIELD)
            self._open += 1
            future: Future[Grammar] = Future()
            self._kept[key] = future
        latest = time.monotonic() + self._seconds
        if is_ordinary(constraint):
            self._ordinary.put(partial(self._finish, key, constraint, future, latest, None))
        else:
            self._others.put(partial(self._finish, key, constraint, future, latest, self._check))
        return _own(future)

    def _finish(
        self,
        key: str,
        constraint: StructuredOutputs,
        future: Future[Grammar],
        latest: float,
        check: Check | None,
    ) -> None:
        """Compile and set the future's result or error."""
        grammar, error = None, None
        try:
            if time.monotonic() > latest:
                raise QueueFull(_BUSY, _FIELD)
            if check is not None:
                check(constraint)
            grammar = compile_by(self.backends, constraint, dry_run=check is None)
        except Exception as failed:
            error = as_request_error(failed)
        with self._lock:
            self._open -= 1
            self._sizes[key] = 0 if grammar is None else grammar.nbytes
            if isinstance(error, QueueFull):
                self._drop(key)
            while len(self._kept) > self._entries or sum(self._sizes.values()) > self._size:
                self._drop(next(iter(self._kept)))
        _settle(future, error, grammar)

    def _drop(self, key: str) -> None:
        self._kept.pop(key, None)
        self._sizes.pop(key, None)


def _work(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()


class RequestGrammars:
    """The grammars of prepared requests, until they are forgotten.

    opener: creates the compiler, in a thread, for the first request that needs it.
    """

    def __init__(self, opener: Callable[[], ConstraintCompiler]) -> None:
        self._opener = opener
        self._opened: Future[ConstraintCompiler] | None = None
        self._compiled: dict[str, Future[Grammar]] = {}

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        """Compile in the background. Raises QueueFull; other errors are set on the future."""
        compiled = self._compiled[request] = self._compile(constraint)
        ready: Future[None] = Future()
        compiled.add_done_callback(lambda done: _settle(ready, done.exception(), None))
        return ready

    def forget(self, request: str) -> None:
        """Drop the request's grammar; unknown ones are ignored."""
        self._compiled.pop(request, None)

    def close(self) -> None:
        """Close the compiler."""
        if self._opened is not None and self._opened.done() and not self._opened.exception():
            processes = self._opened.result().processes
            if processes is not None:
                processes.close()

    def of(self, start: RowStart, constraint: StructuredOutputs) -> Grammar:
        """Return the grammar of a new row; compiles it now if it was not prepared."""
        compiled = self._compiled.get(start.request) or self._compile(constraint)
        grammar = compiled.result()
        opened = self._open().result()
        return grammar if opened.gate is None else opened.gate(grammar, start.prompt)

    def _open(self) -> Future[ConstraintCompiler]:
        if self._opened is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="modulm-grammars")
            self._opened = thread.submit(self._opener)
            thread.shutdown(wait=False)
        return self._opened

    def _compile(self, constraint: StructuredOutputs) -> Future[Grammar]:
        opened = self._open()
        if opened.done() and opened.exception() is None:
            return opened.result().compile(constraint)
        answer: Future[Grammar] = Future()
        opened.add_done_callback(lambda done: _compile_into(answer, done, constraint))
        return answer


def _compile_into(
    answer: Future[Grammar], opened: Future[ConstraintCompiler], constraint: StructuredOutputs
) -> None:
    """Compile once the compiler exists; errors are set on the request's future."""
    try:
        compiled = opened.result().compile(constraint)
    except ModulmError as error:
        answer.set_exception(RequestError(str(error), _FIELD))
    except Exception as error:
        answer.set_exception(error)
    else:
        _own(compiled, answer)


def _own(kept: Future[Grammar], own: Future[Grammar] | None = None) -> Future[Grammar]:
    """Copy the result of a cached future to the caller's own."""
    given: Future[Grammar] = Future() if own is None else own
    kept.add_done_callback(
        lambda done: _settle(given, error := done.exception(), error or done.result())
    )
    return given


def _settle(target: Future[Any], error: BaseException | None, value: Any) -> None:
    """Set a future's result or error. Errors are copied, since raising extends their traceback."""
    if error is None:
        target.set_result(value)
    else:
        target.set_exception(copy(error))


@frozen
class ConstraintCompiler:
    """The compiler of `--structured-outputs-config`, whose flags apply to each constraint.

    gate: wraps a grammar to start after the reasoning, given the prompt; or None. processes: for
    trial compilation, or None.
    """

    grammars: GrammarCompiler
    spaces: bool
    extras: bool
    gate: Gate | None
    processes: CompileProcesses | None = None

    def compile(self, constraint: StructuredOutputs) -> Future[Grammar]:
        """Compile a constraint. Raises QueueFull; other errors are set on the future."""
        return self.grammars(evolve(
            constraint,
            disable_any_whitespace=constraint.disable_any_whitespace or self.spaces,
            disable_additional_properties=constraint.disable_additional_properties or self.extras,
        ))  # fmt: skip


def open_compiler(
    config: EngineConfig,
    tokenizer: Tokenizer,
    vocabulary: int,
    stop_ids: tuple[int, ...],
    plugins: PluginManager,
) -> ConstraintCompiler:
    """Load the grammar backends. Raises UnsupportedError if there is none."""
    settings = config.structured_outputs
    backends = open_backends(config, tokenizer, vocabulary, stop_ids, plugins)
    try:
        processes = CompileProcesses(config, tokenizer.name, vocabulary, stop_ids, plugins)
    except PluginError as error:
        log.warning("constraints are compiled without limits of time and memory: %s", error)
        processes = None
    return ConstraintCompiler(
        GrammarCompiler(
            backends,
            check=None if processes is None else processes.check,
            workers=settings.compile_workers,
        ),
        settings.disable_any_whitespace,
        settings.disable_additional_properties,
        gate_for(config, tokenizer, vocabulary, plugins),
        processes,
    )
