"""The `modulm` command: a group whose commands are plugins, imported when they are typed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

import click

from modulm import __version__, plugins
from modulm.errors import ModulmError, PluginError
from modulm.plugins.calls import blame
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import install_hint, is_first_party

__all__ = ["CommandGroup", "cli", "main"]

_INTERRUPTED = 130
_USAGE = 2


class CommandGroup(click.Group):
    """Finds its commands in the entry-point group `modulm.commands`.

    A command that cannot be imported is shown as broken in the help and fails only when typed.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands; imports none of them."""
        return list(dict.fromkeys(d.name for d in plugins.current().names("commands")))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command. Raises a PluginError if it is broken."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command = plugins.current().load("commands", cmd_name)
        if not isinstance(command, click.Command):
            raise PluginError(
                f"command {cmd_name!r} of {plugins.current().find('commands', cmd_name).origin} "
                "is not a click command"
            )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; the error says what to install, or close matches."""
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            if any(d.name == name for d in plugins.current().everything() if d.kind == "commands"):
                ctx.fail(f"{name!r} is disabled by --plugins={plugins.current().selection}")
            if hint := install_hint("commands", name):
                ctx.fail(f"{name!r} is not installed: {hint}")
            close = get_close_matches(name, self.list_commands(ctx), n=2)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line per command; a broken one gets its error instead of its help."""
        rows = [(name, self._short_help(ctx, name)) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def _short_help(self, ctx: click.Context, name: str) -> str:
        try:
            command = self.get_command(ctx, name)
        except PluginError as error:
            return f"(broken) {error}"
        return command.get_short_help_str(limit=80) if command else ""


def _select(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None and not ctx.resilient_parsing:
        plugins.configure(value)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--plugins",
    metavar="NAMES",
    is_eager=True,
    expose_value=False,
    callback=_select,
    help="Use only these plugins (a,b) or all but some (-c). Default: $MODULM_PLUGINS.",
)
@click.version_option(__version__, "-v", "--version", prog_name="modulm")
def cli() -> None:
    """modulm: LLM inference and serving in which every replaceable part is a plugin."""


def main(arguments: Sequence[str] | None = None, name: str = "modulm") -> NoReturn:
    """Run the command line and exit: 2 for what the user can put right, 130 for Ctrl-C."""
    try:
        result = cli.main(arguments, prog_name=name, standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ModulmError as error:
        click.echo(f"{name}: {error}", err=True)
        sys.exit(_USAGE)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if (culprit := blame(error, _others())) is None:
            raise
        click.echo(f"{name}: {culprit}", err=True)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _others() -> list[Declaration]:
    """Return the plugins of other projects, to name them in their errors."""
    return [d for d in plugins.current().everything() if not is_first_party(d.distribution)]


if __name__ == "__main__":
    main()
