"""The contract kit for commands.

from modulm.testing.commands import check_command

def test_contract():
    check_command(command)
"""

from __future__ import annotations

import click
from click.testing import CliRunner, Result

__all__ = ["check_command"]

_USAGE = 2


def check_command(command: click.Command) -> None:
    """Run the kit: help, options and usage errors of a command and of its subcommands.

    Raises AssertionError with what was expected.
    """
    assert isinstance(command, click.Command), f"{command!r} is not a click command"
    assert command.name, "the command has no name"
    _check(command, [], command.name)


def _check(command: click.Command, path: list[str], title: str) -> None:
    assert (command.help or "").strip(), f"{title}: no help; a docstring gives it"
    shown = _invoke(command, ["--help"])
    assert shown.exit_code == 0, f"{title} --help ends with {shown.exit_code}: {shown.exception!r}"
    assert "Usage:" in shown.output, f"{title} --help does not print the usage"
    again = _invoke(command, ["--help"])
    assert again.output == shown.output, f"{title} --help differs the second time"
    _check_options(command, title)
    wrong = _invoke(command, ["--no-such-option-of-any-command"])
    assert wrong.exit_code == _USAGE, (
        f"{title} with an unknown option ends with {wrong.exit_code}, not with a usage error"
    )
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=command.name)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None, f"{title} lists {name!r} but does not have it"
            _check(subcommand, [*path, name], f"{title} {name}")


def _check_options(command: click.Command, title: str) -> None:
    seen: dict[str, str] = {}
    for parameter in command.params:
        assert parameter.name, f"{title}: a parameter has no name"
        for spelling in (*parameter.opts, *parameter.secondary_opts):
            assert spelling not in seen, f"{title}: {spelling} is declared twice"
            seen[spelling] = parameter.name
        if isinstance(parameter, click.Option):
            shown = parameter.hidden or (parameter.help or "").strip()
            assert shown, f"{title}: {parameter.opts[0]} has no help"


def _invoke(command: click.Command, arguments: list[str]) -> Result:
    return CliRunner().invoke(command, arguments)
