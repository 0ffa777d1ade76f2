"""Hook plugins: registered completely or not at all, called by pluggy, disabled when they fail.

pluggy makes every call, so `tryfirst`, `trylast`, `wrapper=True`, `firstresult` and historic hooks
work as documented there. In pluggy an exception of one plugin ends the call for all, which is
intended only for the hooks in `hookspecs.STOPPING`. So implementations are wrapped in a guard that
checks their results. On failure the guard logs the error, disables the plugin and returns None; in
stopping hooks it raises an error that names the plugin.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial, wraps
from typing import Any

import pluggy
from attrs import evolve

from modulm.errors import ModulmError, PluginBroken
from modulm.plugins import hookspecs
from modulm.plugins.calls import broken
from modulm.plugins.declaration import Choice, Declaration
from modulm.plugins.kinds import KINDS

__all__ = ["Hooks"]

log = logging.getLogger("modulm.plugins")

_PREFIX = "modulm_"
_KINDS_OF = {
    hook: tuple(kind.name for kind in KINDS.values() if kind.hook == hook)
    for hook in {kind.hook for kind in KINDS.values() if kind.hook}
}


class _Member:
    """The object registered with pluggy for a plugin: the same implementations, guarded."""

    def __init__(self, plugin: object, options: Mapping[str, pluggy.HookimplOpts]) -> None:
        self.plugin = plugin
        self.options = options


class _Manager(pluggy.PluginManager):
    """pluggy's manager; guarded functions keep the options of their originals."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        if isinstance(plugin, _Member):
            return plugin.options.get(name)
        return super().parse_hookimpl_opts(plugin, name)


class Hooks:
    """The hook plugins of one `PluginManager`."""

    def __init__(self) -> None:
        self._manager = _Manager("modulm")
        self._manager.add_hookspecs(hookspecs)
        self._known = [name for name in hookspecs.__all__ if name.startswith(_PREFIX)]

    @property
    def relay(self) -> pluggy.HookRelay:
        """pluggy's relay: `relay.modulm_report_header(config=...)`."""
        return self._manager.hook

    def has(self, plugin: object) -> bool:
        """Whether the object is registered."""
        return any(member.plugin is plugin for member in self._manager.get_plugins())

    def add(self, plugin: object, name: str) -> tuple[Declaration, ...]:
        """Register a plugin and return its declarations; on an error nothing stays registered.

        Raises PluginBroken for a misspelled hook or argument, an unmarked hook, an invalid
        declaration, or an exception of the plugin.
        """
        try:
            member = self._member(plugin, name)
        except PluginBroken as error:
            raise PluginBroken(f"hook plugin {name}: {error}") from error
        try:
            self._manager.register(member, name)
            self._manager.check_pending()
            return tuple(self._declarations(member))
        except (Exception, SystemExit) as error:
            self._remove(member)
            reason = str(error) or type(error).__name__
            raise PluginBroken(f"hook plugin {name}: {reason}") from error

    def remove(self, name: str) -> None:
        """Unregister the plugin of this name."""
        self._remove(self._manager.get_plugin(name))

    def _member(self, plugin: object, name: str) -> _Member:
        """Wrap the plugin's implementations. Raises PluginBroken for misspelled or unmarked ones.

        pluggy would check names only after calling historic hooks.
        """
        options: dict[str, pluggy.HookimplOpts] = {}
        member = _Member(plugin, options)
        for attribute in dir(plugin):
            marked = self._manager.parse_hookimpl_opts(plugin, attribute)
            if marked is None:
                _check_unmarked(plugin, attribute)
                continue
            hook = marked.get("specname") or attribute
            self._check_known(hook)
            function = getattr(plugin, attribute)
            around = marked["wrapper"] or marked["hookwrapper"]
            generates = around and inspect.isgeneratorfunction(function)
            if hook not in _KINDS_OF and not (generates and hook in hookspecs.STOPPING):
                guard = _guard_wrapper if generates else _guard
                checked = partial(_checked, hook, name, marked)
                function = guard(function, checked, partial(self._failed, member, name, hook))
            options[attribute] = marked
            setattr(member, attribute, function)
        return member

    def _check_known(self, hook: str) -> None:
        if hook not in self._known:
            close = get_close_matches(hook, self._known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise PluginBroken(f"there is no hook {hook}{hint}")

    def _failed(self, member: _Member, name: str, hook: str, error: BaseException) -> None:
        if hook in hookspecs.STOPPING:
            if isinstance(error, ModulmError):
                raise error
            without = f"--plugins=-hooks/{name.partition(' ')[0]} leaves it out"
            raise broken(f"hooks/{name}: {hook} raised an error ({without})", error) from error
        log.error("plugin %s raised an error in %s and is disabled", name, hook, exc_info=error)
        self._remove(member)

    def _remove(self, member: object) -> None:
        if self._manager.is_registered(member):
            self._manager.unregister(member)

    def _declarations(self, member: _Member) -> Iterator[Declaration]:
        for hook, kinds in _KINDS_OF.items():
            for implementation in getattr(self._manager.hook, hook).get_hookimpls():
                if implementation.plugin is member:
                    for declared in implementation.function():
                        yield _complete(declared, hook, kinds)


def _check_unmarked(plugin: object, attribute: str) -> None:
    if attribute.startswith(_PREFIX) and inspect.isroutine(
        inspect.getattr_static(plugin, attribute)
    ):
        raise PluginBroken(
            f"{attribute} is not marked as a hook; put @hookimpl (from modulm.plugins) above it"
        )


def _checked(hook: str, name: str, marked: pluggy.HookimplOpts, answer: Any) -> Any:
    """Return an implementation's result if it has the type of the hook's signature.

    A wrapper's result contains the results of all. Raises PluginBroken.
    """
    if marked["hookwrapper"]:
        return answer
    if not marked["wrapper"] or getattr(hookspecs, hook).modulm_spec["firstresult"]:
        return _fitting(hook, name, answer)
    if not isinstance(answer, list):
        raise PluginBroken(f"it returned {answer!r}, not the others' answers")
    return [_fitting(hook, name, one) for one in answer]


def _fitting(hook: str, name: str, answer: Any) -> Any:
    """Check one result; sequences become lists, and choices record the plugin that made them."""
    stated = getattr(hookspecs, hook).__annotations__["return"].removesuffix(" | None")
    if answer is None or stated == "None":
        return answer
    several = stated.startswith("Sequence[")
    type_name = stated.removeprefix("Sequence[").removesuffix("]")
    if several and (isinstance(answer, str) or not isinstance(answer, Iterable)):
        raise PluginBroken(f"it returned {answer!r}, which is not a list of {type_name}")
    answers = list(answer) if several else [answer]
    for one in answers:
        # by name: the contracts are not imported for this
        if type_name not in {cls.__name__ for cls in type(one).__mro__}:
            raise PluginBroken(f"it returned {one!r}, which is not a {type_name}")
    if isinstance(answer, Choice) and not answer.by:
        return evolve(answer, by=name)
    return answers if several else answer


def _guard(
    function: Callable[..., Any],
    checked: Callable[[Any], Any],
    failed: Callable[[BaseException], None],
) -> Callable[..., Any]:
    """Wrap a function to return None if it raises or its result is invalid."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return checked(function(*arguments, **named))
        except (Exception, SystemExit) as error:
            failed(error)
            return None

    return call


def _guard_wrapper(
    function: Callable[..., Generator[None, Any, Any]],
    checked: Callable[[Any], Any],
    failed: Callable[[BaseException], None],
) -> Callable[..., Generator[None, Any, Any]]:
    """Wrap a hook wrapper to pass on its input if it raises or yields incorrectly.

    Supports both of pluggy's styles: the return value of an old `hookwrapper` is ignored.
    """

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Generator[None, Any, Any]:
        inner = function(*arguments, **named)
        try:
            next(inner)
        except (Exception, SystemExit) as error:
            failed(error)
            return (yield)
        result = yield
        try:
            inner.send(result)
        except StopIteration as end:
            returned = end.value
        except (Exception, SystemExit) as error:
            failed(error)
            return result
        else:
            failed(RuntimeError(f"{function.__qualname__} yields twice"))
            return result
        try:
            return checked(returned)
        except PluginBroken as error:
            failed(error)
            return result

    return call


def _complete(declared: object, hook: str, kinds: tuple[str, ...]) -> Declaration:
    if not isinstance(declared, Declaration):
        raise PluginBroken(f"{hook} returned {declared!r}, which is not a Declaration")
    kind = declared.kind or (kinds[0] if len(kinds) == 1 else "")
    if kind not in kinds:
        raise PluginBroken(
            f"{hook} declares {declared.name!r} of kind {kind!r}; it may be {' or '.join(kinds)}"
        )
    return evolve(declared, kind=kind).check()
