"""Blocks of the KV cache in host memory."""
