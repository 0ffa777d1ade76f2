"""What calls into workers run (`Executor.call`): functions, and methods of `--worker-cls`."""

from __future__ import annotations

import importlib
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from modulm.errors import NotFound, PluginNotFound, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm.contracts.executor import WorkerHandle
    from modulm.plugins.manager import PluginManager

__all__ = ["find_function"]


def find_function(
    function: str | Callable[..., Any], worker: WorkerHandle, base: type, plugins: PluginManager
) -> Callable[..., Any]:
    """The function that a call names, to be called without the worker.

    Methods are those that the worker's class adds to `base`: the others are the engine's own.
    Raises NotFound, or RequestError for a path that cannot be imported.
    """
    if not isinstance(function, str):
        return partial(function, worker)
    module, separator, path = function.partition(":")
    if separator:
        try:
            return partial(attrgetter(path)(importlib.import_module(module)), worker)
        except (ImportError, AttributeError) as error:
            raise RequestError(f"{function} cannot be imported: {error}", "method") from error
    if not function.startswith("_") and not hasattr(base, function):
        method: Callable[..., Any] | None = getattr(worker, function, None)
        if callable(method):
            return method
    try:
        return partial(plugins.load("worker_functions", function), worker)
    except PluginNotFound as error:
        raise NotFound(f"{error}; the worker has no such method either", "method") from error
