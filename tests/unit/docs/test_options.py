"""Options of our commands that the pages name are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from modulm.cli.main import cli
from modulm.config.schema.catalog import catalog

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
CALL = re.compile(r"(?:^|`|\s)modulm((?: +(?!\|)[^`|\n#]+)?)")
OPTION = re.compile(r"(?<![\w-])--([a-z][\w-]*)")


def calls(text: str) -> Iterator[list[str]]:
    """The words after `modulm` wherever a page shows a command."""
    for match in CALL.finditer(text):
        yield match[1].split()


def options_of(arguments: list[str]) -> set[str] | None:
    """Long options of the command that the words begin with; None if they begin with none."""
    context = click.Context(cli)
    command: click.Command | None = cli
    for word in arguments:
        if not isinstance(command, click.Group):
            break
        if not word.startswith("-"):
            command = command.get_command(context, word)
    if command is None or command is cli:
        return None
    names = {name for param in command.get_params(context) for name in
             (*param.opts, *param.secondary_opts)}  # fmt: skip
    names |= {option for param in cli.params for option in param.opts} | {"--help"}
    if hasattr(command, "flag_options"):
        known = {
            *catalog().specs,
            *catalog().tables,
            *(spec.name for spec in catalog().elsewhere()),
        }
        names |= {"--" + name.replace("_", "-") for name in known}
        names |= {"--no-" + name.replace("_", "-") for name in known}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_options_are_there(page: Path) -> None:
    for arguments in calls(page.read_text(encoding="utf-8")):
        names = options_of(arguments)
        for option in OPTION.findall(" ".join(arguments)) if names else ():
            assert f"--{option}" in (names or ()), f"modulm {' '.join(arguments)}"


def test_a_wrong_option_is_found() -> None:
    (arguments,) = calls("then `modulm parse --tool-reader arrows` does the same")
    names = options_of(arguments)
    assert names is not None
    assert "--tool-reader" not in names
    assert "--tool-call-parser" in names
