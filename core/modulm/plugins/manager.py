"""Plugin manager: the installed plugins, those that may be used, and loading by name."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from os.path import abspath
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from modulm.errors import (
    ArchitectureNotFound,
    ConfigError,
    PluginBroken,
    PluginConflict,
    PluginError,
    PluginIncompatible,
    PluginNotFound,
)
from modulm.plugins.declaration import Declaration
from modulm.plugins.drivers import import_driver, installed
from modulm.plugins.files import load_file, loaded_files
from modulm.plugins.index import install_hint, is_first_party
from modulm.plugins.kinds import Kind, find_kind, kind_names
from modulm.plugins.moved import driver_name
from modulm.plugins.selection import Selection, check_terms, offers_of

if TYPE_CHECKING:
    from pluggy import HookRelay

    from modulm.plugins.hooks import Hooks

__all__ = [
    "PluginManager", "PluginSet", "check_api", "check_driver", "configure", "current", "register",
    "unregister", "using",
]  # fmt: skip

log = logging.getLogger("modulm.plugins")

#: Drivers registered at run time replace installed ones of the same name.
_REGISTERED_PRIORITY = 100

#: Maximum number of names that an error lists.
_FEW = 12


@frozen
class PluginSet:
    """What a worker process needs to have the same plugins as the process that starts it."""

    selection: Selection
    installed: frozenset[tuple[str, str, str, str]]
    registered: tuple[Declaration, ...] = ()
    hook_modules: tuple[str, ...] = ()
    #: Files that register plugins (`--tool-parser-plugin`).
    files: tuple[str, ...] = ()
    #: `sys.path` for modules that were registered at run time.
    path: tuple[str, ...] = ()


class PluginManager:
    """One set of plugins. Listing imports nothing; loading imports one plugin.

    All work is done on first use.
    """

    def __init__(self, selection: Selection | None = None) -> None:
        self.selection = selection or Selection()
        #: Hook plugins that could not be registered: name -> the error.
        self.problems: dict[str, PluginError] = {}
        self._installed: tuple[Declaration, ...] | None = None
        #: Installed and permitted plugins by kind, since many are looked up at startup.
        self._installed_by_kind: defaultdict[str, list[Declaration]] = defaultdict(list)
        self._added: dict[tuple[str, str, str], Declaration] = {}
        self._drivers: dict[Declaration, Any] = {}
        self._hook_modules: dict[str, str | None] = {}
        self._hooks: Hooks | None = None
        self._hooks_loaded = False

    # Listing.

    def everything(self) -> tuple[Declaration, ...]:
        """Return everything that is installed or was added, including excluded plugins and hooks.

        Raises ConfigError for a name in the allow list that no plugin has.
        """
        if self._installed is None:
            declarations = tuple(installed())
            check_terms(self.selection.allow, declarations)
            self._installed = declarations
            for declaration in filter(self._permits, declarations):
                self._installed_by_kind[declaration.kind].append(declaration)
        return (*self._installed, *self._added.values())

    def check_selection(self) -> None:
        """Raise ConfigError for a name in `--plugins` that no plugin has."""
        isolated = (term.partition(":")[0] for term in self.selection.isolate)
        check_terms((*self.selection.allow, *self.selection.deny, *isolated), self.everything())

    def names(self, kind: str) -> tuple[Declaration, ...]:
        """Return the drivers of a kind that may be used, sorted by name, without imports.

        Drivers declared by hook plugins are included once hook plugins have been loaded.
        """
        return self._allowed(find_kind(kind).name)

    def _allowed(self, kind: str) -> tuple[Declaration, ...]:
        self.everything()
        added = (d for d in self._added.values() if d.kind == kind and self._permits(d))
        permitted = (*self._installed_by_kind.get(kind, ()), *added)
        return tuple(sorted(permitted, key=lambda d: (d.name, d.distribution)))

    def _permits(self, declaration: Declaration) -> bool:
        return declaration.source == "registered" or self.selection.permits(declaration)

    # Finding and loading one.

    def find(self, kind: str, name: str) -> Declaration:
        """Return the declaration of a name with the highest priority.

        Raises PluginNotFound (ArchitectureNotFound for models), PluginConflict for equal
        priorities, and errors of `check_selection`, except for commands.
        """
        known = find_kind(kind)
        if kind != "commands":
            self.check_selection()
        if known.hook is not None:
            self.load_hooks()
        offers = [d for d in self.names(kind) if d.name == name]
        if not offers and (here := driver_name(kind, name)) != name:
            return self.find(kind, here)
        if not offers:
            raise self._not_found(known, name)
        highest = max(d.priority for d in offers)
        best = [d for d in offers if d.priority == highest]
        if len({d.target for d in best}) > 1:
            raise PluginConflict(
                f"{known.noun} {name!r} is provided by "
                f"{' and by '.join(d.origin for d in best)}; disable one of them: "
                f"--plugins=-{best[-1].distribution}"
            )
        return best[0]

    def stand_in(self, declaration: Declaration) -> str:
        """Describe which distribution's driver replaces which others; "" if it replaces none."""
        offers = [d for d in self.names(declaration.kind) if d.name == declaration.name]
        others = [d.origin for d in offers if d.priority < declaration.priority]
        return f"; {declaration.origin}, in place of {' and '.join(others)}" if others else ""

    def switched_off(self, kind: str, name: str) -> Declaration | None:
        """Return the driver of this name if `--plugins` excludes all of them, else None."""
        named = [d for d in self.everything() if (d.kind, d.name) == (kind, name)]
        return named[0] if named and not any(map(self._permits, named)) else None

    def load(self, kind: str, name: str) -> Any:
        """Import the driver of a name and check its class and contract version.

        Raises like `find`, PluginBroken, or PluginIncompatible. A failed import leaves nothing
        registered.
        """
        return self.load_declared(self.find(kind, name))

    def load_declared(self, declaration: Declaration) -> Any:
        """Import one declaration, once, and check it; see `load`."""
        if declaration in self._drivers and declaration.driver is None:
            return self._drivers[declaration]
        kind = find_kind(declaration.kind)
        if declaration.api is not None:
            check_api(declaration, declaration.api, kind)
        with self._transaction():
            driver = self._import(declaration)
            check_driver(declaration, driver, kind)
        self._drivers[declaration] = driver
        return driver

    def _import(self, declaration: Declaration) -> Any:
        """Import a driver, or create the stand-in of one that runs in a process of its own."""
        term = self.selection.isolation(declaration)
        if term is None or declaration.kind == "isolators":
            return import_driver(declaration)
        return self.load("isolators", declaration.kind)(declaration, term)

    def options(self, kind: str, name: str, table: Mapping[str, Any]) -> Any:
        """Structure a driver's options into its `Config`; None if it has none.

        Raises ConfigError with the path of an unknown, missing or ill-typed key.
        """
        from modulm.plugins.options import structure

        config = getattr(self.load(kind, name), "Config", None)
        if config is not None:
            return structure(table, config, f"{kind}.{name}")
        if table:
            keys = ", ".join(sorted(table))
            raise ConfigError(f"{kind}.{name}", f"takes no options, got {keys}")
        return None

    def configured(self, kind: str, tables: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Return the configured driver of a kind and its options, or None.

        tables: `--plugin-config`. Raises ConfigError if it has several drivers of the kind.
        """
        named = tables.get(kind) or {}
        if not named:
            return None
        if len(named) > 1:
            raise ConfigError("plugin_config", f"{kind}: one of {', '.join(named)}, not several")
        ((name, table),) = named.items()
        return self.load(kind, name), self.options(kind, name, table)

    def _not_found(self, kind: Kind, name: str) -> PluginNotFound:
        error = ArchitectureNotFound if kind.name == "models" else PluginNotFound
        off = self.switched_off(kind.name, name)
        if off is not None:
            switched = f"is disabled by --plugins={self.selection}"
            return error(f"{kind.noun} {name!r} of {off.origin} {switched}")
        offers = offers_of(self.names(kind.name))
        names = sorted(offers)
        close = [offers[near] for near in get_close_matches(name, names, n=3)]
        parts = [f"no installed plugin provides {kind.noun} {name!r}"]
        parts += [f"did you mean {' or '.join(close)}?"] if close else []
        listed = f"`modulm plugins list {kind.name}` lists the installed ones"
        listed = f"installed: {', '.join(names)}" if len(names) <= _FEW else listed
        parts += [listed] if names and not close else []
        parts += [hint] if (hint := install_hint(kind.name, name)) else []
        parts += [
            f"{d.origin} offers it as {d.kind!r}, which is no kind"
            for d in self.everything()
            if d.name == name and d.kind not in ("hooks", *kind_names())
        ]
        parts += ["or --model-impl transformers"] if kind.name == "models" else []
        parts += [f"({problem})" for problem in self.problems.values()]
        return error("; ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:]))

    # Adding at run time.

    def register(self, kind: str, name: str, driver: object) -> None:
        """Register a driver at run time; it replaces an installed one of the same name.

        driver: "package.module:attribute", imported when it is needed, or the object itself.
        Registering the same path again, for example by rerunning a notebook cell, replaces the
        earlier driver; another path under the same name raises PluginConflict.
        """
        known = find_kind(kind)
        declaration = Declaration(
            name=name,
            target=driver if isinstance(driver, str) else _path_of(driver),
            kind=known.name,
            priority=_REGISTERED_PRIORITY,
            source="registered",
            driver=None if isinstance(driver, str) else driver,
        )
        if isinstance(driver, str):
            declaration.check()
        before = self._added.get((kind, name, ""))
        if before is not None and before != declaration:
            raise PluginConflict(
                f"{known.noun} {name!r} is already registered as {before.target!r}, "
                f"not as {declaration.target!r}; unregister({kind!r}, {name!r}) comes first"
            )
        self._added[kind, name, ""] = declaration

    def unregister(self, kind: str, name: str) -> None:
        """Remove a driver registered at run time, or with kind "hooks" a plugin added by `add`.

        Raises PluginNotFound if there is none.
        """
        if kind == "hooks" and name in self._hook_modules:
            del self._hook_modules[name]
            self._pluggy().remove(name)
            self._added = {key: d for key, d in self._added.items() if d.distribution != name}
        elif self._added.pop((kind, name, ""), None) is None:
            raise PluginNotFound(f"no {kind} {name!r} was registered at run time")

    def add(self, plugin: object, name: str | None = None) -> None:
        """Register a hook plugin (a module or an object) and the drivers that it declares.

        It is called before installed ones. Adding an object twice has no effect; another object of
        the same name replaces it. Raises PluginBroken, with nothing registered.
        """
        self.load_hooks()
        if self._pluggy().has(plugin):
            return
        module = plugin.__name__ if isinstance(plugin, ModuleType) else None
        title = name or module or type(plugin).__name__
        if title in self._hook_modules:
            self.unregister("hooks", title)
        with self._transaction():
            self._commit(self._pluggy().add(plugin, title), title, "")
        self._hook_modules[title] = module

    def _commit(self, declared: tuple[Declaration, ...], distribution: str, version: str) -> None:
        for declaration in declared:
            offered = evolve(declaration, distribution=distribution, version=version, source="hook")
            self._added[offered.kind, offered.name, distribution] = offered

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Undo registrations inside the block if it raises."""
        added = dict(self._added)
        try:
            yield
        except BaseException:
            self._added = added
            raise

    # Hooks.

    @property
    def hook(self) -> HookRelay:
        """pluggy's relay, to call a hook: `plugins.hook.modulm_report_header(config=config)`."""
        self.load_hooks()
        return self._pluggy().relay

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a hook by name; implementations that raise are logged and disabled."""
        caller = getattr(self.hook, hook)
        if caller.get_hookimpls():
            caller(**arguments)

    def gather(self, hook: str, **arguments: Any) -> list[Any]:
        """Call a hook and concatenate its results, e.g. lines of the banner."""
        return [item for items in getattr(self.hook, hook)(**arguments) for item in items]

    def config_final(self, config: Any) -> None:
        """Call `modulm_config_final`, also for hook plugins that are added later."""
        self.hook.modulm_config_final.call_historic(kwargs={"config": config})

    def load_hooks(self) -> None:
        """Import and register the installed and permitted hook plugins, once.

        Failures are logged and stored in `problems`; if `--plugins` names the plugin, they are
        raised.
        """
        if self._hooks_loaded:
            return
        self._hooks_loaded = True
        hooks = self._allowed("hooks")
        for declaration in hooks:
            try:
                _check_alone(declaration, hooks)
                self._load_hook(declaration)
            except PluginError as error:
                self.problems[declaration.name] = error
                if self.selection.names(declaration):
                    self._hooks_loaded = False
                    raise
                log.warning("%s", error)

    def _load_hook(self, declaration: Declaration) -> None:
        title = f"{declaration.name} ({declaration.origin})"
        with self._transaction():
            plugin = self._import(declaration)
            if not self._pluggy().has(plugin):
                declared = self._pluggy().add(plugin, title)
                self._commit(declared, declaration.distribution, declaration.version)

    def _pluggy(self) -> Hooks:
        if self._hooks is None:
            from modulm.plugins.hooks import Hooks

            self._hooks = Hooks()
        return self._hooks

    # Worker processes.

    def snapshot(self) -> PluginSet:
        """Return the plugin set for `replay` in another process.

        Raises PluginError for an object registered at run time that cannot be imported by its path.
        """
        registered = [d for d in self._added.values() if d.source == "registered"]
        for declaration in registered:
            if declaration.driver is not None and _resolve(declaration) is not declaration.driver:
                raise PluginError(
                    f"{declaration.kind}/{declaration.name} was registered as an object, which "
                    "a worker process cannot import; register it as 'package.module:attribute'"
                )
        for name, module in self._hook_modules.items():
            if module is None:
                raise PluginError(f"hook plugin {name} is an object; workers need a module")
        return PluginSet(
            self.selection,
            self._fingerprint(),
            tuple(evolve(d, driver=None) for d in registered),
            tuple(module for module in self._hook_modules.values() if module),
            loaded_files(),
            tuple(map(abspath, sys.path)) if registered or self._hook_modules else (),
        )

    @classmethod
    def replay(cls, plugins: PluginSet) -> PluginManager:
        """Create a manager with the same plugins in this process.

        Raises PluginConflict if installed distributions or versions differ.
        """
        manager = cls(plugins.selection)
        here = manager._fingerprint()
        if here != plugins.installed:
            differing = sorted({item[0] for item in here ^ plugins.installed})
            raise PluginConflict(
                f"the plugins of this process differ from those of the process that started it: "
                f"{', '.join(differing)} differ"
            )
        sys.path += [folder for folder in plugins.path if folder not in sys.path]
        with using(manager):
            for file in plugins.files:
                load_file("plugins", file)
        for declaration in plugins.registered:
            manager.register(declaration.kind, declaration.name, declaration.target)
        for module in plugins.hook_modules:
            manager.add(import_module(module), module)
        return manager

    def _fingerprint(self) -> frozenset[tuple[str, str, str, str]]:
        return frozenset(
            (d.distribution, d.version, f"{d.kind}/{d.name}", d.target)
            for d in self.everything()
            if d.source == "entry point" and self.selection.permits(d)
        )


def check_api(declaration: Declaration, api: Any, kind: Kind) -> None:
    """Raise PluginIncompatible unless `api`, a version or range, includes the core's version."""
    version = kind.api
    if version is None:
        return
    lowest, highest = api if isinstance(api, tuple) and len(api) == 2 else (api, api)
    if not _is_version(lowest) or not _is_version(highest):
        stated = "no contract version" if api is None else f"api = {api!r}"
        raise PluginIncompatible(
            f"{declaration} states {stated}; set `api = {version}` on the class"
        )
    if not lowest <= version <= highest:
        written = f"{lowest}" if lowest == highest else f"{lowest} to {highest}"
        raise PluginIncompatible(
            f"{declaration} was written for version {written} of the {kind.noun} contract and "
            f"this modulm has version {version}; install a matching release of "
            f"{declaration.distribution or declaration.target}"
        )


def _check_alone(hook: Declaration, hooks: Iterable[Declaration]) -> None:
    """Raise PluginConflict if another distribution has a hook plugin of the same name.

    This project's own are used anyway.
    """
    origins = sorted(d.origin for d in hooks if d.name == hook.name)
    if len(origins) > 1 and not is_first_party(hook.distribution):
        raise PluginConflict(
            f"hook plugin {hook.name!r} is provided by {' and by '.join(origins)}; that of "
            f"{hook.distribution} is not used; disable one of them: --plugins=-{hook.distribution}"
        )


def _is_version(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_driver(declaration: Declaration, driver: Any, kind: Kind) -> None:
    """Raise PluginBroken for a driver of the wrong class; also checks its API."""
    contract = kind.contract_class()
    if contract is None:
        return
    if not isinstance(driver, type) or not issubclass(driver, contract):
        raise PluginBroken(
            f"{declaration}: {declaration.target} is not a subclass of "
            f"{contract.__module__}.{contract.__name__}"
        )
    check_api(declaration, getattr(driver, "api", None), kind)


def _path_of(driver: object) -> str:
    named = driver if hasattr(driver, "__qualname__") else type(driver)
    return f"{named.__module__}:{named.__qualname__}"


def _resolve(declaration: Declaration) -> object:
    """Import the target of a declaration; None if that fails."""
    module, _, path = declaration.target.partition(":")
    if module == "__main__":
        return None
    try:
        target: object = import_module(module)
        for name in path.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError):
        return None
    return target


_current: PluginManager | None = None


def current() -> PluginManager:
    """Return the plugin manager of this process, created with the environment's selection."""
    global _current
    if _current is None:
        from modulm.config.environ import plugin_selection

        _current = PluginManager(Selection.parse(plugin_selection()))
    return _current


def configure(selection: str) -> PluginManager:
    """Replace the selection (`--plugins`); run-time registrations are kept."""
    return _replace(PluginManager(Selection.parse(selection)))


def _replace(manager: PluginManager) -> PluginManager:
    global _current
    if _current is not None:
        for declaration in _current.everything():
            if declaration.source == "registered":
                manager.register(
                    declaration.kind, declaration.name, declaration.driver or declaration.target
                )
    _current = manager
    return manager


@contextmanager
def using(manager: PluginManager) -> Iterator[PluginManager]:
    """Temporarily make `manager` the process's plugin manager (workers, tests)."""
    global _current
    previous, _current = _current, manager
    try:
        yield manager
    finally:
        _current = previous


def register(kind: str, name: str, driver: object) -> None:
    """Register a driver in this process; see `PluginManager.register`."""
    current().register(kind, name, driver)


def unregister(kind: str, name: str) -> None:
    """Undo `register`; see `PluginManager.unregister`."""
    current().unregister(kind, name)
