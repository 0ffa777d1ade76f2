"""Manifests of packages: a file `modulm.toml` beside the `__init__.py` of a plugin package.

    modulm = "0.1"                # the first version that it was tested with
    memory = "512MiB"             # what it may allocate in a process of its own (`--isolate`)
    [contracts]
    kv_connectors = [2, 3]        # the lowest and highest version of each kind's contract
    [needs]
    network = ["example.org"]     # hosts, or "*"
    files = ["/var/cache/foo"]    # folders outside of its own
    devices = ["cuda"]
    subprocesses = ["git"]        # programs, or "*"

A manifest says what its author states. `modulm plugins doctor` compares it with the source, and
`modulm plugins list` shows it. Reading one imports nothing. Those of this project's packages are
written by tools/workspace.py, from `[tool.modulm]` in their pyproject.toml.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from attrs import asdict, field, frozen
from packaging.version import InvalidVersion, Version

import modulm
from modulm.errors import ConfigError
from modulm.plugins.declaration import Declaration
from modulm.structure import Problem, structure_table
from modulm_command_plugins.migrate import sources
from modulm_command_plugins.source_needs import shown_needs
from modulm_command_plugins.static_api import contract_version, module_file, stated_api

__all__ = ["Manifest", "Needs", "manifest_problems", "read_manifest", "stated_needs"]

FILE = "modulm.toml"


@frozen
class Needs:
    """What a package uses besides its own code and folder."""

    network: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    subprocesses: tuple[str, ...] = ()

    def text(self) -> str:
        """The needs on one line: "network (example.org), subprocesses (*)"."""
        return ", ".join(
            f"{name} ({' '.join(items)})" for name, items in asdict(self).items() if items
        )


@frozen
class Manifest:
    """The contents of a manifest. contracts: kind -> lowest and highest version."""

    modulm: str = ""
    memory: str = ""
    contracts: Mapping[str, tuple[int, int]] = field(factory=dict)
    needs: Needs = field(factory=Needs)


def read_manifest(declaration: Declaration) -> Manifest | None:
    """Read the manifest of the package that offers a plugin; None if it has none.

    Raises ConfigError naming the file for a table that is none.
    """
    folder = _folder(declaration)
    return None if folder is None else _read(folder / FILE)


def stated_needs(declaration: Declaration) -> str:
    """Return the needs of a package on one line: "" without any, "?" if its manifest is wrong.

    Most packages need nothing; their files are not parsed, since a list has hundreds of them.
    """
    folder = _folder(declaration)
    if folder is None or not _mentions_needs(folder / FILE):
        return ""
    try:
        manifest = read_manifest(declaration)
    except ConfigError:
        return "?"
    return "" if manifest is None else manifest.needs.text()


@cache
def _mentions_needs(path: Path) -> bool:
    """Whether there are strings after `[needs]`, or no such table where it is expected."""
    try:
        _, table, needs = path.read_bytes().partition(b"\n[needs]\n")
    except OSError:
        return path.exists()
    return not table or b'"' in needs


def _folder(declaration: Declaration) -> Path | None:
    """The folder of the package that offers a plugin; None for a module that is one file."""
    package = declaration.target.partition(":")[0].partition(".")[0]
    for folder in _folders(tuple(sys.path)).get(package, ()):
        if (folder / "__init__.py").is_file():
            return folder
    start = module_file(package)
    return start.parent if start is not None and start.name == "__init__.py" else None


@cache
def _folders(path: tuple[str, ...]) -> Mapping[str, list[Path]]:
    """Return the folders below `sys.path` by name: a look-up by Python's finders costs a
    millisecond for each package where all are editable.
    """
    folders: defaultdict[str, list[Path]] = defaultdict(list)
    for entry in path:
        try:
            with os.scandir(entry or ".") as items:
                for item in items:
                    if item.name.isidentifier() and item.is_dir():
                        folders[item.name].append(Path(item.path))
        except OSError:
            continue
    return folders


@cache
def _read(path: Path) -> Manifest | None:
    try:
        return structure_table(tomllib.loads(path.read_text(encoding="utf-8")), Manifest)
    except FileNotFoundError:
        return None
    except (Problem, ValueError, OSError) as error:
        raise ConfigError("manifest", f"{path} is not valid: {error}") from error


def manifest_problems(declaration: Declaration) -> Iterator[str]:
    """Yield what is wrong with a package's manifest, as far as one plugin of it goes."""
    try:
        manifest = read_manifest(declaration)
    except ConfigError as error:
        yield error.message
        return
    if manifest is None:
        return
    version, stated = contract_version(declaration.kind), stated_api(declaration)
    span = manifest.contracts.get(declaration.kind)
    if version is not None and span is None:
        yield f"{FILE}: [contracts] has no range for {declaration.kind}"
    elif span is not None and stated is not None:
        written = stated if isinstance(stated, tuple) else (stated, stated)
        if written != span:
            yield f"{FILE}: {declaration.kind} is {list(span)}, the driver's api is {list(written)}"
    yield from _unstated_needs(declaration, manifest.needs)
    try:
        if manifest.modulm and Version(manifest.modulm) > Version(modulm.__version__):
            yield f"{FILE}: it needs modulm {manifest.modulm}, this is {modulm.__version__}"
    except InvalidVersion:
        yield f"{FILE}: modulm = {manifest.modulm!r} is no version"


def _unstated_needs(declaration: Declaration, needs: Needs) -> Iterator[str]:
    """Yield the needs that a package's source shows and its manifest does not state."""
    folder = _folder(declaration)
    for need, (file, line, name) in shown_needs(sources(folder) if folder else ()).items():
        if not getattr(needs, need):
            where = file.relative_to(folder) if folder else file
            yield f"{FILE}: [needs] {need} is empty, and {where}:{line} uses {name}"
