"""Manifests of packages: a file `modulm.toml` beside the `__init__.py` of a plugin package.

    modulm = "0.1"                # the first version that it was tested with
    [contracts]
    kv_connectors = [2, 3]        # the lowest and highest version of each kind's contract
    [needs]
    network = ["example.org"]     # hosts, or "*"
    files = ["/var/cache/foo"]    # folders outside of its own
    devices = ["cuda"]
    subprocesses = ["git"]        # programs, or "*"

A manifest says what its author states. `modulm plugins doctor` compares it with the source, and
`modulm plugins list` shows it. Reading one imports nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping

from attrs import asdict, field, frozen
from packaging.version import InvalidVersion, Version

import modulm
from modulm.errors import ConfigError
from modulm.plugins.declaration import Declaration
from modulm.structure import Problem, structure_table
from modulm_command_plugins.static_api import contract_version, module_file, stated_api

__all__ = ["Manifest", "Needs", "manifest_problems", "read_manifest"]

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
    contracts: Mapping[str, tuple[int, int]] = field(factory=dict)
    needs: Needs = field(factory=Needs)


def read_manifest(declaration: Declaration) -> Manifest | None:
    """Read the manifest of the package that offers a plugin; None if it has none.

    Raises ConfigError naming the file for a table that is none.
    """
    start = module_file(declaration.target.partition(":")[0].partition(".")[0])
    path = None if start is None else start.with_name(FILE)
    if path is None or start is None or start.name != "__init__.py" or not path.is_file():
        return None
    try:
        return structure_table(tomllib.loads(path.read_text(encoding="utf-8")), Manifest)
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
    try:
        if manifest.modulm and Version(manifest.modulm) > Version(modulm.__version__):
            yield f"{FILE}: it needs modulm {manifest.modulm}, this is {modulm.__version__}"
    except InvalidVersion:
        yield f"{FILE}: modulm = {manifest.modulm!r} is no version"
