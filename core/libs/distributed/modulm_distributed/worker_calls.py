"""Calls into workers (`Executor.call`): as frames between processes, and with a time limit."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from inspect import isfunction
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from modulm.errors import EngineError, EngineTimeout, RequestError
from modulm_wire import frames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["TimedCalls", "function_name", "pack_answer", "pack_call"]

T = TypeVar("T")


class TimedCalls:
    """Calls into a worker of this process, with timeouts after which the call continues.

    Call `wait` before using the worker again.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._overdue: Future[Any] | None = None

    def run(self, name: str, call: Callable[[], T], timeout: float | None) -> T:
        """Run `call` and return its result.

        timeout: in seconds; if given, the call runs in another thread and EngineTimeout is raised
        if it takes longer.
        """
        self.wait()
        if timeout is None:
            return call()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="modulm-calls")
        future: Future[T] = self._thread.submit(call)
        self._overdue = future
        try:
            return future.result(timeout)
        except TimeoutError as error:
            if future.done():
                raise
            raise EngineTimeout(f"{name}: no answer within {timeout:g} s") from error

    def wait(self) -> None:
        """Wait until a call that timed out has ended; its result is discarded."""
        overdue = self._overdue
        if overdue is not None:
            overdue.exception()
            self._overdue = None

    def close(self) -> None:
        """Wait for the last call."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None


def function_name(function: str | Callable[..., Any]) -> str:
    """Return a name by which other processes find a function; "module:name" for a function object.

    Raises RequestError for one that cannot be imported, such as a lambda.
    """
    if isinstance(function, str):
        return function
    module, name = (getattr(function, key, "") for key in ("__module__", "__qualname__"))
    if module in sys.modules and module != "__main__":
        try:
            if attrgetter(name)(sys.modules[module]) is function:
                return f"{module}:{name}"
        except AttributeError:
            pass
    raise RequestError(
        f"{function!r} cannot be sent to another process: functions are imported there by their "
        "names. Define it at the top of a module that workers can import, or register it in the "
        "entry-point group modulm.worker_functions and pass its name",
        "method",
    )


def pack_call(
    kind: str,
    number: int,
    function: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *more: Any,
) -> bytes:
    """Pack a call into a frame; functions among the arguments are sent as their names.

    Raises RequestError for arguments that cannot be sent.
    """
    args = [function_name(item) if isfunction(item) else item for item in args]
    try:
        data = frames.pack(kind, number, function, list(args), dict(kwargs or {}), *more)
    except Exception as error:
        raise RequestError(
            f"{function}: the arguments cannot be sent: {error}. {_PLAIN}", "args"
        ) from error
    if len(data) > frames.LIMIT:
        raise RequestError(f"{function}: the arguments have more than {frames.LIMIT} bytes", "args")
    return data


def pack_answer(number: int, value: Any, error: BaseException | None) -> bytes:
    """Pack an answer into a frame, or an error if the answer cannot be sent."""
    problem = ""
    try:
        data = frames.pack("answer", number, value, frames.pack_error(error))
        if len(data) <= frames.LIMIT:
            return data
        problem = f"it has more than {frames.LIMIT} bytes"
    except Exception as failed:
        problem = str(failed)
    refused = EngineError(f"the answer cannot be sent: {problem}. {_PLAIN}")
    return frames.pack("answer", number, None, frames.pack_error(refused))


_PLAIN = "Use numbers, strings, bytes, lists, dicts and numpy arrays"
