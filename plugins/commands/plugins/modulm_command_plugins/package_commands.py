"""`modulm plugins install`, `uninstall`, `search`, `outdated`, `index` and `migrate`."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modulm import plugins
from modulm.errors import ConfigError, PluginNotFound
from modulm.plugins.index import is_first_party, normalized
from modulm.plugins.selection import offers_of
from modulm_command_plugins.tables import print_table

if TYPE_CHECKING:
    from modulm_command_plugins.package_index import Entry, PackageIndex

__all__ = ["COMMANDS"]

#: Maximum number of packages that an error lists.
_FEW = 5

_indexes = click.option(
    "--index",
    "sources",
    multiple=True,
    metavar="PATH|URL",
    help="Further index of packages, a JSON file. May be repeated.",
)
_python = click.option(
    "--python", default=sys.executable, metavar="PATH", help="Environment. Default: this one."
)
_dry_run = click.option("--dry-run", is_flag=True, help="Print the command and run nothing.")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _read(sources: Sequence[str]) -> list[PackageIndex]:
    from modulm_command_plugins.package_index import first_party, read_index

    return [first_party(), *map(read_index, sources)]


@click.command()
@click.argument("packages", nargs=-1, required=True)
@_indexes
@_python
@_dry_run
@click.option("--unlisted", is_flag=True, help="Install names that no index lists, too.")
@click.option("--any-version", is_flag=True, help="Let installed packages be replaced.")
@click.option("--installer-option", "more", multiple=True, help="Option for uv or pip.")
@click.option("--require-attestations", is_flag=True, help="Only wheels with an attestation.")
@click.option(
    "--trust-root",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="trusted_root.json of the Sigstore that signs. Default: the public one's.",
)
def install(
    packages: tuple[str, ...],
    sources: tuple[str, ...],
    python: str,
    dry_run: bool,
    unlisted: bool,
    any_version: bool,
    more: tuple[str, ...],
    require_attestations: bool,
    trust_root: Path | None,
) -> None:
    """Install plugin packages with uv, or else pip.

    PACKAGES are names in an index, wheels, folders, or git+https URLs. The command is printed
    before it runs. Wheels of an index must have the digest that it lists, and the attestation if it
    lists one. Installed packages keep their versions. Installing runs code of the package only if
    it is no wheel.
    """
    from attrs import evolve

    from modulm_command_plugins.installer import constraints, install_command, run

    indexes = _read(sources)
    if require_attestations:
        indexes = [evolve(index, requires_attestations=True) for index in indexes]
    with tempfile.TemporaryDirectory(prefix="modulm-install-") as name:
        folder = Path(name)
        pairs = [
            _requirement(package, indexes, folder, unlisted, trust_root) for package in packages
        ]
        limits = None
        if not any_version:
            limits = folder / "constraints.txt"
            changing = {normalized(own) for own, _ in pairs if own}
            limits.write_text(constraints(changing), encoding="utf-8")
        command = install_command([text for _, text in pairs], limits, python, more)
        click.echo(shlex.join(command))
        if not dry_run and (status := run(command)):
            raise SystemExit(status)
    if not dry_run:
        names = [own for own, _ in pairs if own]
        click.echo(f"Check: modulm plugins doctor {' '.join(names)}".rstrip())


def _requirement(
    package: str,
    indexes: Sequence[PackageIndex],
    folder: Path,
    unlisted: bool,
    trust_root: Path | None,
) -> tuple[str, str]:
    """Return the name, "" if unknown, and what the installer is given. Raises PluginNotFound."""
    from modulm_command_plugins.attestations import describe_publisher
    from modulm_command_plugins.package_index import fetch

    if all(index.requires_attestations for index in indexes) and (
        Path(package).exists() or "://" in package
    ):
        raise ConfigError(
            "packages", f"{package} is in no index, so nothing says by whom it must be attested"
        )
    if package.startswith("git+") or "://" in package:
        return "", package
    if Path(package).exists() and ("/" in package or package.endswith(".whl")):
        path = Path(package).resolve()
        return path.name.partition("-")[0] if path.suffix == ".whl" else "", str(path)
    name, _, version = package.partition("==")
    releases = [
        (index, entry)
        for index in _indexes_of(name, indexes)
        for entry in index.releases(name)
        if version in ("", entry.version)
    ]
    for index, entry in releases:
        if entry.misfits():
            continue
        if entry.url:
            path, attested = fetch(entry, index, folder, trust_root)
            if attested:
                click.echo(f"{path.name} is attested by {describe_publisher(entry.publisher)}")
            return entry.name, str(path)
        if index.requires_attestations:
            raise ConfigError(
                "packages", f"{package} is installed by its name, without an attestation to check"
            )
        return entry.name, f"{entry.name}=={entry.version}"
    if releases:
        wrong = "; ".join(releases[0][1].misfits())
        raise ConfigError("packages", f"{package} was written for other contracts: {wrong}")
    if unlisted:
        return name, package
    known = sorted({entry.name for index in indexes for entry in index.packages})
    close = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "--unlisted installs it anyway"
    raise PluginNotFound(f"{package} is in no index, and no file or folder; {hint}")


def _indexes_of(name: str, indexes: Sequence[PackageIndex]) -> list[PackageIndex]:
    """Return the indexes that count for a name, best first: for this project's only its own."""
    return [indexes[0]] if is_first_party(name) else list(reversed(indexes))


@click.command()
@click.argument("names", nargs=-1, required=True)
@_python
@_dry_run
@click.option("--force", is_flag=True, help="Also if other installed packages need it.")
def uninstall(names: tuple[str, ...], python: str, dry_run: bool, force: bool) -> None:
    """Remove plugin packages. NAMES are distributions, drivers or kind/name."""
    from modulm_command_plugins.installer import dependents, run, uninstall_command

    removed = list(dict.fromkeys(_distribution(name) for name in names))
    for name in removed:
        others = sorted(set(dependents(name)) - set(removed))
        if others and not force:
            shown = ", ".join(others[:_FEW]) + (", ..." if len(others) > _FEW else "")
            raise ConfigError("names", f"{name} is needed by {shown}; --force removes it anyway")
    command = uninstall_command(removed, python)
    click.echo(shlex.join(command))
    if not dry_run and (status := run(command)):
        raise SystemExit(status)


def _distribution(name: str) -> str:
    """Return the plugin package that a name means. Raises PluginNotFound for none or several."""
    declared = plugins.current().everything()
    packages = {d.distribution for d in declared if normalized(name) == normalized(d.distribution)}
    if not packages:
        packages = {d.distribution for d in declared if name in (d.name, f"{d.kind}/{d.name}")}
    if len(packages) == 1 and packages != {"modulm"}:
        return packages.pop()
    if packages:
        raise PluginNotFound(f"{name} is of several packages: {', '.join(sorted(packages))}")
    offers = {d.distribution: d.distribution for d in declared} | offers_of(declared)
    close = [offers[near] for near in get_close_matches(name, sorted(offers), n=3)]
    hint = f"did you mean {' or '.join(close)}?" if close else "see `modulm plugins list`"
    raise PluginNotFound(f"no installed plugin is called {name!r}; {hint}")


def _installed() -> dict[str, str]:
    """Return normalized name -> version of the packages that offer plugins."""
    return {
        normalized(d.distribution): d.version
        for d in plugins.current().everything()
        if d.distribution
    }


@click.command()
@click.argument("words", nargs=-1)
@_indexes
@click.option("--kind", help="Only packages that offer drivers of this kind.")
@_as_json
def search(
    words: tuple[str, ...], sources: tuple[str, ...], kind: str | None, as_json: bool
) -> None:
    """List the packages of all indexes whose name, drivers or summary contain all WORDS."""
    installed = _installed()
    rows = []
    for entry in _newest(_read(sources)):
        text = " ".join((entry.name, entry.summary, *entry.provides)).lower()
        kinds = {name.partition("/")[0] for name in entry.provides}
        if all(word.lower() in text for word in words) and (kind is None or kind in kinds):
            rows.append(_row(entry, installed.get(normalized(entry.name), "")))
    _show(rows, as_json, ("name", "version", "installed", "quality", "contracts", "summary"))


@click.command()
@_indexes
@_as_json
@click.pass_context
def outdated(ctx: click.Context, sources: tuple[str, ...], as_json: bool) -> None:
    """List installed plugin packages of which an index has a newer version; 1 if there are any."""
    from packaging.version import InvalidVersion, Version

    installed, rows = _installed(), []
    for entry in _newest(_read(sources)):
        version = installed.get(normalized(entry.name))
        try:
            newer = version is not None and Version(entry.version) > Version(version)
        except InvalidVersion:
            newer = version != entry.version
        if newer:
            rows.append(_row(entry, version or ""))
    _show(rows, as_json, ("name", "installed", "version", "contracts"))
    ctx.exit(bool(rows))


@click.command("index")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--quality",
    default="listed",
    show_default=True,
    type=click.Choice(("tested", "listed")),
    help="What the index says of all packages.",
)
@click.option(
    "--publisher",
    metavar="JSON",
    help='Who signed the .publish.attestation files beside the wheels: {"kind": "GitHub", '
    '"repository": "me/foo", "workflow": "publish.yml"}.',
)
@click.option("--require-attestations", is_flag=True, help="Wheels without one are refused.")
def make_index(
    folder: Path, quality: str, publisher: str | None, require_attestations: bool
) -> None:
    """Write FOLDER/index.json, which lists the wheels in FOLDER. Runs nothing of them.

    --quality tested says that the contract kits of all of them passed.
    """
    from attrs import evolve

    from modulm_command_plugins.package_index import describe_wheels

    index = describe_wheels(folder.glob("*.whl"), _publisher(publisher))
    entries = tuple(evolve(entry, quality=quality) for entry in index.packages)
    target = folder / "index.json"
    index = evolve(index, packages=entries, requires_attestations=require_attestations)
    target.write_text(index.text(), encoding="utf-8")
    click.echo(f"wrote {target}: {len(entries)} packages")


def _publisher(text: str | None) -> dict[str, str] | None:
    """Parse --publisher. Raises ConfigError."""
    if text is None:
        return None
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ConfigError("publisher", f"is no JSON: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
        raise ConfigError("publisher", "is no JSON object of strings")
    return table


def _newest(indexes: Sequence[PackageIndex]) -> Iterator[Entry]:
    """Yield the newest release of each package that fits this modulm, or else the newest.

    Of indexes that list the same package, the last counts.
    """
    names = dict.fromkeys(normalized(e.name) for index in indexes for e in index.packages)
    for name in names:
        listed = (index.releases(name) for index in _indexes_of(name, indexes))
        releases = next((entries for entries in listed if entries), [])
        if releases:
            yield next((entry for entry in releases if not entry.misfits()), releases[0])


def _row(entry: Entry, installed: str) -> dict[str, str]:
    return {
        "name": entry.name,
        "version": entry.version,
        "installed": installed or "-",
        "quality": entry.quality,
        "contracts": "; ".join(entry.misfits()) or "fit",
        "summary": entry.summary,
        "provides": " ".join(entry.provides),
    }


def _show(rows: list[dict[str, str]], as_json: bool, columns: Sequence[str]) -> None:
    rows.sort(key=lambda row: row["name"])
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        print_table(rows, columns)


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Print the differences and write nothing.")
@click.pass_context
def migrate(ctx: click.Context, path: Path, dry_run: bool) -> None:
    """Rewrite imports of names that have moved in this modulm.

    PATH is a Python file or a folder. Exits with 1 if something is left to change by hand.
    """
    from difflib import unified_diff

    from modulm.plugins.moved import moved
    from modulm_command_plugins.migrate import migrated, sources

    remarks = 0
    for file in sources(path):
        before = file.read_text(encoding="utf-8")
        try:
            result = migrated(before, moved())
        except SyntaxError as error:
            raise ConfigError("path", f"{file} is no Python: {error}") from error
        remarks += len(result.remarks)
        for remark in result.remarks:
            click.echo(f"{file}, {remark}", err=True)
        if result.text == before:
            continue
        if dry_run:
            lines = before.splitlines(keepends=True), result.text.splitlines(keepends=True)
            click.echo("".join(unified_diff(*lines, str(file), str(file))), nl=False)
        else:
            file.write_text(result.text, encoding="utf-8")
            click.echo(f"rewrote {file}")
    ctx.exit(bool(remarks))


COMMANDS: tuple[Any, ...] = (install, uninstall, search, outdated, make_index, migrate)
