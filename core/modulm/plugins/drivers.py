"""Lists the drivers that distributions offer, without imports, and imports single ones.

stevedore imports drivers and hook plugins, with one `DriverManager` for each (`extension.py`). The
entry point is selected here, because stevedore does not know an entry point's distribution (needed
for lists, selections, conflicts and messages), imports all providers of a name before it checks for
conflicts, and has a disk cache that misses reinstallations within 128 seconds (ADR 0030).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import Distribution, distributions
from typing import Any

from modulm.errors import PluginBroken
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import is_first_party, normalized
from modulm.plugins.kinds import kind_of
from modulm.plugins.moved import public_name

__all__ = ["import_driver", "installed"]

_HEADER = re.compile(r"^(Name|Version):\s*(\S+)", re.MULTILINE)


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Read name and version from the metadata's head; parsing all of it is 50 times slower."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fields = dict(reversed(_HEADER.findall(text)))
    return fields.get("Name", "an unnamed distribution"), fields.get("Version", "?")


def installed() -> Iterator[Declaration]:
    """Yield every driver and hook plugin of installed distributions, in path order.

    Of a distribution that is on the path twice, only the first counts, as for imports.
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
    """Import the target of a declaration. Raises PluginBroken naming the distribution."""
    if declaration.driver is not None:
        return declaration.driver
    from modulm.plugins.extension import PickedDriver

    while True:
        try:
            return PickedDriver(declaration).extensions[0].plugin
        except PluginBroken as error:
            if is_first_party(declaration.distribution) or not _keep_old_name(error.__cause__):
                raise


def _keep_old_name(error: BaseException | None) -> bool:
    """Make an old name of modulm work that a package imports; see `modulm_plugin_lock`."""
    with suppress(ImportError):
        return bool(public_name("modulm_plugin_lock", "keep_old_name", __name__)(error))
    return False
