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
    """A Click command that also takes every engine flag.

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
        """The schema's options, without those that the command defines itself."""
        from modulm_cli.flags import make_options

        return make_options(self)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options, then those of the schema."""
        return [*super().get_params(ctx), *self.flag_options]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, then replace all flag values by one `draft`."""
        from modulm_cli.flags import parse_flags

        return parse_flags(self, ctx, args, super().parse_args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, and an overview of the flags."""
        from modulm_cli.flag_help import write_overview
        from modulm_cli.flags import groups_of

        options = (param for param in self.params if isinstance(param, click.Option))
        records = [record for option in options if (record := option.get_help_record(ctx))]
        if records:
            with formatter.section("Options"):
                formatter.write_dl(records)
        write_overview(formatter, groups_of(self))


def print_notices(notices: Iterable[object]) -> None:
    """Print a line to stderr for each flag that is deprecated or has no effect."""
    for notice in notices:
        click.echo(f"note: {notice}", err=True)
