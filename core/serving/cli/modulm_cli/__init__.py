"""Base classes for commands that take the engine's flags. Cheap to import."""

from modulm_cli.options import FlagCommand, print_notices

__all__ = ["FlagCommand", "print_notices"]
