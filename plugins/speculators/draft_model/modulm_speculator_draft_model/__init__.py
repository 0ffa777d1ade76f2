"""Speculative decoding with a smaller model."""
