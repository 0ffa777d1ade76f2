"""Hook plugins in another process: hooks whose arguments and results are plain values.

A hook plugin that raises is switched off, as always. If its process ends or takes too long, the
hook has no result this time, and the process is started again for the next call; hooks that can
stop a start do stop it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from attrs import asdict

from modulm.contracts.requests import StepStats
from modulm.errors import PluginBroken
from modulm.plugins import Check, Choice, Proposal, hookimpl
from modulm.plugins.hookspecs import STOPPING
from modulm_isolation.child import Questions, resolve
from modulm_isolation.process import IsolatedDriver, driver_of

if TYPE_CHECKING:
    from modulm.plugins.declaration import Declaration

__all__ = ["HOOKS", "HookServer", "stand_in"]

log = logging.getLogger("modulm.plugins")

_SERVER = "modulm_isolation.hook_plugins:HookServer"


def _pack_config(config: Any) -> Any:
    from modulm_wire.frames import pack_config

    return None if config is None else ["config", pack_config(config)]


def _pack_params(params: Any) -> Any:
    from modulm_wire.packing import pack_params

    return ["params", pack_params(params)]


def _pack_error(error: Any) -> Any:
    from modulm_wire.frames import pack_error

    return ["error", pack_error(error)]


def _pack_stats(stats: Any) -> Any:
    return ["stats", list(stats)]


def _unpack(value: Any) -> Any:
    """Restore an argument; plain ones are not packed."""
    from modulm_wire import frames, packing

    if not isinstance(value, list) or len(value) != 2:
        return value
    kind, packed = value
    if kind == "stats":
        return StepStats._make(tuple(v) if isinstance(v, list) else v for v in packed)
    readers: Mapping[str, Callable[[Any], Any]] = {
        "config": frames.unpack_config,
        "params": packing.unpack_params,
        "error": frames.unpack_error,
        "plain": lambda item: item,
    }
    return readers[kind](packed)


def _functions(call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The stand-ins of all hooks that can be isolated; pluggy reads their parameters' names."""

    def modulm_choose_model(architectures: Any, config: Any) -> Any:
        return call(
            "modulm_choose_model",
            architectures=["plain", list(architectures)],
            config=["plain", dict(config)],
        )

    def modulm_config_proposals(config: Any) -> Any:
        return call("modulm_config_proposals", config=_pack_config(config))

    def modulm_config_final(config: Any) -> Any:
        return call("modulm_config_final", config=_pack_config(config))

    def modulm_engine_started(config: Any) -> Any:
        return call("modulm_engine_started", config=_pack_config(config))

    def modulm_engine_stopping() -> Any:
        return call("modulm_engine_stopping")

    def modulm_engine_failed(error: Any) -> Any:
        return call("modulm_engine_failed", error=_pack_error(error))

    def modulm_request_admitted(request: Any, params: Any) -> Any:
        return call("modulm_request_admitted", request=request, params=_pack_params(params))

    def modulm_request_finished(request: Any, reason: Any) -> Any:
        return call("modulm_request_finished", request=request, reason=reason)

    def modulm_step_finished(stats: Any) -> Any:
        return call("modulm_step_finished", stats=_pack_stats(stats))

    def modulm_report_header(config: Any) -> Any:
        return call("modulm_report_header", config=_pack_config(config))

    def modulm_doctor_checks() -> Any:
        return call("modulm_doctor_checks")

    everything = dict(locals())
    return {name: function for name, function in everything.items() if name != "call"}


#: Hooks that can be isolated.
HOOKS = frozenset(_functions(lambda hook, **arguments: None))
_RESULTS = {cls.__name__: cls for cls in (Check, Choice, Proposal)}


def stand_in(declaration: Declaration, term: str) -> Any:
    """Return the object that stands for a hook plugin.

    Raises PluginBroken if it cannot be imported, or implements a hook that cannot be isolated.
    """
    remote = driver_of(declaration, term, _SERVER)
    marks = remote.call("describe")
    for attribute, options in marks.items():
        hook = options.get("specname") or attribute
        if hook not in HOOKS or options.get("wrapper") or options.get("hookwrapper"):
            raise PluginBroken(
                f"{declaration} cannot run in a process of its own: its {hook} "
                f"{'wraps others' if hook in HOOKS else 'exchanges objects of the engine'}; hooks "
                f"that can are {', '.join(sorted(HOOKS))}"
            )
    plugin = SimpleNamespace()
    for attribute, options in marks.items():
        functions = _functions(_Caller(remote, attribute))
        function = functions[options.get("specname") or attribute]
        setattr(plugin, attribute, hookimpl(function, **options))
    return plugin


class _Caller:
    """Calls one implementation, and restores its result."""

    def __init__(self, remote: IsolatedDriver, attribute: str) -> None:
        self._remote = remote
        self._attribute = attribute
        #: The start of the process whose end was logged.
        self._logged = -1

    def __call__(self, hook: str, **arguments: Any) -> Any:
        process = self._remote.process
        try:
            kind, values = self._remote.call("call", self._attribute, arguments)
        except PluginBroken as error:
            if process.pid is not None or hook in STOPPING:
                raise
            if self._logged != process.generation:
                log.error("%s", error)
                self._logged = process.generation
            return None
        made = [_RESULTS[kind](**value) if kind in _RESULTS else value for value in values[1]]
        return made if values[0] else made[0]


class HookServer:
    """Serves hook plugins in the isolated process."""

    def __init__(self, questions: Questions) -> None:
        pass

    def describe(self, target: str) -> dict[str, dict[str, Any]]:
        """Return the marked functions and their options."""
        plugin = resolve(target)
        marked = {}
        for name in dir(plugin):
            options = getattr(getattr(plugin, name, None), "modulm_impl", None)
            if options is not None:
                marked[name] = {key: value for key, value in options.items() if value}
            elif name.startswith("modulm_") and inspect.isroutine(getattr(plugin, name, None)):
                raise TypeError(f"{name} is not marked as a hook; put @hookimpl above it")
        return marked

    def call(self, target: str, attribute: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Call an implementation with the arguments that it takes."""
        function = getattr(resolve(target), attribute)
        names = inspect.signature(function).parameters
        accepted = {name: _unpack(value) for name, value in arguments.items() if name in names}
        result = function(**accepted)
        several = isinstance(result, Sequence) and not isinstance(result, str)
        values = list(result) if several else [result]
        kind = type(values[0]).__name__ if values else ""
        if kind in _RESULTS:
            values = [asdict(value, recurse=False) for value in values]
        return [kind, [several, values]]

    def forget(self, numbers: Sequence[int]) -> None:
        """There is nothing to drop."""
