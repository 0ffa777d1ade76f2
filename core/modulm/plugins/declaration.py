"""The values that plugins hand to the framework: what they offer, choose, propose and check."""

from __future__ import annotations

import re
from typing import Any

from attrs import field, frozen
from attrs.validators import instance_of

from modulm.errors import PluginBroken

__all__ = ["Check", "Choice", "Declaration", "Proposal"]

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NAME = re.compile(r"[^\s,/]+")


@frozen
class Declaration:
    """A driver on offer, given by its path, so that listing drivers imports nothing.

    Plugins that compute their list of drivers return these from a declaring hook. They set `name`,
    `target` ("package.module:attribute"), `api` and, to replace a driver of the same name from
    another package, a `priority` above 0. The framework sets the rest. `kind` is required if a hook
    serves two groups (parsers). `driver` is set only for objects registered at run time.
    """

    name: str
    target: str
    api: int | tuple[int, int] | None = None
    priority: int = 0
    kind: str = ""
    distribution: str = ""
    version: str = ""
    source: str = "hook"
    driver: Any = field(default=None, repr=False, eq=False)

    @property
    def origin(self) -> str:
        """The distribution that offers it, for messages: "modulm-foo 0.1.0"."""
        return f"{self.distribution} {self.version}".strip() or self.source

    def __str__(self) -> str:
        return f"{self.kind}/{self.name} ({self.origin})"

    def check(self) -> Declaration:
        """Return self. Raises PluginBroken for an invalid name, target, API or priority."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise PluginBroken(
                f"{self.origin} declares a driver called {self.name!r}: "
                "a name has no space, comma or slash and is not empty"
            )
        if not isinstance(self.target, str) or not _TARGET.fullmatch(self.target):
            raise PluginBroken(
                f"{self}: target {self.target!r} is not of the form 'package.module:attribute'"
            )
        if not isinstance(self.priority, int):
            raise PluginBroken(f"{self}: priority {self.priority!r} is not an integer")
        return self


@frozen
class Choice:
    """The answer of a choosing hook: a driver's name and why it was chosen.

    The framework fills in `by`, the plugin that answered.
    """

    name: str = field(validator=instance_of(str))
    reason: str = field(validator=instance_of(str))
    by: str = field(default="", eq=False)

    def __str__(self) -> str:
        return f"{self.reason}; chosen by {self.by}" if self.by else self.reason


@frozen
class Proposal:
    """A value that a plugin proposes for a flag that the user left open.

    `field` is the flag's name with underscores. A flag that the user gave is never changed.
    """

    field: str
    value: Any
    reason: str


@frozen
class Check:
    """One finding of `modulm plugins doctor`: what was looked at, whether it is well, and why."""

    subject: str
    ok: bool
    message: str = ""
