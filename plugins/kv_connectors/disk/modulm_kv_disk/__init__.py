"""Blocks of the KV cache in files."""
