"""Names that two installed distributions offer, also where nobody has used them yet."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from modulm.errors import PluginConflict

if TYPE_CHECKING:
    from modulm.plugins import Declaration, PluginManager

__all__ = ["name_conflicts"]


def name_conflicts(manager: PluginManager) -> dict[str, str]:
    """Return "kind/name" -> what is wrong, of plugins that `--plugins` permits. Imports nothing.

    Conflicts of hook plugins, and of drivers that these declare, are known once they are loaded.
    """
    offers: defaultdict[tuple[str, str], list[Declaration]] = defaultdict(list)
    for declaration in manager.everything():
        if declaration.kind != "hooks" and manager.selection.permits(declaration):
            offers[declaration.kind, declaration.name].append(declaration)
    conflicts = {
        f"hooks/{name}": str(error)
        for name, error in manager.problems.items()
        if isinstance(error, PluginConflict)
    }
    for (kind, name), declarations in offers.items():
        highest = max(d.priority for d in declarations)
        best = [d for d in declarations if d.priority == highest and d.source != "registered"]
        if len({d.target for d in best}) > 1:
            conflicts[f"{kind}/{name}"] = (
                f"{kind}/{name} is provided by {' and by '.join(d.origin for d in best)}, and "
                f"whoever names it gets an error; disable one: --plugins=-{best[-1].distribution}"
            )
    return dict(sorted(conflicts.items()))
