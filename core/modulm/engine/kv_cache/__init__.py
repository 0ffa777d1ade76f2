"""Blocks of cache memory: pools, tables per row, prefix index, sizes."""
