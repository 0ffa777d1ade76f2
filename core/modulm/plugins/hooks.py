"""Hook plugins: registered whole or not at all, told of events without being able to hurt them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import pluggy
from attrs import evolve

from modulm.errors import PluginBroken
from modulm.plugins import hookspecs
from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import KINDS

__all__ = ["Hooks"]

log = logging.getLogger("modulm.plugins")

_PREFIX = "modulm_"
_KINDS_OF = {
    hook: tuple(kind.name for kind in KINDS.values() if kind.hook == hook)
    for hook in {kind.hook for kind in KINDS.values() if kind.hook}
}


class Hooks:
    """The pluggy manager of one set of plugins."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("modulm")
        self._manager.add_hookspecs(hookspecs)
        self._known = [name for name in hookspecs.__all__ if name.startswith(_PREFIX)]

    @property
    def relay(self) -> Any:
        """pluggy's relay: `relay.modulm_report_header(config=...)`."""
        return self._manager.hook

    def has(self, plugin: object) -> bool:
        """Whether the object is registered."""
        return self._manager.is_registered(plugin)

    def add(self, plugin: object, name: str) -> tuple[Declaration, ...]:
        """Register a plugin and return what it declares. After an error nothing of it is left.

        Raises PluginBroken for a misspelt hook or argument, a hook that was not marked, a bad
        declaration, or anything that the plugin itself raises.
        """
        try:
            self._check_names(plugin)
            self._manager.register(plugin, name)
            self._manager.check_pending()
            return tuple(self._declarations(plugin))
        except Exception as error:
            self.remove(plugin)
            reason = str(error) or type(error).__name__
            raise PluginBroken(f"hook plugin {name}: {reason}") from error

    def remove(self, plugin: object) -> None:
        """Take a plugin out again; unknown ones are ignored."""
        if self._manager.is_registered(plugin):
            self._manager.unregister(plugin)

    def notify(self, hook: str, **arguments: Any) -> list[Any]:
        """Ask everybody; the answers that are not None, in the order of registration.

        An implementation that raises is logged and its plugin switched off.
        """
        caller = getattr(self._manager.hook, hook)
        answers = []
        for implementation in caller.get_hookimpls():
            try:
                given = (arguments[name] for name in implementation.argnames)
                answers.append(implementation.function(*given))
            except Exception:
                log.exception(
                    "plugin %s raised in %s and is switched off", implementation.plugin_name, hook
                )
                self.remove(implementation.plugin)
        return [answer for answer in answers if answer is not None]

    def replay(self, hook: str, **arguments: Any) -> None:
        """Deliver a historic notice, now and to every plugin that is registered later."""
        getattr(self._manager.hook, hook).call_historic(kwargs=arguments)

    def _check_names(self, plugin: object) -> None:
        """Before pluggy, which looks for misspelt hooks only when history has been delivered."""
        for attribute in dir(plugin):
            options = self._manager.parse_hookimpl_opts(plugin, attribute)
            if options is not None:
                hook = options.get("specname") or attribute
                if hook not in self._known:
                    close = get_close_matches(hook, self._known, n=1)
                    hint = f"; did you mean {close[0]}?" if close else ""
                    raise PluginBroken(f"there is no hook {hook}{hint}")
            elif attribute.startswith(_PREFIX) and inspect.isroutine(
                inspect.getattr_static(plugin, attribute)
            ):
                raise PluginBroken(
                    f"{attribute} is not marked as a hook; "
                    "put @hookimpl (from modulm.plugins) above it"
                )

    def _declarations(self, plugin: object) -> Iterator[Declaration]:
        for hook, kinds in _KINDS_OF.items():
            for implementation in getattr(self._manager.hook, hook).get_hookimpls():
                if implementation.plugin is plugin:
                    for declared in implementation.function():
                        yield _complete(declared, hook, kinds)


def _complete(declared: object, hook: str, kinds: tuple[str, ...]) -> Declaration:
    if not isinstance(declared, Declaration):
        raise PluginBroken(f"{hook} gave {declared!r}, which is not a Declaration")
    kind = declared.kind or (kinds[0] if len(kinds) == 1 else "")
    if kind not in kinds:
        raise PluginBroken(
            f"{hook} declares {declared.name!r} of kind {kind!r}; it may be {' or '.join(kinds)}"
        )
    return evolve(declared, kind=kind).check()
