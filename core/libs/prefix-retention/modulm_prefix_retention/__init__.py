"""Holds cached prefixes that requests name, for as long as they ask."""

from modulm_prefix_retention.marks import FIELD, Mark, marks_of, with_marks

__all__ = ["FIELD", "Mark", "marks_of", "with_marks"]
