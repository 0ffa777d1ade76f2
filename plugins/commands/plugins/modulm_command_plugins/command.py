"""`modulm plugins`: what is installed, one of them in detail, whether they work, a new one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from modulm import plugins
from modulm.errors import PluginError, PluginNotFound
from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import find_kind, kind_names

__all__ = ["command"]


@click.group("plugins", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, inspect, check and make plugins."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_plugins)


@command.command("list")
@click.argument("kind", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(kind: str | None = None, as_json: bool = False) -> None:
    """List installed plugins, of one KIND or of all. Imports none of them."""
    rows = [_row(d) for d in _of_kind(kind)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        _table(rows, ("kind", "name", "distribution", "version", "state"))
    else:
        click.echo(f"No plugin of kind {kind} is installed.", err=True)


@command.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str, as_json: bool) -> None:
    """Show the plugins called NAME (a driver, kind/name or a distribution). Imports them."""
    rows = [_row(d) | _inside(d) for d in _matching(name)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        width = max(map(len, row))
        click.echo("\n".join(f"{key:{width}}  {value}" for key, value in row.items() if value))
        click.echo()


@command.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--kit/--no-kit", default=True, help="Run the contract kits (the slow part).")
@click.pass_context
def doctor(ctx: click.Context, name: str | None, as_json: bool, kit: bool) -> None:
    """Import each plugin in a process of its own and run its contract kit.

    Checks import, contract version, conflicts of names and the contract itself. Exits 1 if
    anything is wrong.
    """
    from modulm_command_plugins.doctor import examine

    reports = []
    for report in examine(_matching(name) if name else _of_kind(None), kit=kit):
        reports.append(report)
        if not as_json:
            click.echo(report.line())
    if as_json:
        click.echo(json.dumps([report.as_data() for report in reports], indent=2))
    ctx.exit(0 if all(report.ok for report in reports) else 1)


@command.command()
@click.argument("kind")
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder in which the package's folder is made; default here.",
)
def new(kind: str, name: str, into: Path) -> None:
    """Write a package called NAME that adds a driver of KIND and passes its own tests."""
    from modulm_command_plugins.template import render

    folder = render(kind, name, into)
    click.echo(
        f"wrote {folder}\n\n"
        f"  pip install -e {folder}      the driver is now found by name\n"
        f"  pytest {folder}              its contract holds\n"
        f"  modulm plugins show {name}"
    )


def _of_kind(kind: str | None) -> list[Declaration]:
    if kind is not None and kind != "hooks":
        find_kind(kind)
    order = ["hooks", *kind_names()]
    everything = plugins.current().everything()
    found = [d for d in everything if d.kind in order and kind in (None, d.kind)]
    return sorted(found, key=lambda d: (order.index(d.kind), d.name, d.distribution))


def _matching(name: str) -> list[Declaration]:
    everything = _of_kind(None)
    found = [d for d in everything if name in (d.name, f"{d.kind}/{d.name}", d.distribution)]
    if found:
        return found
    from difflib import get_close_matches

    known = sorted({d.name for d in everything} | {d.distribution for d in everything})
    close = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "see `modulm plugins list`"
    raise PluginNotFound(f"no installed plugin is called {name!r}; {hint}")


def _row(declaration: Declaration) -> dict[str, str]:
    return {
        "kind": declaration.kind,
        "name": declaration.name,
        "distribution": declaration.distribution,
        "version": declaration.version,
        "state": _state(declaration),
        "target": declaration.target,
    }


def _state(declaration: Declaration) -> str:
    manager = plugins.current()
    if not manager.selection.permits(declaration):
        return "off"
    wanted = (declaration.kind, declaration.name, declaration.priority)
    same = [
        d
        for d in manager.everything()
        if (d.kind, d.name, d.priority) == wanted and manager.selection.permits(d)
    ]
    if declaration.kind != "hooks" and len({d.target for d in same}) > 1:
        return "conflict"
    return "ok"


def _inside(declaration: Declaration) -> dict[str, str]:
    """What only importing the plugin shows."""
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
        "options": ", ".join(a.name for a in getattr(config, "__attrs_attrs__", ())),
    }


def _table(rows: Iterable[dict[str, str]], columns: Sequence[str]) -> None:
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = (f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
