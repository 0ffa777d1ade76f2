"""Pallas kernels for TPUs: paged attention, cache writes, linear layers of codes, experts.

Importing this package does not import JAX; its modules do.
"""
