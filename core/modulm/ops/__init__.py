"""Ops: their specification (twins) and the table that binds each to a kernel."""

from modulm.ops.table import OpTable, bind

__all__ = ["OpTable", "bind"]
