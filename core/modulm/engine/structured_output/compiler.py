"""Constraints on text become grammars here: in threads beside the steps, within bounds.

Whatever a request sends, compiling it takes a bounded time of the request's and none of the
others': limits on size come first, a clock runs while a thread works, and a grammar that turns out
too slow to step through is refused before any row uses it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, evolve, frozen

from modulm.contracts.grammar import Grammar, GrammarBackend
from modulm.contracts.sampling import StructuredOutputs
from modulm.engine.structured_output.reasoning import Gate, gate_for
from modulm.errors import ModulmError, QueueFull, RequestError, UnsupportedError

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.executor import RowStart
    from modulm.plugins.manager import PluginManager
    from modulm.text.tokenizer import Tokenizer

__all__ = ["ConstraintCompiler", "GrammarCompiler", "RequestGrammars", "open_compiler"]

_FIELD = "structured_outputs"
#: Limits of a JSON schema, and of the counts in a regular expression multiplied out.
_MAX_DEPTH = 64
_MAX_NODES = 20_000
_MAX_REPEATS = 100_000
#: Threads that may be lost to constraints which never end before no more are taken.
_MAX_STUCK = 4
#: The dry run: tokens per path, and the seconds of CPU that one of them may take.
_DRY_TOKENS = 48
_DRY_SECONDS = 0.1

_QUANTIFIED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(|\)|\{(\d*)(?:,(\d*))?\}")


class GrammarCompiler:
    """Compiles constraints with the first backend that takes them, and keeps what it made.

    seconds: how long one constraint may take, waiting for a thread included. entries: grammars
    that are kept, least recently used ones dropped. waiting: constraints that may wait.
    """

    def __init__(
        self,
        backends: Sequence[GrammarBackend],
        *,
        seconds: float = 10.0,
        entries: int = 128,
        workers: int = 2,
        waiting: int = 64,
    ) -> None:
        self.backends = tuple(backends)
        self._seconds = seconds
        self._entries = entries
        self._waiting = waiting
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._open = 0
        self._stuck = 0
        self._jobs: SimpleQueue[Callable[[], bool]] = SimpleQueue()
        for _ in range(workers):
            self._hire()

    def __call__(self, constraint: StructuredOutputs) -> Future[Grammar]:
        """The grammar, sooner or later. A wrong or too complex constraint is its RequestError.

        Raises QueueFull when too many constraints wait already.
        """
        try:
            _check_size(constraint)
        except RequestError as error:
            refused: Future[Grammar] = Future()
            refused.set_exception(error)
            return refused
        key = json.dumps(asdict(constraint, recurse=False), sort_keys=True, default=str)
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
            if self._open >= self._waiting or self._stuck > _MAX_STUCK:
                raise QueueFull("too many grammars are being compiled; try again later", _FIELD)
            self._open += 1
            future: Future[Grammar] = Future()
            self._kept[key] = future
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)
        self._start(constraint, future)
        return future

    def _start(self, constraint: StructuredOutputs, future: Future[Grammar]) -> None:
        began = threading.Event()

        def late() -> None:
            """Compilers cannot be interrupted: the request is answered, the thread replaced."""
            error = RequestError(
                f"{_FIELD}: compiling takes more than {self._seconds:g} s; simplify it", _FIELD
            )
            if self._settle(future, error=error) and began.is_set():
                self._replace(1)
                self._hire()

        clock = threading.Timer(self._seconds, late)
        clock.daemon = True

        def job() -> bool:
            """Whether the thread may take another job."""
            if future.done():
                return True
            began.set()
            try:
                grammar = self._compile(constraint)
            except Exception as error:
                kept = self._settle(future, error=_as_request_error(error))
            else:
                kept = self._settle(future, grammar)
            clock.cancel()
            if not kept:  # too late: another thread does this one's work
                self._replace(-1)
            return kept

        clock.start()
        self._jobs.put(job)

    def _settle(
        self,
        future: Future[Grammar],
        grammar: Grammar | None = None,
        error: Exception | None = None,
    ) -> bool:
        """Give the future its outcome; False if it has one already."""
        try:
            if error is not None:
                future.set_exception(error)
            elif grammar is not None:
                future.set_result(grammar)
        except InvalidStateError:
            return False
        with self._lock:
            self._open -= 1
        return True

    def _replace(self, change: int) -> None:
        with self._lock:
            self._stuck += change

    def _hire(self) -> None:
        threading.Thread(target=self._work, name="modulm-grammars", daemon=True).start()

    def _work(self) -> None:
        while self._jobs.get()():
            pass

    def _compile(self, constraint: StructuredOutputs) -> Grammar:
        reasons = []
        for backend in self.backends:
            reason = backend.rejects(constraint)
            if reason is None:
                grammar = backend.compile(constraint)
                _dry_run(grammar, backend.vocabulary)
                return grammar
            reasons.append(f"{backend.name}: {reason}")
        raise RequestError(f"{_FIELD} cannot be carried out: {'; '.join(reasons)}", _FIELD)


class RequestGrammars:
    """The grammars of the requests that a worker was told of, kept until they are forgotten.

    opener: makes the compiler, in a thread, when the first request needs it.
    """

    def __init__(self, opener: Callable[[], ConstraintCompiler]) -> None:
        self._opener = opener
        self._opened: Future[ConstraintCompiler] | None = None
        self._compiled: dict[str, Future[Grammar]] = {}

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        """Compile beside the steps. Raises QueueFull; any other trouble is the future's."""
        compiled = self._compiled[request] = self._compile(constraint)
        ready: Future[None] = Future()
        compiled.add_done_callback(lambda done: _settle(ready, done.exception(), None))
        return ready

    def forget(self, request: str) -> None:
        """Drop the request's grammar; unknown ones are ignored."""
        self._compiled.pop(request, None)

    def of(self, start: RowStart, constraint: StructuredOutputs) -> Grammar:
        """The grammar of a row that starts; compiled now if nobody prepared it."""
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
    """Compile now that the compiler is there; what fails is the request's."""
    try:
        compiled = opened.result().compile(constraint)
    except ModulmError as error:
        answer.set_exception(RequestError(str(error), _FIELD))
    except Exception as error:
        answer.set_exception(error)
    else:
        compiled.add_done_callback(
            lambda done: _settle(answer, error := done.exception(), error or done.result())
        )


def _settle(target: Future[Any], error: BaseException | None, value: Any) -> None:
    if error is None:
        target.set_result(value)
    else:
        target.set_exception(error)


@frozen
class ConstraintCompiler:
    """The compiler of `--structured-outputs-config`, whose flags are added to each constraint.

    gate: makes a grammar wait for the end of the reasoning, by the end of a prompt; or None.
    """

    grammars: GrammarCompiler
    spaces: bool
    extras: bool
    gate: Gate | None

    def compile(self, constraint: StructuredOutputs) -> Future[Grammar]:
        """Raises QueueFull; any other trouble is the future's."""
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
    name = settings.backend
    names = [name] if name != "auto" else [d.name for d in plugins.names("grammars")]
    classes: list[type[GrammarBackend]] = [plugins.load("grammars", each) for each in names]
    classes.sort(key=lambda backend: -backend.preference)
    if not classes:
        raise UnsupportedError(
            "structured outputs need a grammar backend; pip install modulm-grammar-xgrammar"
        )
    return ConstraintCompiler(
        GrammarCompiler([cls(tokenizer, vocabulary, stop_ids) for cls in classes]),
        settings.disable_any_whitespace,
        settings.disable_additional_properties,
        gate_for(config, tokenizer, vocabulary, plugins),
    )


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    return RequestError(f"{_FIELD}: {type(error).__name__}: {error}"[:500], _FIELD)


def _dry_run(grammar: Grammar, vocabulary: int) -> None:
    """Step through the grammar along two paths; RequestError if a step takes too long.

    An ambiguous grammar, such as the expression (a{0,50}){0,50}b, compiles at once and then takes
    longer with every token. CPU time is measured, so that a busy machine refuses nothing.
    """
    mask = np.zeros(-(-vocabulary // 32), dtype=np.int32)
    for pick in (0, -1):
        matcher = grammar.matcher()
        for _ in range(_DRY_TOKENS):
            began = time.thread_time()
            matcher.fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), count=vocabulary, bitorder="little")
            allowed = np.flatnonzero(bits)
            if not len(allowed) or matcher.finished or not matcher.accept(int(allowed[pick])):
                break
            if time.thread_time() - began > _DRY_SECONDS:
                raise RequestError(
                    f"{_FIELD} is too ambiguous: a single token takes too long to check; avoid "
                    "repetitions inside repetitions",
                    _FIELD,
                )


def _check_size(constraint: StructuredOutputs) -> None:
    """RequestError for what is too large to be worth a compiler's time."""
    if constraint.regex is not None:
        _check_repeats(constraint.regex)
    if constraint.json is None:
        return
    given = constraint.json
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{_FIELD}.json is not valid JSON: {error}"[:300], _FIELD) from error
    for count, (depth, node) in enumerate(_nodes(schema)):
        if depth > _MAX_DEPTH or count > _MAX_NODES:
            raise RequestError(
                f"{_FIELD}.json: at most {_MAX_NODES} values, nested {_MAX_DEPTH} deep", _FIELD
            )
        if isinstance(node, dict) and isinstance(node.get("pattern"), str):
            _check_repeats(node["pattern"])


def _nodes(value: Any) -> Iterator[tuple[int, Any]]:
    """(depth, value) of everything in a JSON value, parents first."""
    waiting = [(0, value)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting += [(depth + 1, each) for each in inner]


def _check_repeats(pattern: str) -> None:
    """RequestError if counted repetitions, multiplied along their nesting, are too many."""
    inner = [1]  # most repetitions so far in each open group
    last = 1  # ... in the item that a count would apply to
    for match in _QUANTIFIED.finditer(pattern):
        text = match.group()
        if text == "(":
            inner.append(1)
        elif text == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
            continue
        elif text.startswith("{"):
            low, high = match.group(1), match.group(2)
            count = max((int(number[:9]) for number in (low, high) if number), default=1)
            closes = pattern[: match.start()].endswith(")")
            inner[-1] = max(inner[-1], count * (last if closes else 1))
        if max(inner) > _MAX_REPEATS:
            raise RequestError(
                f"{_FIELD}: a regular expression repeats something up to {max(inner)} times; at "
                f"most {_MAX_REPEATS} are possible",
                _FIELD,
            )
