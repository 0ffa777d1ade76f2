"""Plugins that run in processes of their own (`--isolate`).

The plugin manager asks this package for a *stand-in* instead of importing an isolated driver: an
object of the same contract that sends each call to the package's process.
"""

from modulm_isolation.terms import IsolationError, Limits, check_isolation, parse_term

__all__ = ["IsolationError", "Limits", "check_isolation", "parse_term"]
