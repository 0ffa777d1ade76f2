"""Speculative decoding from earlier answers."""
