"""Values of `--isolate`, and which packages can be isolated."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from modulm.errors import ConfigError, PluginBroken
from modulm.plugins.index import normalized

if TYPE_CHECKING:
    from modulm.plugins import Declaration, PluginManager

__all__ = ["IsolationError", "Limits", "check_isolation", "parse_size", "parse_term"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
#: Why drivers of a kind stay in the process that uses them.
_REASONS = {
    "flags": "flags are declared in the process that parses them",
    "commands": "a command is the process",
    "kinds": "a kind is what other packages are checked with",
    "request_listeners": "it receives objects of the server",
}
_DEFAULT_REASON = "its calls exchange tensors or objects of the engine"


class IsolationError(PluginBroken):
    """The process of a package ended, took too long, or cannot be started. Names the package."""


@frozen
class Limits:
    """Limits of an isolated package. timeout: seconds per call. memory: bytes, None: no limit."""

    timeout: float = 5.0
    memory: int | None = None


def parse_size(text: str) -> int:
    """Parse a number of bytes such as "512MiB". Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** " kmgt".index(unit[:1] or " "))


def parse_term(term: str) -> tuple[str, Limits]:
    """Parse "NAME:timeout=2:memory=512MiB". Raises ConfigError naming `isolate`."""
    name, *settings = term.split(":")
    limits = Limits()
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            if key == "timeout":
                limits = evolve(limits, timeout=float(value))
            elif key == "memory":
                limits = evolve(limits, memory=parse_size(value))
            else:
                raise ValueError(f"{key!r} is no setting; settings are timeout and memory")
        except ValueError as error:
            raise ConfigError("isolate", f"{term}: {error}") from error
    if not name or not limits.timeout > 0 or limits.memory == 0:
        raise ConfigError("isolate", f"{term!r} has no name, or a limit that is not above 0")
    return name, limits


def check_isolation(terms: Iterable[str], manager: PluginManager) -> None:
    """Raise ConfigError if a term names no installed package, or one that cannot be isolated.

    All plugins of a package run in its process, so one that cannot is a reason to refuse it.
    """
    installed = manager.everything()
    kinds = {declaration.name for declaration in manager.names("isolators")}
    for term in terms:
        name, _ = parse_term(term)
        declared = [d for d in installed if normalized(d.distribution) == normalized(name)]
        if not declared:
            offers = {d.distribution for d in installed if d.name == name}
            hint = f"; {name!r} is of {' and of '.join(sorted(offers))}" if offers else ""
            raise ConfigError("isolate", f"no installed package is called {name!r}{hint}")
        for declaration in declared:
            if declaration.kind not in kinds:
                raise ConfigError("isolate", _refusal(declaration, kinds))


def _refusal(declaration: Declaration, kinds: Iterable[str]) -> str:
    """The message that a plugin cannot be isolated, and why."""
    reason = _REASONS.get(declaration.kind, _DEFAULT_REASON)
    return (
        f"{declaration} cannot run in a process of its own: {reason}. "
        f"What can is {', '.join(sorted(kinds))}"
    )
