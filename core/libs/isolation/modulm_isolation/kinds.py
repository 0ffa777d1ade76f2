"""The kind of isolators: one for each kind of drivers that can run in another process."""

from modulm.plugins.kinds import Kind

__all__ = ["ISOLATORS"]

#: Drivers are functions of a declaration and its term of `--isolate` that return the stand-in.
ISOLATORS = Kind("isolators", "isolator", "isolator")
