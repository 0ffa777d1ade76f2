"""Operations: what each one means (the twins) and which kernel computes it here (the table)."""

from modulm.ops.table import OpTable, bind

__all__ = ["OpTable", "bind"]
