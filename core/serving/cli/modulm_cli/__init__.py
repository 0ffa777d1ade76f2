"""What commands that take the engine's flags are written with; cheap to import."""

from modulm_cli.options import FlagCommand, print_notices

__all__ = ["FlagCommand", "print_notices"]
