"""Manifests of this repository's packages: `[tool.modulm]` in pyproject.toml, and `modulm.toml`.

`modulm` and `needs` are written by hand; contract versions come from the source. `sync` writes both
tables and the file beside `__init__.py`, which wheels contain; `problems` lists what differs, and
needs that the source shows and the table lacks. Used by tools/workspace.py.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "plugins/commands/plugins"))

from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import kind_of
from modulm_command_plugins.migrate import sources
from modulm_command_plugins.source_needs import shown_needs
from modulm_command_plugins.static_api import contract_version, stated_api

__all__ = ["problems", "synced", "text"]

_HEAD = "# Written by tools/workspace.py sync, from [tool.modulm] in pyproject.toml.\n"
NEEDS = ("network", "files", "devices", "subprocesses")


def _contracts(project: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return kind -> lowest and highest version that all drivers of the package state."""
    ranges: dict[str, list[int]] = {}
    for group, points in sorted(project.get("entry-points", {}).items()):
        kind = kind_of(group)
        version = None if kind is None else contract_version(kind)
        if kind is None or version is None:
            continue
        for name, target in points.items():
            stated = stated_api(Declaration(name, target, kind=kind)) or version
            low, high = stated if isinstance(stated, tuple) else (stated, stated)
            known = ranges.get(kind, [low, high])
            ranges[kind] = [max(low, known[0]), min(high, known[1])]
    return ranges


def synced(folder: Path, version: str) -> dict[str, Any]:
    """Return the manifest of the package in a folder; the rest of the table stays as written.

    version: of this repository. Needs that the source shows and the table lacks become "*".
    """
    table = tomllib.loads((folder / "pyproject.toml").read_text())
    written = table.get("tool", {}).get("modulm", {})
    needs = {name: written.get("needs", {}).get(name, []) for name in NEEDS}
    for name in shown_needs(sources(folder)):
        needs[name] = needs[name] or ["*"]
    sys.path.insert(0, str(folder))
    try:
        contracts = _contracts(table["project"])
    finally:
        sys.path.remove(str(folder))
    return {
        "modulm": written.get("modulm", ".".join(version.split(".")[:2])),
        "contracts": contracts,
        "needs": {name: items for name, items in needs.items() if items},
    }


def text(manifest: Mapping[str, Any]) -> str:
    """Return the content of `modulm.toml`."""
    lines = [_HEAD + f'modulm = "{manifest["modulm"]}"\n']
    for name in ("contracts", "needs"):
        lines.append(f"\n[{name}]\n")
        lines += [f"{key} = {json.dumps(value)}\n" for key, value in manifest[name].items()]
    return "".join(lines)


def table_text(manifest: Mapping[str, Any]) -> str:
    """Return the table of a pyproject.toml."""
    inline = {
        name: ", ".join(f"{key} = {json.dumps(value)}" for key, value in manifest[name].items())
        for name in ("contracts", "needs")
    }
    lines = [f'modulm = "{manifest["modulm"]}"', *(f"{k} = {{{v}}}" for k, v in inline.items())]
    return "[tool.modulm]\n" + "".join(f"{line}\n" for line in lines)


def with_table(project: str, manifest: Mapping[str, Any]) -> str:
    """Return a pyproject.toml with the table, in place of one that is there."""
    rest = re.sub(r"\n*^\[tool\.modulm\]\n(?:(?!\[).*\n?)*", "\n", project, count=1, flags=re.M)
    return f"{rest.rstrip()}\n\n{table_text(manifest)}"


def problems(folder: Path, package: str, version: str) -> Iterator[str]:
    """Yield what is wrong with a package's manifest, as `PATH: message`."""
    table = tomllib.loads((folder / "pyproject.toml").read_text())
    written = table.get("tool", {}).get("modulm", {})
    wanted = synced(folder, version)
    if written != wanted:
        names = [key for key in wanted if written.get(key) != wanted[key]]
        yield f"[tool.modulm]: {', '.join(names) or 'its keys'} differ from the source; run sync"
    file = folder / package / "modulm.toml"
    if not file.is_file() or file.read_text() != text(wanted):
        yield f"{package}/modulm.toml is not as [tool.modulm] says; run sync"
