"""`modulm plugins`: lists, shows, checks and creates plugins."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, TypeAlias

import click

from modulm import plugins
from modulm.errors import ConfigError, PluginError, PluginNotFound
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import is_first_party
from modulm.plugins.kinds import find_kind, kind_names
from modulm.plugins.records import altered_files, record_digest
from modulm.plugins.selection import offers_of
from modulm_command_plugins.package_commands import COMMANDS
from modulm_command_plugins.tables import print_table

__all__ = ["command"]

#: Declarations by kind and name.
Offers: TypeAlias = Mapping[tuple[str, str], Sequence[Declaration]]

#: Default name of a lock file.
_LOCK = "modulm-plugins.lock"


@click.group("plugins", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, inspect, check and create plugins."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_plugins)


@command.command("list")
@click.argument("kind", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--metadata", is_flag=True, help="Import nothing, not even hook plugins.")
def list_plugins(kind: str | None = None, as_json: bool = False, metadata: bool = False) -> None:
    """List installed plugins, of one KIND or of all. Imports no drivers.

    Hook plugins of third parties are imported, as at every start: they may declare drivers that
    replace installed ones.
    """
    everything = plugins.current().everything()
    hooks = (d for d in everything if d.kind == "hooks")
    if not metadata and not all(is_first_party(d.distribution) for d in hooks):
        _load_hooks()
    _note_stale()
    declarations = _of_kind(kind)
    offers = _by_name()
    rows = [_row(d, offers) for d in declarations]
    if as_json:
        whole = [{**row, **_more(d)} for row, d in zip(rows, declarations, strict=True)]
        click.echo(json.dumps(whole, indent=2))
    elif rows:
        needs = ("needs",) if any(row["needs"] for row in rows) else ()
        print_table(rows, ("kind", "name", "distribution", "version", "state", *needs))
    else:
        click.echo(f"No plugin of kind {kind} is installed.", err=True)


@command.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of the options.")
def show(name: str, as_json: bool, schema: bool) -> None:
    """Show the plugins called NAME (a driver, kind/name or a distribution). Imports them."""
    _load_hooks()
    if schema:
        click.echo(json.dumps(_schemas(_matching(name)), indent=2))
        return
    offers = _by_name()
    rows = [_row(d, offers) | _inside(d) for d in _matching(name)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        width = max(map(len, row))
        row["options"] = row.get("options", "").replace("\n", f"\n{'':{width}}  ")
        click.echo("\n".join(f"{key:{width}}  {value}" for key, value in row.items() if value))
        click.echo()


@command.command()
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--kit/--no-kit", default=True, help="Run the contract kits (the slow part).")
@click.option("--third-party", is_flag=True, help="Check only packages of third parties.")
@click.option("--jobs", type=click.IntRange(1), help="Plugins checked at a time. [processors]")
@click.option(
    "--import-timeout",
    type=float,
    default=30.0,
    show_default=True,
    help="Timeout of an import, in seconds.",
)
@click.option(
    "--kit-timeout",
    type=float,
    default=300.0,
    show_default=True,
    help="Timeout of a contract kit, in seconds.",
)
@click.option(
    "--against",
    metavar="VERSION|FOLDER",
    help="Compare with another modulm instead: read its source and the plugins', import neither.",
)
@click.pass_context
def doctor(
    ctx: click.Context,
    names: tuple[str, ...],
    as_json: bool,
    kit: bool,
    third_party: bool,
    against: str | None,
    **how: Any,
) -> None:
    """Import each plugin in a separate process and run its contract kit.

    NAMES are drivers, kind/name or distributions. Default: everything that is installed. Checks
    import, contract version, conflicts of names and the contract itself. Exits with 1 if anything
    is wrong.
    """
    from modulm_command_plugins.doctor import examine

    declarations = [d for name in names for d in _matching(name)] if names else _of_kind(None)
    unique = list(dict.fromkeys(declarations))
    if third_party:
        unique = [d for d in unique if not is_first_party(d.distribution)]
    if against is not None:
        _compare(ctx, unique, against, as_json)
        return
    reports = []
    for report in examine(unique, kit=kit, **how):
        reports.append(report)
        if not as_json:
            click.echo(report.line())
    reports.sort(key=lambda report: (report.origin, report.plugin))
    if as_json:
        click.echo(json.dumps([report.as_data() for report in reports], indent=2))
    ctx.exit(0 if all(report.ok for report in reports) else 1)


def _compare(
    ctx: click.Context, declarations: Sequence[Declaration], against: str, as_json: bool
) -> None:
    """Print what plugins must change for another modulm; exits with 1 if that is anything."""
    from modulm_command_plugins.against import packages_of_contracts, problems_against
    from modulm_command_plugins.installer import install_command, run

    with tempfile.TemporaryDirectory(prefix="modulm-against-") as name:
        folder = Path(against)
        if not folder.is_dir():
            folder = Path(name)
            wanted = [f"{package}=={against}" for package in packages_of_contracts()]
            more = ["--no-deps", "--target", name, "--quiet"]
            if run(install_command(wanted, None, sys.executable, more)):
                raise ConfigError("against", f"modulm {against} could not be fetched")
        problems = problems_against(declarations, folder)
    for declaration, found in problems.items():
        if not as_json:
            click.echo(
                f"{'FAIL' if found else 'ok  '} {declaration}: {'; '.join(found)}".rstrip(": ")
            )
    if as_json:
        rows = [{"plugin": f"{d.kind}/{d.name}", "distribution": d.distribution, "problems": found}
                for d, found in problems.items()]  # fmt: skip
        click.echo(json.dumps(rows, indent=2))
    ctx.exit(any(problems.values()))


@command.command()
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--third-party", is_flag=True, help="Check only packages of third parties.")
@click.pass_context
def verify(ctx: click.Context, names: tuple[str, ...], as_json: bool, third_party: bool) -> None:
    """Compare the files of packages with those that were installed. Imports nothing.

    NAMES are drivers, kind/name or distributions. Default: everything that is installed. Exits with
    1 if a file was changed, added or removed. The digest is what `--plugins NAME@sha256:...` pins.
    """
    declarations = [d for name in names for d in _matching(name)] if names else _of_kind(None)
    from modulm_plugin_lock.files import is_editable

    packages = sorted({(d.distribution, d.version) for d in declarations if d.distribution})
    rows = []
    for name, version in packages:
        if third_party and is_first_party(name):
            continue
        changed = altered_files(name)
        state = "editable" if is_editable(distribution(name)) else "as installed"
        rows.append(
            {
                "distribution": name,
                "version": version,
                "record_sha256": record_digest(name),
                "state": f"changed: {', '.join(changed)}" if changed else state,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        print_table(rows, ("distribution", "version", "record_sha256", "state"))
    ctx.exit(any(row["state"].startswith("changed") for row in rows))


@command.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True), default=_LOCK)
@click.option("--plugin-config", metavar="JSON", help="Options of drivers, as servers get them.")
@click.option(
    "--plugin-file",
    "plugin_files",
    multiple=True,
    metavar="PATH",
    help="File that --tool-parser-plugin or --reasoning-parser-plugin names. May be repeated.",
)
def lock(file: str, plugin_config: str | None, plugin_files: tuple[str, ...]) -> None:
    """Write the installed packages and their digests to FILE; -: to standard output.

    `modulm serve --plugins-lock FILE` starts with nothing else. The lock has versions, digests of
    files, who provides what, the selection (`modulm --plugins NAMES plugins lock`) and options.
    Imports no plugin.
    """
    from modulm.contracts.config import DeviceConfig
    from modulm_plugin_lock import take_lock

    options = DeviceConfig(plugin_config=plugin_config or {}).plugin_config  # type: ignore[arg-type]
    taken = take_lock(str(plugins.current().selection), options, plugin_files)
    text = taken.text()
    if file == "-":
        click.echo(text, nl=False)
        return
    Path(file).write_text(text, encoding="utf-8")
    click.echo(f"wrote {file}: {len(taken.packages)} packages", err=True)


@command.command()
@click.argument("kind")
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder to create the package in. Default: the current folder.",
)
def new(kind: str, name: str, into: Path) -> None:
    """Write a package called NAME that adds a driver of KIND and passes its own tests."""
    from modulm_command_plugins.template import names_of, render

    folder = render(kind, name, into)
    click.echo(
        f"wrote {folder}\n\n"
        f"  pip install -e {folder} pytest-modulm      the driver is now found by name\n"
        f"  pytest {folder}                            its contract holds\n"
        f"  modulm plugins show {names_of(kind, name).driver}"
    )


@command.command()
@click.argument("kind")
@click.argument("name")
@click.option(
    "--to",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="Folder of the package. Default: the current folder.",
)
def add(kind: str, name: str, folder: Path) -> None:
    """Write a further driver of KIND, called NAME, into a plugin package.

    Adds a module, its test, the entry point and missing dependencies.
    """
    from modulm_command_plugins.template import add as add_driver

    for path in add_driver(kind, name, folder):
        click.echo(f"wrote {path}")
    click.echo(f"\nInstall it again: its entry points have changed.\n  pip install -e {folder}")


def _of_kind(kind: str | None) -> list[Declaration]:
    if kind is not None and kind != "hooks":
        find_kind(kind)
    order = ["hooks", *kind_names()]
    ranks = {name: rank for rank, name in enumerate(order)}
    declarations = [d for d in plugins.current().everything() if kind in (None, d.kind)]
    return sorted(
        declarations, key=lambda d: (ranks.get(d.kind, -1), d.kind, d.name, d.distribution)
    )


def _load_hooks() -> None:
    """Collect the declarations of hook plugins. A plugin that fails is shown as broken."""
    try:
        plugins.current().load_hooks()
    except PluginError as error:
        click.echo(f"note: {error}", err=True)


def _note_stale() -> None:
    try:
        plugins.current().check_selection()
    except ConfigError as error:
        click.echo(f"note: --plugins: {error.message}", err=True)


def _matching(name: str) -> list[Declaration]:
    everything = _of_kind(None)
    matches = [d for d in everything if name in (d.name, f"{d.kind}/{d.name}", d.distribution)]
    if matches:
        return matches
    from difflib import get_close_matches

    offers = {d.distribution: d.distribution for d in everything} | offers_of(everything)
    close = [offers[near] for near in get_close_matches(name, sorted(offers), n=3)]
    hint = f"did you mean {' or '.join(close)}?" if close else "see `modulm plugins list`"
    raise PluginNotFound(f"no installed plugin is called {name!r}; {hint}")


def _row(declaration: Declaration, offers: Offers) -> dict[str, str]:
    from modulm_command_plugins.manifest import stated_needs

    return {
        "kind": declaration.kind,
        "name": declaration.name,
        "distribution": declaration.distribution,
        "version": declaration.version,
        "state": _state(declaration, offers),
        "needs": stated_needs(declaration),
        "target": declaration.target,
    }


def _more(declaration: Declaration) -> dict[str, Any]:
    """What only JSON shows of a declaration: the package's digest and its whole manifest."""
    from attrs import asdict

    from modulm_command_plugins.manifest import read_manifest

    try:
        manifest = read_manifest(declaration)
    except ConfigError:
        manifest = None
    digest = record_digest(declaration.distribution)
    return {"record_sha256": digest, "manifest": None if manifest is None else asdict(manifest)}


def _state(declaration: Declaration, everything: Offers) -> str:
    """Describe a declaration's state in a few words, including which driver it replaces or is
    replaced by.
    """
    manager = plugins.current()
    if not manager.selection.permits(declaration):
        return "off"
    if declaration.kind == "hooks":
        return "broken" if declaration.name in manager.problems else "ok"
    if declaration.kind not in kind_names():
        return _no_kind(declaration.kind)
    named = everything[declaration.kind, declaration.name]
    offers = [d for d in named if manager.selection.permits(d)]
    best = max(d.priority for d in offers)
    if declaration.priority < best:
        return f"replaced by {next(d.origin for d in offers if d.priority == best)}"
    if len({d.target for d in offers if d.priority == best}) > 1:
        return "conflict"
    if not is_first_party(declaration.distribution):
        from modulm_command_plugins.static_api import stale

        if why := stale(declaration):
            return f"stale: {why}"
    others = [d.origin for d in offers if d.priority < best]
    return f"in place of {' and '.join(others)}" if others else "ok"


def _by_name() -> Offers:
    """Group all declarations by kind and name."""
    groups: defaultdict[tuple[str, str], list[Declaration]] = defaultdict(list)
    for declaration in plugins.current().everything():
        groups[declaration.kind, declaration.name].append(declaration)
    return groups


def _no_kind(kind: str) -> str:
    """The problem with an entry-point group that nothing reads."""
    try:
        find_kind(kind)
    except PluginError as error:
        return str(error).partition(";")[0]
    return "ok"


def _inside(declaration: Declaration) -> dict[str, str]:
    """Details that need the plugin to be imported."""
    from modulm_command_plugins.option_schema import option_lines

    if declaration.kind == "hooks":
        return {}
    try:
        driver = plugins.current().load_declared(declaration)
    except PluginError as error:
        return {"error": str(error)}
    api = getattr(driver, "api", None)
    config = getattr(driver, "Config", None)
    return {
        "api": "" if api is None else str(api),
        "about": (driver.__doc__ or "").strip().partition("\n")[0],
        "options": "" if config is None else "\n".join(option_lines(config)),
    }


def _schemas(declarations: Sequence[Declaration]) -> dict[str, Any]:
    """Return "kind/name" -> the JSON schema of its options; drivers without any are left out."""
    from modulm_command_plugins.option_schema import schema_of

    drivers = {
        f"{d.kind}/{d.name}": plugins.current().load_declared(d)
        for d in declarations
        if d.kind != "hooks"
    }
    configs = {name: getattr(driver, "Config", None) for name, driver in drivers.items()}
    return {name: schema_of(config) for name, config in configs.items() if config is not None}


for _command in COMMANDS:
    command.add_command(_command)
