"""Portable attention over paged memory for modulm, in torch."""
