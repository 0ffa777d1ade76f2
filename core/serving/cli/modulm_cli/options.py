"""Click commands that take the engine's flags; loading this module does not load the schema.

`modulm --help` imports every command for its one line, so what they import must be cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import click

__all__ = ["FlagCommand", "print_notices"]


class FlagCommand(click.Command):
    """A command with every engine flag beside its own options.

    Its callback gets one argument `draft`: the configuration, with the origin of every value.
    `server` adds the flags of the HTTP server; `fixed` are flags that the command sets itself.
    """

    def __init__(
        self, *arguments: Any, server: bool = False, fixed: Sequence[str] = (), **attributes: Any
    ) -> None:
        super().__init__(*arguments, **attributes)
        self.server = server
        self.fixed = frozenset(fixed)

    @cached_property
    def flag_options(self) -> list[click.Option]:
        """Options of the schema, less those that the command defines itself."""
        from modulm_cli.flags import make_options

        return make_options(self)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Own options first, then those of the schema."""
        return [*super().get_params(ctx), *self.flag_options]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, then put one `draft` in the place of all flag values."""
        from modulm_cli.flags import parse_flags

        return parse_flags(self, ctx, args, super().parse_args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Own options, and how to see the flags: there are hundreds."""
        from modulm_cli.flag_help import write_overview
        from modulm_cli.flags import groups_of

        options = (param for param in self.params if isinstance(param, click.Option))
        own = [record for option in options if (record := option.get_help_record(ctx))]
        if own:
            with formatter.section("Options"):
                formatter.write_dl(own)
        write_overview(formatter, groups_of(self))


def print_notices(notices: Iterable[object]) -> None:
    """One line to stderr for each value that is deprecated or changes nothing."""
    for notice in notices:
        click.echo(f"note: {notice}", err=True)
