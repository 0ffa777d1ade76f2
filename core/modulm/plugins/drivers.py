"""Entry points, read without importing anything, and the import of one of them.

Importing goes through stevedore's DriverManager, which imports the named entry point and no
other. Three of its habits are worked around here: it keeps a listing per process and on disk that
does not know distributions (so `_Pinned` is given the entry point that was picked), it imports
every provider of a name before it looks for conflicts (so conflicts are found on the listing),
and `.driver` confuses a false object with no object (so the extension's `plugin` is taken).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from modulm.errors import PluginBroken
from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import kind_of

__all__ = ["import_driver", "installed", "normalized"]

_HEADER = re.compile(r"^(Name|Version):\s*(\S+)", re.MULTILINE)


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Name and version from the head of the metadata; parsing all of it takes 50 times longer."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fields = dict(reversed(_HEADER.findall(text)))
    return fields.get("Name", "an unnamed distribution"), fields.get("Version", "?")


def installed() -> Iterator[Declaration]:
    """Every driver and hook plugin that an installed distribution offers, in path order.

    A distribution found twice on the path counts once, as the interpreter imports only the first.
    """
    seen = set()
    for distribution in distributions():
        text = distribution.read_text("entry_points.txt")
        if not text or "[modulm" not in text:
            continue
        name, version = _identity(distribution)
        if normalized(name) in seen:
            continue
        seen.add(normalized(name))
        for point in distribution.entry_points:
            kind = kind_of(point.group)
            if kind is not None:
                yield Declaration(
                    name=point.name,
                    target=point.value,
                    kind=kind,
                    distribution=name,
                    version=version,
                    source="entry point",
                )


def import_driver(declaration: Declaration) -> Any:
    """Import what a declaration points at. Raises PluginBroken, which names the distribution."""
    if declaration.driver is not None:
        return declaration.driver
    from stevedore.driver import DriverManager

    point = EntryPoint(declaration.name, declaration.target, f"modulm.{declaration.kind}")

    class _Pinned(DriverManager[Any]):
        def list_entry_points(self) -> list[EntryPoint]:
            return [point]

    try:
        return _Pinned(point.group, point.name).extensions[0].plugin
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"{declaration} cannot be imported from {declaration.target!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
